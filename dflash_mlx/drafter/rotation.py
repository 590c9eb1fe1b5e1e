"""The rotary fields of a config: base, stretching, amplitude, and how values are paired."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..validation import brief, is_finite
from .fields import Fields

_ORIGINAL = "original_max_position_embeddings"
# The fields of rope_parameters or rope_scaling, by kind: those that must be there, those that may.
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
    "yarn": (
        ("factor",),
        (_ORIGINAL, "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        + ("attention_factor", "truncate"),
    ),
}
_MAY_BE_ZERO = ("mscale", "mscale_all_dim", "attention_factor")
_HARMLESS = ("mrope_section", "mrope_interleaved")  # all positions of a text are alike

# z-lab/Kimi-K2.5-DFlash was trained and first served with plain YaRN's amplitude. By its two
# mscale fields it would be 1, and engines that began to honour them accept fewer drafts; vLLM's
# Ascend port pins the amplitude for exactly this config, and so do we.
_KIMI_K25 = {
    "hidden_size": 7168,
    "vocab_size": 163840,
    "num_target_layers": 61,
    "target_layer_ids": (1, 12, 24, 35, 47, 58),
    "rope_theta": 50000.0,
}
_KIMI_K25_YARN = {"factor": 64, _ORIGINAL: 4096, "mscale": 1, "mscale_all_dim": 1}


def read_rotation(fields: Fields, positions: int) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of a config. Raises `ConfigError`."""
    return {"rope_theta": _theta(fields), "rope_scaling": _scaling(fields, positions)}


def amplitude(resolved: Mapping[str, Any], sources: dict[str, str]) -> float:
    """The factor on rotated queries and keys, as Transformers computes it.

    Args:
        resolved: the fields of the config so far.
        sources: gets the reason.
    """
    scaling = resolved["rope_scaling"]
    if scaling is None or scaling["rope_type"] != "yarn":
        sources["rope_amplitude"] = "default"
        return 1.0
    if scaling.get("attention_factor") is not None:
        sources["rope_amplitude"] = "attention_factor"
        return float(scaling["attention_factor"])
    factor = scaling["factor"]
    if _is_kimi_k25(resolved):
        sources["rope_amplitude"] = (
            "pinned for Kimi-K2.5-DFlash: 0.1 ln(factor) + 1, which it was made with, and not the "
            "ratio of its mscale fields"
        )
        return _growth(factor, 1.0)
    mscale, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dims:
        sources["rope_amplitude"] = "yarn: the ratio of mscale and mscale_all_dim"
        return _growth(factor, mscale) / _growth(factor, all_dims)
    sources["rope_amplitude"] = "yarn: 0.1 ln(factor) + 1"
    return _growth(factor, 1.0)


def _growth(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _is_kimi_k25(resolved: Mapping[str, Any]) -> bool:
    scaling = resolved["rope_scaling"]
    return all(resolved[name] == value for name, value in _KIMI_K25.items()) and all(
        scaling.get(name) == value for name, value in _KIMI_K25_YARN.items()
    )


def _theta(fields: Fields) -> float:
    """The base of the rotary frequencies; `rope_parameters` wins over the root."""
    theta = fields.number("rope_theta", 10000.0)
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.mapping(name).get("rope_theta")
        if value is not None:
            theta = fields.positive(f"{_place(fields, name)}.rope_theta", value)
            fields.sources["rope_theta"] = f"{_place(fields, name)}.rope_theta"
    if theta <= 1:
        raise fields.error("rope_theta", f"must be above 1, not {theta:g}")
    return theta


def _scaling(fields: Fields, positions: int) -> Mapping[str, Any] | None:
    """How the rotary frequencies are stretched, None for the default kind."""
    found = {
        name: kind
        for name in ("rope_scaling", "rope_parameters")
        if (kind := _kind(fields, name)) is not None
    }
    stretching = [name for name, kind in found.items() if kind != "default"]
    said = [(found[name], _values(fields, name)) for name in stretching]
    if said[1:] and said[0] != said[1]:
        raise fields.error("rope_scaling", "contradicts rope_parameters")
    name = (stretching or list(found) or ["rope_parameters"])[0]
    kind, place = found.get(name, "default"), _place(fields, name)
    values = _values(fields, name)
    required, optional = _KINDS[kind]
    for key in required:
        if key not in values:
            raise ConfigError(f"{fields.where}: {place}.{key} is missing.")
    for key, value in values.items():
        _check(fields, place, kind, key, value, key in required + optional)
    values.pop("partial_rotary_factor", None)
    fields.sources["rope_scaling"] = "default" if kind == "default" else place
    if kind == "yarn":
        values.setdefault(_ORIGINAL, positions)
    return None if kind == "default" else {"rope_type": kind, **values}


def _place(fields: Fields, name: str) -> str:
    return next((place for place, _ in fields.found(name)), name)


def _kind(fields: Fields, name: str) -> str | None:
    """The kind that one of the two objects names; None where the object is absent or empty."""
    values = fields.mapping(name)
    if not values:
        return None
    kind = values.get("rope_type") or values.get("type") or "default"
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(
            f"{fields.where}: {_place(fields, name)}.rope_type has the unknown kind {brief(kind)}."
        )
    return kind


def _values(fields: Fields, name: str) -> dict[str, Any]:
    """What is said about the stretching, without the kind, the base and what changes nothing."""
    ignored = {"type", "rope_type", "rope_theta", *_HARMLESS}
    if fields.packaging.copied:
        ignored.add("partial_rotary_factor")
    values = fields.mapping(name)
    return {k: v for k, v in values.items() if v is not None and k not in ignored}


def _check(fields: Fields, place: str, kind: str, key: str, value: Any, known: bool) -> None:
    """Raise `ConfigError` unless a field of this kind of rope may have this value."""
    if key == "partial_rotary_factor":
        if value != 1:
            raise ConfigError(f"{fields.where}: {place}.{key} must be 1, not {brief(value)}.")
    elif not known:
        raise ConfigError(f"{fields.where}: {place}.{key} is not understood for {kind} rope.")
    elif key == "truncate":
        fields.truth(f"{place}.{key}", value)
    elif not (is_finite(value) and value == 0 and key in _MAY_BE_ZERO):
        fields.positive(f"{place}.{key}", value)
