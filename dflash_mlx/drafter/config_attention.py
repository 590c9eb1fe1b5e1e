"""What a config says about attention: taps, the first drafting row, windows, causality, rotation.

Published files say these in many ways. A wrong reading runs, and drafts badly; so whatever is
missing or contradicts itself is a `ConfigError`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..validation import brief, is_finite, is_integer
from .config_reader import ConfigReader
from .packagings import FIRST_ROW_FLAGS, FULL, SLIDING

TAPS = "target_layer_ids"
MAX_TAPS = 1024
EMBEDDING_OUTPUT = -1  # as a tap: what the target's first layer reads

ORIGINAL = "original_max_position_embeddings"
# The fields of each kind of rope: those that must be there, those that may be.
ROPE_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", ORIGINAL), ()),
    "yarn": (
        ("factor",),
        (ORIGINAL, "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        + ("attention_factor", "truncate"),
    ),
}
MAY_BE_ZERO = ("mscale", "mscale_all_dim", "attention_factor")
NO_ROPE_FIELDS = ("mrope_section", "mrope_interleaved")  # all positions of a text are alike
# z-lab/Kimi-K2.5-DFlash was trained with plain YaRN's amplitude, 0.1 ln(factor) + 1. Its mscale
# fields say 1, and engines that honour them accept fewer drafts.
KIMI_K25 = {
    "hidden_size": 7168,
    "vocab_size": 163840,
    "num_target_layers": 61,
    TAPS: (1, 12, 24, 35, 47, 58),
    "rope_theta": 50000.0,
}
KIMI_K25_YARN = {"factor": 64, ORIGINAL: 4096, "mscale": 1, "mscale_all_dim": 1}


def read_taps(read: ConfigReader, depth: int | None) -> tuple[int, ...]:
    """The tapped layers of a target with `depth` layers: 0-based, -1 for the embedding's output.

    They are required: published drafters follow no one rule.
    """
    own, shifted = read.get(TAPS), read.get("shifted_layer_ids")
    if own is None and shifted is None:
        raise read.error(TAPS, "is missing")
    taps = None if own is None else _layers(read, TAPS, own, EMBEDDING_OUTPUT)
    if shifted is not None:
        # The stream after k layers, which is the output of layer k - 1.
        found = tuple(layer - 1 for layer in _layers(read, "shifted_layer_ids", shifted, 0))
        if taps not in (None, found):
            raise read.error(read.place(TAPS), f"contradicts {read.place('shifted_layer_ids')}")
        taps = found
    assert taps is not None
    if depth is not None and max(taps) >= depth:
        raise read.error(TAPS, f"names layer {max(taps)} of {depth}")
    return taps


def _layers(read: ConfigReader, name: str, value: Any, least: int) -> tuple[int, ...]:
    whole = isinstance(value, list) and all(is_integer(tap, least) for tap in value)
    if not whole or not 0 < len(value) <= MAX_TAPS:
        raise read.error(read.place(name), f"must be a list of layer numbers, not {brief(value)}")
    return tuple(value)


def read_first_row(read: ConfigReader, kind: str, block: int) -> int:
    """The row of a block that drafts the first token: 1, or 0 if the anchor's row drafts."""
    said: list[tuple[str, int]] = []
    for flag, row in FIRST_ROW_FLAGS.items():
        for place, value in read.found(flag):
            said.append((place, row if read.check_boolean(place, value) else 1 - row))
    if (drafts := _speculative_tokens(read)) is not None:
        place = "speculators_config.speculative_tokens"
        if drafts > block:
            raise read.error(place, "must not be more than block_size")
        if drafts >= block - 1:  # fewer are only how many drafts to ask for
            said.append((place, block - drafts))
    for place, row in said:
        if row != said[0][1]:
            raise read.error(said[0][0], f"contradicts {place}")
    default = read.packaging.first_row.get(kind, 1)
    if not said and default is None:
        flags = ", ".join(FIRST_ROW_FLAGS)
        raise read.error("markov_rank", f"needs one of {flags}, to say which row drafts first")
    read.sources["first_row"] = said[0][0] if said else f"default of {read.packaging.name}"
    return said[0][1] if said else int(default or 0)


def _speculative_tokens(read: ConfigReader) -> int | None:
    methods = read.mapping("speculators_config").get("proposal_methods")
    if not (isinstance(methods, list) and methods and isinstance(methods[0], Mapping)):
        return None
    value = methods[0].get("speculative_tokens")
    if value is not None and not is_integer(value):
        raise read.error("speculators_config", f"has speculative_tokens {brief(value)}")
    return value


