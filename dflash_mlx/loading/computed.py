"""What a config.json says and mlx-lm's model would leave out: computed here, or refused by name.

mlx-lm's classes take the fields that they declare, and read some of those. A rotation of another
kind or a sliding window that a class does not read would change no logit and raise no error.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.rope_utils import YarnRoPE, initialize_rope

from ..errors import ConfigError
from ..targets.internals import ROPES, KVCache, classes_of, make_prompt_cache
from ..validation import ErrorWrapper, brief, is_positive, text_config
from .reading import MODEL_ERRORS

Config = dict[str, Any]

# Fields that change a model whose class reads them -> the value that changes nothing.
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap")),
    **dict.fromkeys(("clip_qkv", "attention_multiplier", "no_rope_layers")),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1),
    **dict.fromkeys(("logit_scale", "scale_emb", "routed_scaling_factor", "n_group"), 1),
    **dict.fromkeys(("alibi", "use_alibi", "parallel_attn", "use_parallel_residual"), False),
}
# Fields that a class may compute without reading them -> part of a word of code that computes it.
_FIXED = dict.fromkeys(("final_logit_softcapping", "logits_soft_cap"), "softcap")
# Fields that change nothing in a model without experts.
_OF_EXPERTS = {"routed_scaling_factor", "n_group", "scoring_func", "moe_router_activation_func"}
# Fields that name a function: part of its name -> words of code that computes it.
_ACTIVATIONS = {"silu": "silu|swiglu|swish", "swish": "silu|swiglu|swish", "gelu": "gelu|geglu"}
_ACTIVATIONS |= {"relu": "relu"}
_SCORES = {"sigmoid": "sigmoid", "softmax": "softmax"}
_FUNCTIONS = {
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), _ACTIVATIONS),
    **dict.fromkeys(("scoring_func", "moe_router_activation_func"), _SCORES),
}
# Values that no class computes. "vision" is about images.
_NEVER: dict[str, Any] = {"is_causal": [False], "use_bidirectional_attention": [True, "all"]}
# Any of these words means that a part of a head is rotated.
_PARTLY = {"partial_rotary_factor", "rotary_dim", "rotary_pct", "qk_rope_head_dim"}
_UNSCALED = {None, "none", "default", "mrope", "proportional"}
_SCALED = {"linear", "yarn", "llama3", "dynamic"}


def spelled_for(config: Config) -> Config:
    """A config whose rotation is spelled as its mlx-lm class declares it.

    Newer configs keep theta and scaling in `rope_parameters`, in parts for kinds of layers or not.
    Raises what mlx-lm raises for a model_type that it does not know.
    """
    text = text_config(config)
    own, declared = text.get("rope_parameters"), _declared(config)
    if not isinstance(own, dict) or "rope_parameters" in declared:
        return config
    full, local = (own.get(f"{kind}_attention", own) for kind in ("full", "sliding"))
    if not isinstance(full, dict) or not isinstance(local, dict):
        return config
    found = {name: full.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    if _kind(full) not in _UNSCALED:  # classes ask for either name of the kind
        found["rope_scaling"] = full | {"type": _kind(full), "rope_type": _kind(full)}
    found["rope_local_base_freq"] = None if local is full else local.get("rope_theta")
    given = {name: value for name, value in found.items() if value is not None and name in declared}
    return _with(config, given | {name: x for name, x in text.items() if x is not None})


def model_of(name: object, config: Config) -> nn.Module:
    """The mlx-lm model of a config.json, with weights that are never computed.

    Raises `ConfigError` where this mlx-lm has no such model, or would not compute all of it.
    """
    wrong = f"{name}: mlx-lm {version('mlx-lm')} cannot run it"
    with ErrorWrapper(ConfigError, wrong, MODEL_ERRORS):
        model_class, arguments = classes_of(config := spelled_for(config))
        model: nn.Module = model_class(arguments.from_dict(config))
        complete(name, model, config)
    return model


def complete(name: object, model: nn.Module, config: Config) -> None:
    """Compute what mlx-lm's class left out of a config, or refuse it.

    A scaled rotation replaces plain ones in place.

    Args:
        name: of the model, for the message.
        model: mlx-lm's model of the config; its weights are not read.
        config: of `spelled_for`.

    Raises `ConfigError`, naming the field.
    """
    text, words = text_config(config), words_of(model)
    ignored = [
        field
        for field, neutral in _NEUTRAL.items()
        if field not in words
        and (text.get(field) or neutral) != neutral
        and not (field in _FIXED and any(_FIXED[field] in word for word in words))
    ]
    if "no_rope_layers" in ignored and _rotating(model) == [*map(bool, text["no_rope_layers"])]:
        ignored.remove("no_rope_layers")
    for field, functions in _FUNCTIONS.items():
        code = next((code for one, code in functions.items() if one in str(text.get(field))), "")
        if not any(re.search(code, word) for word in words):
            ignored.append(field)
    if not any("expert" in word for word in words):
        ignored = [field for field in ignored if field not in _OF_EXPERTS]
    ignored += [field for field, values in _NEVER.items() if text.get(field) in values]
    rotation = text | (text.get("rope_parameters") or {})
    modules = dict(model.named_modules())
    ropes = {path: one for path, one in modules.items() if type(one).__name__ in ROPES}
    if rotation.get("partial_rotary_factor", 1) not in (None, 1) and not _PARTLY & words:
        parents = [modules[path.rpartition(".")[0]] for path in ropes]
        sizes = zip(ropes.values(), parents, strict=True)
        if all(getattr(one, "dims", 0) >= getattr(parent, "head_dim", 0) for one, parent in sizes):
            ignored.append("partial_rotary_factor")
    plain = {*map(type, ropes.values())} == {nn.RoPE}
    bases = {one.base for one in ropes.values()} if plain else set()
    if plain and is_positive(rotation.get("rope_theta")) and rotation["rope_theta"] not in bases:
        ignored.append("rope_theta")
    if (scaling := _scaling(text)) and not _reads_scaling(config):
        if _kind(scaling) in _SCALED and plain:
            _scale(model, ropes, scaling, text.get("max_position_embeddings"))
        else:
            ignored.append("rope_scaling")
    if ignored:
        value = scaling if ignored[0] == "rope_scaling" else rotation[ignored[0]]
        raise ConfigError(
            f"{name}: mlx-lm's {config.get('model_type')} does not compute {ignored[0]} "
            f"({brief(value)}): it would be another model."
        )
    factor = (scaling or {}).get("attention_factor")
    for rope in model.modules() if is_positive(factor) else ():
        if isinstance(rope, YarnRoPE):
            rope.mscale = factor


def bounded(name: object, model: nn.Module, config: Config) -> Config:
    """A config whose context ends where a window begins that mlx-lm does not compute.

    Up to there, the model is the same. Args as for `complete`.
    """
    text, words = text_config(config), words_of(model)
    length, chunks = text.get("max_position_embeddings"), text.get("dual_chunk_attention_config")
    chunk = chunks.get("chunk_size") if isinstance(chunks, dict) else None
    bounds: dict[str, Any] = {"dual chunk attention": chunk}
    if _has_window(text) and all(type(cache) is KVCache for cache in make_prompt_cache(model)):
        bounds["sliding window"] = text.get("sliding_window")
    if text.get("attn_temperature_tuning") and "attn_temperature_tuning" not in words:
        bounds["attention temperature"] = (text.get("floor_scale") or 8192) - 1
    given = [(value, what) for what, value in bounds.items() if is_positive(value)]
    bound, what = min(given, default=(None, None))
    if bound is None or not is_positive(length) or length <= bound:
        return config
    warnings.warn(
        f"dflash-mlx: mlx-lm's {config.get('model_type')} does not compute the {what} of "
        f"{name}, so the context ends there: {bound:,} tokens, not {length:,}.",
        stacklevel=5,
    )
    return _with(config, {"max_position_embeddings": bound})


def _has_window(text: Config) -> bool:
    """Whether transformers' model of a config has layers with a sliding window."""
    if "max_window_layers" in text:  # Qwen's: off by default, and only from this layer on
        first, layers = text["max_window_layers"], text.get("num_hidden_layers")
        if not text.get("use_sliding_window") or (layers and first and first >= layers):
            return False
    kinds = text.get("layer_types") or ["sliding_attention"]
    return bool(text.get("use_sliding_window", True)) and "sliding_attention" in kinds


