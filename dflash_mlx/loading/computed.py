"""What a config.json says and mlx-lm's model would leave out: computed here, or refused by name.

mlx-lm's classes take the fields that they declare, and read some of those. Another activation or a
sliding window that a class does not read would change no logit and raise no error. computed.toml
lists what mlx-lm's modules compute.
"""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import mlx.nn as nn

from ..errors import ConfigError
from ..targets.internals import KVCache, classes_of, make_prompt_cache, modules_of
from ..validation import ErrorWrapper, brief, is_positive, text_config
from .reading import MODEL_ERRORS
from .rotations import complete_rotations, spelled_for, with_text

Config = dict[str, Any]

# Fields that name a function -> their table in computed.toml.
_FUNCTIONS = {
    "hidden_act": "activations",
    "hidden_activation": "activations",
    "activation_function": "activations",
    "scoring_func": "scores",
    "moe_router_activation_func": "scores",
}
# Part of a function's name -> its row; the first that fits counts.
_NAMES = {
    "gegelu": "gegelu",
    "xielu": "xielu",
    "situ": "situ",
    "silu": "silu",
    "swish": "silu",
    "swiglu": "silu",
    "gelu": "gelu",
    "geglu": "gelu",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "noaux_tc": "sigmoid",  # dots.llm1's name of it
    "softmax": "softmax",
    "sqrtsoftplus": "sqrtsoftplus",
}
_USUAL = "silu"  # of modules without a row
# Fields that change nothing in a model without experts.
_OF_EXPERTS = {"routed_scaling_factor", "n_group", "scoring_func", "moe_router_activation_func"}
_EXPERTS = ("expert", "switch", "moe")  # in the names of a model's parts
# Values that no class computes. "vision" is about images.
_NEVER: dict[str, Any] = {"is_causal": [False], "use_bidirectional_attention": [True, "all"]}


@cache
def _table() -> dict[str, dict[str, frozenset[str]]]:
    """computed.toml: table -> row -> mlx-lm's modules."""
    text = files("dflash_mlx.loading").joinpath("computed.toml").read_text("utf-8")
    tables = tomllib.loads(text)
    return {name: {row: frozenset(x) for row, x in rows.items()} for name, rows in tables.items()}


def computes(model: nn.Module, table: str, row: str) -> bool:
    """Whether one of the modules of mlx-lm that a model is made of is in a row of computed.toml."""
    return not modules_of(model).isdisjoint(_table()[table][row])


def model_of(name: object, config: Config) -> nn.Module:
    """The mlx-lm model of a config.json, with weights that are never computed.

    Raises `ConfigError` where this mlx-lm has no such model, or would not compute all of it.
    """
    wrong = f"{name}: mlx-lm {version('mlx-lm')} cannot run it"
    with ErrorWrapper(ConfigError, wrong, MODEL_ERRORS):
        config = spelled_for(config)
        model_class, arguments = classes_of(config)
        model: nn.Module = model_class(arguments.from_dict(config))
        complete(name, model, config)
    return model


def complete(name: object, model: nn.Module, config: Config) -> None:
    """Compute what mlx-lm's class left out of a config, or refuse it.

    Args:
        name: of the model, for messages.
        model: mlx-lm's model of the config; its weights are not read.
        config: of `spelled_for`.

    Raises `ConfigError`, naming the field.
    """
    text = text_config(config)
    left_out = [*_left_out(model, text), *complete_rotations(name, model, config)]
    if not left_out:
        return
    field = left_out[0]
    parameters = text.get("rope_parameters") or {}
    value = text.get(field) or parameters.get(field, parameters)
    raise ConfigError(
        f"{name}: mlx-lm's {config.get('model_type')} does not compute {field} ({brief(value)}): "
        "it would be another model."
    )


def _left_out(model: nn.Module, text: Config) -> Iterable[str]:
    """The fields of a language model's config that change it and that its classes do not read."""
    has_experts = any(mark in path for path, _ in model.named_modules() for mark in _EXPERTS)
    for table, neutral in (("switches", None), ("factors", 1)):
        for field in _table()[table]:
            value: Any = text.get(field) or neutral
            if value == neutral or computes(model, table, field):
                continue
            if field == "no_rope_layers" and _rotating(model) == [*map(bool, value)]:
                continue
            if has_experts or field not in _OF_EXPERTS:
                yield field
    for field, table in _FUNCTIONS.items():
        value = text.get(field)
        if value is None or (field in _OF_EXPERTS and not has_experts):
            continue
        if not _computes_function(model, table, str(value).lower()):
            yield field
    for field, values in _NEVER.items():
        if text.get(field) in values:
            yield field


def _computes_function(model: nn.Module, table: str, name: str) -> bool:
    """Whether a model's classes compute a function of this name."""
    row = next((row for part, row in _NAMES.items() if part in name), None)
    rows = _table()[table]
    if row not in rows:
        return False
    others = frozenset().union(*rows.values()) if row == _USUAL else None
    in_no_row = others is not None and modules_of(model).isdisjoint(others)
    return in_no_row or computes(model, table, row)


def bounded(name: object, model: nn.Module, config: Config) -> Config:
    """A config whose context ends where a window begins that mlx-lm does not compute.

    Up to there, the model is the same. Args as for `complete`.
    """
    text = text_config(config)
    length = text.get("max_position_embeddings")
    chunks = text.get("dual_chunk_attention_config")
    chunk = chunks.get("chunk_size") if isinstance(chunks, dict) else None
    bounds: dict[str, Any] = {"dual chunk attention": chunk}
    if _has_window(text) and all(type(cache) is KVCache for cache in make_prompt_cache(model)):
        bounds["sliding window"] = text.get("sliding_window")
    tuned = text.get("attn_temperature_tuning")
    if tuned and not computes(model, "other", "attn_temperature_tuning"):
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
    return with_text(config, {"max_position_embeddings": bound})


def _has_window(text: Config) -> bool:
    """Whether transformers' model of a config has layers with a sliding window."""
    if "max_window_layers" in text:  # Qwen's: off by default, and only from this layer on
        first = text["max_window_layers"]
        layers = text.get("num_hidden_layers")
        if not text.get("use_sliding_window") or (layers and first and first >= layers):
            return False
    kinds = text.get("layer_types") or ["sliding_attention"]
    return bool(text.get("use_sliding_window", True)) and "sliding_attention" in kinds


def _rotating(model: nn.Module) -> list[bool]:
    """Which layers rotate queries and keys."""
    attentions = [getattr(layer, "self_attn", layer) for layer in getattr(model, "layers", ())]
    return [bool(getattr(part, "use_rope", True)) for part in attentions]
