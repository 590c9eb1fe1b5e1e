"""Finds config fields that mlx-lm's model ignores, and applies them or refuses the model.

mlx-lm's classes declare some fields of a config.json, and read some of those. If a class ignores an
activation or a sliding window, no error is raised: it simply computes another model. computed.toml
lists what each of mlx-lm's modules computes.
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
from .reading import LOADING_ERRORS
from .rope_config import apply_ignored_rotations, normalize_rope_fields, with_text

Config = dict[str, Any]

# Fields whose value is the name of a function, and their table in computed.toml.
_FUNCTIONS = {
    "hidden_act": "activations",
    "hidden_activation": "activations",
    "activation_function": "activations",
    "scoring_func": "scores",
    "moe_router_activation_func": "scores",
}
# Parts of the names of functions, and their row in the table. The first match counts.
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
    "noaux_tc": "sigmoid",  # its name in dots.llm1
    "softmax": "softmax",
    "sqrtsoftplus": "sqrtsoftplus",
}
# The function of modules that are in no row.
_DEFAULT_FUNCTION = "silu"
# Fields that change nothing in a model without experts.
_EXPERT_FIELDS = {"routed_scaling_factor", "n_group", "scoring_func", "moe_router_activation_func"}
# A model has experts if the name of one of its modules contains one of these.
_EXPERT_MODULES = ("expert", "switch", "moe")
# Values that none of mlx-lm's classes computes. ("vision" concerns images only.)
_UNSUPPORTED: dict[str, Any] = {"is_causal": [False], "use_bidirectional_attention": [True, "all"]}


@cache
def _table() -> dict[str, dict[str, frozenset[str]]]:
    """The modules of mlx-lm in computed.toml, by table and row."""
    text = files("dflash_mlx.loading").joinpath("computed.toml").read_text("utf-8")
    tables = {}
    for table, rows in tomllib.loads(text).items():
        tables[table] = {row: frozenset(modules) for row, modules in rows.items()}
    return tables


def computes(model: nn.Module, table: str, row: str) -> bool:
    """Whether computed.toml lists one of the model's modules in this row."""
    return not modules_of(model).isdisjoint(_table()[table][row])


def build_model(name: object, config: Config) -> nn.Module:
    """Make mlx-lm's model of a config.json, with weights that are never computed.

    Raises:
        ConfigError: this mlx-lm has no such model, or ignores a field that changes it.
    """
    error_prefix = f"{name}: mlx-lm {version('mlx-lm')} cannot run it"
    with ErrorWrapper(ConfigError, error_prefix, LOADING_ERRORS):
        config = normalize_rope_fields(config)
        model_class, arguments = classes_of(config)
        model: nn.Module = model_class(arguments.from_dict(config))
        apply_ignored_fields(name, model, config)
    return model


def apply_ignored_fields(name: object, model: nn.Module, config: Config) -> None:
    """Apply the config fields that mlx-lm's class ignored to its model, or refuse the model.

    Args:
        name: the name of the model, for messages.
        model: mlx-lm's model of the config. Its weights are not read.
        config: a config from `normalize_rope_fields`.

    Raises:
        ConfigError: a field can neither be computed nor ignored.
    """
    text = text_config(config)
    ignored = [*_ignored_fields(model, text), *apply_ignored_rotations(name, model, config)]
    if not ignored:
        return
    field = ignored[0]
    parameters = text.get("rope_parameters") or {}
    value = text.get(field) or parameters.get(field, parameters)
    raise ConfigError(
        f"{name}: mlx-lm's {config.get('model_type')} does not compute {field} ({brief(value)}): "
        "the result would be a different model."
    )


def _ignored_fields(model: nn.Module, text: Config) -> Iterable[str]:
    """The fields of a language model's config that would change it, but that its classes ignore."""
    paths = " ".join(path for path, _ in model.named_modules())
    has_experts = any(word in paths for word in _EXPERT_MODULES)
    for table, neutral in (("switches", None), ("factors", 1)):  # `neutral` changes nothing
        for field in _table()[table]:
            value: Any = text.get(field) or neutral
            if value == neutral or computes(model, table, field):
                continue
            if field == "no_rope_layers" and _rotating(model) == list(map(bool, value)):
                continue
            if has_experts or field not in _EXPERT_FIELDS:
                yield field
    for field, table in _FUNCTIONS.items():
        value = text.get(field)
        if value is None or (field in _EXPERT_FIELDS and not has_experts):
            continue
        if not _computes_function(model, table, str(value).lower()):
            yield field
    for field, values in _UNSUPPORTED.items():
        if text.get(field) in values:
            yield field


def _computes_function(model: nn.Module, table: str, name: str) -> bool:
    """Whether a model's classes compute the function with this name."""
    row = next((row for part, row in _NAMES.items() if part in name), None)
    rows = _table()[table]
    if row not in rows:
        return False
    if row == _DEFAULT_FUNCTION:
        listed = frozenset().union(*rows.values())
        if modules_of(model).isdisjoint(listed):
            return True
    return computes(model, table, row)


def cap_context(name: object, model: nn.Module, config: Config) -> Config:
    """Limit the context to the length up to which mlx-lm's model equals the one in the config.

    Beyond it, a sliding window or another feature that mlx-lm does not compute would matter. The
    arguments are those of `apply_ignored_fields`.
    """
    text = text_config(config)
    length = text.get("max_position_embeddings")
    chunks = text.get("dual_chunk_attention_config")
    chunk = chunks.get("chunk_size") if isinstance(chunks, dict) else None
    limits: dict[str, Any] = {"dual chunk attention": chunk}
    if _has_window(text) and all(type(cache) is KVCache for cache in make_prompt_cache(model)):
        limits["sliding window"] = text.get("sliding_window")
    has_tuning = text.get("attn_temperature_tuning")
    if has_tuning and not computes(model, "other", "attn_temperature_tuning"):
        # The temperature is 1 at the tokens before this one. 8192 is Llama 4's default.
        limits["attention temperature"] = (text.get("floor_scale") or 8192) - 1
    valid = [(limit, feature) for feature, limit in limits.items() if is_positive(limit)]
    limit, feature = min(valid, default=(None, None))
    if limit is None or not is_positive(length) or length <= limit:
        return config
    warnings.warn(
        f"dflash-mlx: mlx-lm's {config.get('model_type')} does not compute the {feature} of "
        f"{name}, so the context ends there: {limit:,} tokens, not {length:,}.",
        stacklevel=5,
    )
    return with_text(config, {"max_position_embeddings": limit})


def _has_window(text: Config) -> bool:
    """Whether transformers' model of a config has layers with a sliding window."""
    if "max_window_layers" in text:
        # Qwen's windows are off by default, and begin with this layer.
        start = text["max_window_layers"]
        layers = text.get("num_hidden_layers")
        if not text.get("use_sliding_window") or (layers and start and start >= layers):
            return False
    kinds = text.get("layer_types") or ["sliding_attention"]
    return bool(text.get("use_sliding_window", True)) and "sliding_attention" in kinds


def _rotating(model: nn.Module) -> list[bool]:
    """Which layers rotate queries and keys."""
    attentions = [getattr(layer, "self_attn", layer) for layer in getattr(model, "layers", ())]
    return [bool(getattr(part, "use_rope", True)) for part in attentions]