def _rotating(model: nn.Module) -> list[bool]:
    """Which layers rotate queries and keys."""
    attentions = [getattr(layer, "self_attn", layer) for layer in getattr(model, "layers", ())]
    return [bool(getattr(one, "use_rope", True)) for one in attentions]


def _declared(config: Config) -> set[str]:
    """The fields that mlx-lm's class of the language model takes."""
    own = {"model_type": config.get("model_type"), **text_config(config)}
    for one in (own, config):
        try:
            return {*inspect.signature(classes_of(one)[1]).parameters}
        except ValueError:  # a language model that only its vision model's class knows
            continue
    return set()


def _with(config: Config, text: Config) -> Config:
    """A config with other fields of its language model."""
    if text_config(config) is config:
        return config | text
    return config | {"text_config": text_config(config) | text}


def _kind(scaling: Config) -> Any:
    return scaling.get("rope_type", scaling.get("type"))


def _scaling(text: Config) -> Config | None:
    """The scaling of a config's rotations; None for none, or one for each kind of layer."""
    for one in (text.get("rope_scaling"), text.get("rope_parameters")):
        if isinstance(one, dict) and _kind(one) not in _UNSCALED:
            return one
    return None


def _unscaled(text: Config) -> Config:
    """The fields of a config's rotations, without the scaling."""
    fields: Config = {"rope_scaling": None}
    if isinstance(own := text.get("rope_parameters"), dict):
        plain = ("rope_theta", "partial_rotary_factor")
        fields["rope_parameters"] = {"type": "default"} | {k: own[k] for k in plain if k in own}
    return fields


