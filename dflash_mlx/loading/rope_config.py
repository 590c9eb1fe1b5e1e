"""The rotations of a config.json that mlx-lm's class leaves out, put into its model.

Newer configs keep theta and scaling in `rope_parameters`, in parts for kinds of layers or not. A
class may read the base and not the scaling, or a part of the scaling.
"""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.rope_utils import YarnRoPE, initialize_rope

from ..targets.internals import (
    ROPES,
    SuScaledRoPE,
    classes_of,
    has_key_projection,
    head_size,
    rescale_longrope,
)
from ..validation import is_positive, text_config

Config = dict[str, Any]

_UNSCALED = {None, "none", "default", "mrope", "proportional"}
_SCALED = {"linear", "yarn", "llama3", "dynamic"}
_LONGROPE = {"longrope", "su"}


def normalize_rope_fields(config: Config) -> Config:
    """Write a config's rotation in the fields that its mlx-lm class declares.

    Raises what mlx-lm raises for a model_type that it does not know.
    """
    text = text_config(config)
    parameters = text.get("rope_parameters")
    declared = _declared(config)
    if not isinstance(parameters, dict) or "rope_parameters" in declared:
        return config
    full = parameters.get("full_attention", parameters)
    local = parameters.get("sliding_attention", parameters)
    if not isinstance(full, dict) or not isinstance(local, dict):
        return config
    names = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    fields = {name: full.get(name) for name in names}
    if scaling_kind(full) not in _UNSCALED:  # classes ask for either name of the kind
        fields["rope_scaling"] = full | {
            "type": scaling_kind(full),
            "rope_type": scaling_kind(full),
        }
    fields["rope_local_base_freq"] = None if local is full else local.get("rope_theta")
    new_text = {}
    for name, value in fields.items():
        if value is not None and name in declared:
            new_text[name] = value
    for name, value in text.items():  # the config's own fields win
        if value is not None:
            new_text[name] = value
    return with_text(config, new_text)


def apply_ignored_rotations(name: object, model: nn.Module, config: Config) -> list[str]:
    """Compute what mlx-lm's class left out of a config's rotations, in place.

    Returns the names of the fields that stay left out.

    Args:
        name: of the model, for a warning.
        model: mlx-lm's model of the config; its weights are not read.
        config: of `normalize_rope_fields`.
    """
    text = text_config(config)
    rotation = text | (text.get("rope_parameters") or {})
    modules = dict(model.named_modules())
    ropes = {path: part for path, part in modules.items() if type(part).__name__ in ROPES}
    left_out = []
    if rotation.get("partial_rotary_factor", 1) not in (None, 1):
        attentions = {path: modules[path.rpartition(".")[0]] for path in ropes}
        if all(_turns_whole_heads(rope, attentions[path]) for path, rope in ropes.items()):
            left_out.append("partial_rotary_factor")
    is_plain = set(map(type, ropes.values())) == {nn.RoPE}
    bases = {rope.base for rope in ropes.values()} if is_plain else set()
    theta = rotation.get("rope_theta")
    if is_plain and is_positive(theta) and theta not in bases:
        left_out.append("rope_theta")
    scaling = find_scaling(text)
    if scaling is None:
        return left_out
    if not _reads_scaling(config):
        if scaling_kind(scaling) in _SCALED and is_plain:
            _scale(model, ropes=ropes, scaling=scaling, length=text.get("max_position_embeddings"))
        else:
            left_out.append("rope_scaling")
    _set_attention_factor(model, scaling)
    _set_longrope(name, model=model, scaling=scaling, text=text)
    return left_out


def _turns_whole_heads(rope: nn.Module, attention: nn.Module) -> bool:
    """Whether a rotation turns all numbers of an attention's heads; False if that is not known."""
    size = getattr(attention, "head_dim", None)
    if size is None and has_key_projection(attention):
        size = head_size(attention)
    return size is not None and getattr(rope, "dims", 0) >= size


def _set_attention_factor(model: nn.Module, scaling: Config) -> None:
    """Set YaRN's amplitude, if the config names one."""
    factor = scaling.get("attention_factor")
    if is_positive(factor):
        for rope in model.modules():
            if isinstance(rope, YarnRoPE):
                rope.mscale = factor