def read_windows(
    read: ConfigReader, layers: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Each layer's window, None for full attention, and whether `layer_types` made it slide."""
    named = tuple(kind == SLIDING for kind in _layer_types(read, layers))
    slides, window = named, read.get("sliding_window")
    if any(named):
        window = read.integer("sliding_window", None)
    use_swa, width = read.boolean("use_swa"), read.integer("swa_window_size", None)
    if use_swa:
        window = width or read.integer("sliding_window", None)
        slides = named if any(named) else (True,) * layers
    if any(slides) and window is None:
        raise read.error("sliding_window", "is missing")
    return tuple(window if slide else None for slide in slides), named


def _layer_types(read: ConfigReader, layers: int) -> list[str]:
    """The kind of each layer, from `layer_types` or, in older files, `use_sliding_window`."""
    kinds = read.get("layer_types")
    slides = first = None
    if not read.packaging.copied:  # else these two are the target's
        slides = read.boolean("use_sliding_window")
        first = read.integer("max_window_layers", None, least=0)
    if kinds is None and slides:
        # Transformers' own rule for Qwen3; its default for `max_window_layers`, 28, is no answer.
        if first is None:
            raise read.error("max_window_layers", "is missing, and so is layer_types")
        return [SLIDING if layer >= first else FULL for layer in range(layers)]
    if kinds is None or isinstance(kinds, str):
        return [kinds or FULL] * layers
    place = read.place("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise read.error(place, f"must name the kind of each of the {layers} layers")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise read.error(place, f"has the unknown kind {brief(kind)}")
    if SLIDING in kinds and slides is False:
        raise read.error(place, "names sliding layers, but use_sliding_window is false")
    return kinds


def read_causality(read: ConfigReader, sliding: tuple[bool, ...]) -> tuple[bool, ...]:
    """Whether a block's rows are blind to later rows of it, by layer.

    An explicit flag applies to every layer. Without one, the layers that `layer_types` calls
    sliding are causal if the packaging has it so.
    """
    explicit = read.boolean("causal")
    non_causal = read.boolean("sliding_window_non_causal")
    if explicit is not None:
        return (explicit,) * len(sliding)
    if read.packaging.causal == "never" or non_causal:
        read.sources["causal"] = f"rule of {read.packaging.name}: no layer is causal"
        return (False,) * len(sliding)
    read.sources["causal"] = "rule: sliding layers are causal, full ones are not"
    return sliding


def read_sinks(read: ConfigReader, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Which layers have a learned logit in every softmax's denominator."""
    everywhere = read.boolean("attention_sink_bias", False)
    sliding = read.boolean("add_swa_attention_sink_bias", False)
    full = read.boolean("add_full_attention_sink_bias", False)
    return tuple(everywhere or (full if window is None else sliding) for window in windows)


def read_rope(read: ConfigReader, positions: int) -> tuple[float, Mapping[str, Any] | None]:
    """`rope_theta`, and how the rotary frequencies are scaled, None for not at all.

    `rope_parameters` wins over `rope_scaling`, and both over the root.
    """
    theta = read.number("rope_theta", 10000.0)
    found: dict[str, Any] | None = None
    for name in ("rope_scaling", "rope_parameters"):
        values = {key: value for key, value in read.mapping(name).items() if value is not None}
        place = read.place(name)
        if "rope_theta" in values:
            read.sources["rope_theta"] = f"{place}.rope_theta"
            theta = read.check_positive(f"{place}.rope_theta", values.pop("rope_theta"))
        scaling = _scaling(read, place, values)
        if scaling is not None and found not in (None, scaling):
            raise read.error("rope_scaling", "contradicts rope_parameters")
        if scaling is not None and found is None:
            found, read.sources["rope_scaling"] = scaling, place
    if theta <= 1:
        raise read.error("rope_theta", f"must be above 1, not {theta:g}")
    if found is not None and found["rope_type"] == "yarn":
        found.setdefault(ORIGINAL, positions)
    return theta, found


def _scaling(read: ConfigReader, place: str, values: dict[str, Any]) -> dict[str, Any] | None:
    """A rope object with its kind checked and the fields of that kind; None for the default."""
    old_name = values.pop("type", None)
    kind = values.pop("rope_type", None) or old_name or "default"
    if not isinstance(kind, str) or kind not in ROPE_FIELDS:
        raise read.error(f"{place}.rope_type", f"has the unknown kind {brief(kind)}")
    partial = values.pop("partial_rotary_factor", 1)
    if partial != 1 and not read.packaging.copied:
        raise read.error(f"{place}.partial_rotary_factor", f"must be 1, not {brief(partial)}")
    values = {key: value for key, value in values.items() if key not in NO_ROPE_FIELDS}
    required, optional = ROPE_FIELDS[kind]
    for key in required:
        if key not in values:
            raise read.error(f"{place}.{key}", "is missing")
    for key, value in values.items():
        if key not in required + optional:
            raise read.error(f"{place}.{key}", f"is not understood for {kind} rope")
        if key == "truncate":
            read.check_boolean(f"{place}.{key}", value)
        elif not (key in MAY_BE_ZERO and is_finite(value) and value == 0):
            read.check_positive(f"{place}.{key}", value)
    return None if kind == "default" else {"rope_type": kind, **values}


def rope_amplitude(resolved: Mapping[str, Any], sources: dict[str, str]) -> float:
    """The factor on rotated queries and keys, as Transformers computes it.

    Args:
        resolved: the fields of the config so far.
        sources: gets the reason.
    """
    scaling = resolved["rope_scaling"]
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        sources["rope_amplitude"] = "attention_factor"
        return float(scaling["attention_factor"])
    mscale, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if _is_kimi_k25(resolved):
        sources["rope_amplitude"] = "0.1 ln(factor) + 1, as Kimi-K2.5-DFlash was trained"
    elif mscale and all_dims:
        sources["rope_amplitude"] = "yarn: the ratio of mscale and mscale_all_dim"
        return _amplitude(scaling["factor"], mscale) / _amplitude(scaling["factor"], all_dims)
    else:
        sources["rope_amplitude"] = "yarn: 0.1 ln(factor) + 1"
    return _amplitude(scaling["factor"], 1.0)


def _amplitude(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _is_kimi_k25(resolved: Mapping[str, Any]) -> bool:
    scaling = resolved["rope_scaling"]
    return all(resolved[name] == value for name, value in KIMI_K25.items()) and all(
        scaling.get(name) == value for name, value in KIMI_K25_YARN.items()
    )