def _reads_scaling(config: Config) -> bool:
    """Whether layers compute something else without the scaling of a config's rotations."""
    model_class, arguments = classes_of(config)
    plain = _with(config, _unscaled(text_config(config)))
    try:
        ours, other = (_state(model_class(arguments.from_dict(one))) for one in (config, plain))
    except (AttributeError, KeyError, TypeError, ValueError):
        return True  # the class cannot do without the field, so it reads it
    return ours != other


def _state(model: nn.Module) -> list[Any]:
    """What a model's layers compute with, beside their weights."""
    found: list[Any] = []
    for module in model.modules():
        found.append(type(module))
        for name, value in {**module, **vars(module)}.items():
            if value is None or isinstance(value, int | float | str | tuple):
                found.append((name, str(value)))
            elif name.startswith("_") and isinstance(value, mx.array):
                found.append((name, value.tolist()))
    return found


def _scale(
    model: nn.Module, ropes: dict[str, nn.Module], scaling: Config, length: int | None
) -> None:
    """Replace plain rotations by scaled ones."""
    new = {
        path: initialize_rope(one.dims, one.base, one.traditional, scaling, length)
        for path, one in ropes.items()
    }
    model.update_modules(tree_unflatten([*new.items()]))


def words_of(model: nn.Module) -> set[str]:
    """The words of the code that computes a model, without the declarations of its config."""
    names = {base.__module__ for one in model.modules() for base in type(one).__mro__}
    words = set[str]()
    for module in (sys.modules[name] for name in names if name.startswith("mlx_lm.models.")):
        code = inspect.getsource(module)
        for one in vars(module).values():
            if hasattr(one, "from_dict") and one.__module__ == module.__name__:
                code = code.replace(inspect.getsource(one), "")
        words |= {*re.findall(r"\w+", code)}
        if not module.__name__.endswith("switch_layers"):  # has every activation as a class
            words |= {*re.findall(r"\w+", code.lower())}
    return words