def _set_longrope(name: object, model: nn.Module, scaling: Config, text: Config) -> None:
    """Set LongRoPE's factors and amplitude (arXiv 2402.13753) for the model's context.

    mlx-lm has only the long factors. The short ones are for texts up to the length that the model
    was first trained with. A text cannot change over when it gets longer, because its cached keys
    are rotated already. As in vLLM, the context length decides for all texts; a warning says so if
    it takes the long factors.
    """
    ropes = [rope for rope in model.modules() if isinstance(rope, SuScaledRoPE)]
    if not ropes or scaling_kind(scaling) not in _LONGROPE:
        return
    original = (
        scaling.get("original_max_position_embeddings")
        or text.get("original_max_position_embeddings")
        or ropes[0].original_max_position_embeddings
    )
    length = text.get("max_position_embeddings") or original
    part = "short" if length <= original else "long"
    factors = {name: scaling.get(f"{name}_factor", 1.0) for name in ("short", "long")}
    stretch = scaling.get("factor") or length / original
    amplitude = 1.0
    if stretch > 1:
        amplitude = math.sqrt(1 + math.log(stretch) / math.log(original))
    configured_amplitude = scaling.get(f"{part}_mscale") or scaling.get("attention_factor")
    for rope in ropes:
        ratio = mx.array(factors[part]) / mx.array(factors["long"])
        rescale_longrope(rope, ratio, configured_amplitude or amplitude)
    if part == "long" and factors["short"] != factors["long"]:
        warnings.warn(
            f"dflash-mlx: {name} rotates by longrope's long factors at any length, as mlx-lm and "
            f"vLLM do; transformers takes the short ones up to {original:,} tokens. For short "
            f"texts alone, set max_position_embeddings to {original} in its config.json.",
            stacklevel=6,
        )


def _scale(
    model: nn.Module, ropes: dict[str, nn.Module], scaling: Config, length: int | None
) -> None:
    """Replace plain rotations by scaled ones."""
    new = {
        path: initialize_rope(rope.dims, rope.base, rope.traditional, scaling, length)
        for path, rope in ropes.items()
    }
    model.update_modules(tree_unflatten(list(new.items())))


def scaling_kind(scaling: Config) -> Any:
    """The kind of a scaling, which configs call `rope_type` or `type`."""
    return scaling.get("rope_type", scaling.get("type"))


def find_scaling(text: Config) -> Config | None:
    """The scaling of a config's rotations. None if there is none, or one per kind of layer."""
    for scaling in (text.get("rope_scaling"), text.get("rope_parameters")):
        if isinstance(scaling, dict) and scaling_kind(scaling) not in _UNSCALED:
            return scaling
    return None


def with_text(config: Config, text: Config) -> Config:
    """A config with other fields of its language model."""
    if text_config(config) is config:
        return config | text
    return config | {"text_config": text_config(config) | text}


def _declared(config: Config) -> set[str]:
    """The fields that mlx-lm's class of the language model takes."""
    text = {"model_type": config.get("model_type"), **text_config(config)}
    for part in (text, config):
        try:
            return set(inspect.signature(classes_of(part)[1]).parameters)
        except ValueError:  # a language model that only its vision model's class knows
            continue
    return set()


def _unscaled(text: Config) -> Config:
    """The fields of a config's rotations, without the scaling."""
    fields: Config = {"rope_scaling": None}
    parameters = text.get("rope_parameters")
    if isinstance(parameters, dict):
        names = ("rope_theta", "partial_rotary_factor")
        kept = {name: parameters[name] for name in names if name in parameters}
        fields["rope_parameters"] = {"type": "default"} | kept
    return fields


def _reads_scaling(config: Config) -> bool:
    """Whether mlx-lm's layers use the scaling: without it, they would compute something else."""
    model_class, arguments = classes_of(config)
    unscaled_config = with_text(config, _unscaled(text_config(config)))
    try:
        scaled_state = _state(model_class(arguments.from_dict(config)))
        unscaled_state = _state(model_class(arguments.from_dict(unscaled_config)))
    except (AttributeError, KeyError, TypeError, ValueError):
        return True  # the class cannot do without the field, so it reads it
    return scaled_state != unscaled_state


def _state(model: nn.Module) -> list[Any]:
    """The settings, other than weights, that a model's layers compute with."""
    state: list[Any] = []
    for module in model.modules():
        state.append(type(module))
        for name, value in {**module, **vars(module)}.items():
            if value is None or isinstance(value, int | float | str | tuple):
                state.append((name, str(value)))
            elif name.startswith("_") and isinstance(value, mx.array):
                state.append((name, value.tolist()))
    return state
