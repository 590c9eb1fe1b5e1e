"""Reads the attention fields of a config: taps, first drafting row, windows, causality, rotation.

Published files spell these in many ways. A wrong reading runs but drafts badly, so whatever is
missing or contradicts itself is a `ConfigError`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..validation import brief, is_integer
from .config_reader import BOOLEAN, OBJECT, POSITIVE, ConfigReader, FieldCheck, one_of, whole
from .networks import DSPARK, EAGLE3, FIRST_ROW_FLAGS, FULL, SLIDING

TAPS = "target_layer_ids"
ORIGINAL = "original_max_position_embeddings"
# The fields of each kind of rope, the required one first. Gemma 4's is "proportional".
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": (
        "factor",
        ORIGINAL,
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    ),
    "proportional": ("partial_rotary_factor",),
}
# z-lab/Kimi-K2.5-DFlash was trained with plain YaRN's amplitude, 0.1 ln(factor) + 1. Its mscale
# fields say 1, and engines that honour them accept fewer drafts.
KIMI_K25 = {"hidden_size": 7168, "num_target_layers": 61, TAPS: (1, 12, 24, 35, 47, 58)}

LAYERS = FieldCheck(
    lambda value: (
        isinstance(value, list)
        and 0 < len(value) <= 1024
        and all(is_integer(layer, -1) for layer in value)
    ),
    "a list of layer numbers",
)
LAYERS_OR_NONE = FieldCheck(lambda value: value == [] or LAYERS.holds(value), LAYERS.words)


def read_taps(read: ConfigReader, kind: str) -> tuple[int, ...]:
    """Read the tapped layers of the target: 0-based, -1 for the embedding's output.

    EAGLE-3 drafters may leave them out, because their authors have a rule. Others must name them.
    """
    taps = read.get(TAPS, LAYERS)
    shifted = read.get("shifted_layer_ids", LAYERS_OR_NONE if kind == EAGLE3 else LAYERS)
    place = read.place("shifted_layer_ids")
    if shifted and place.startswith("eagle_config."):
        taps = shifted  # in SGLang's and NVIDIA's files, these are the layers themselves
    elif shifted:
        # A number k means the stream after k layers, which is the output of layer k - 1.
        layers = [layer - 1 for layer in shifted]
        if taps not in (None, layers):
            raise read.error(read.place(TAPS), f"contradicts {place}")
        taps = layers
    if taps is None and kind != EAGLE3:
        raise read.error(TAPS, "is missing")
    if not taps:
        read.sources[TAPS] = "the authors' rule: 1, the one before the middle, the fourth last"
    return tuple(taps or ())


def read_first_row(read: ConfigReader, kind: str, block: int) -> int:
    """Read which row of a block drafts the first token: 1, or 0 if the anchor's row drafts."""
    if kind == EAGLE3:
        return 1
    stated: list[tuple[str, int]] = []  # places, and the rows that they state
    for flag, row in FIRST_ROW_FLAGS.items():
        for place, value in read.found(flag):
            is_true = read.check(place, value, BOOLEAN)
            stated.append((place, row if is_true else 1 - row))  # false states the other row
    match read.get("speculators_config", OBJECT):
        # A smaller number only says how many drafts to ask for.
        case {"proposal_methods": [{"speculative_tokens": int(drafts)}, *_]} if drafts >= block - 1:
            stated.append(("speculators_config", block - drafts))
    default = read.packaging.first_row
    if not stated and default and kind == DSPARK:
        flags = ", ".join(FIRST_ROW_FLAGS)
        raise read.error("markov_rank", f"needs one of {flags}, to say which row drafts first")
    place, first = stated[0] if stated else (f"default of {read.packaging.name}", default)
    for other, row in stated:
        if row != first or row < 0:
            raise read.error(place, f"contradicts {other} or block_size")
    read.sources["first_row"] = place
    return first


def read_layer_attention(read: ConfigReader, layers: int) -> dict[str, tuple[Any, ...]]:
    """Read windows (None for full attention), causality within a block, and sinks, per layer.

    An explicit causality flag applies to every layer. Without one, the layers that `layer_types`
    calls sliding are causal if the packaging says so.
    """
    named_sliding = _sliding_layers(read, layers)
    slides = named_sliding
    window = read.get("sliding_window", whole())
    use_swa = read.get("use_swa", BOOLEAN)
    swa_window = read.get("swa_window_size", whole())
    if use_swa:
        window = swa_window or window
        slides = named_sliding if any(named_sliding) else (True,) * layers
    if any(slides) and window is None:
        raise read.error("sliding_window", "is missing")
    causal = read.get("causal", BOOLEAN)
    non_causal = read.get("sliding_window_non_causal", BOOLEAN)
    causal_if_sliding = causal is None and read.packaging.sliding_is_causal and not non_causal
    if causal is None:
        read.sources["causal"] = f"rule of {read.packaging.name}"
    all_sinks = read.get("attention_sink_bias", BOOLEAN, False)
    sliding_sinks = read.get("add_swa_attention_sink_bias", BOOLEAN, False)
    full_sinks = read.get("add_full_attention_sink_bias", BOOLEAN, False)
    return {
        "windows": tuple(window if slide else None for slide in slides),
        "causal": named_sliding if causal_if_sliding else (bool(causal),) * layers,
        "sinks": tuple(all_sinks or (sliding_sinks if slide else full_sinks) for slide in slides),
    }


def _sliding_layers(read: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Read which layers slide, from `layer_types` or, in older files, `use_sliding_window`."""
    kinds = read.get("layer_types", default=FULL)
    slides = None
    first = None
    if not read.packaging.embeds_target_config:  # else these two fields describe the target
        slides = read.get("use_sliding_window", BOOLEAN)
        first = read.get("max_window_layers", whole(least=0))
    if slides and read.sources["layer_types"] == "default":
        # Transformers' own rule for Qwen3; its default for `max_window_layers`, 28, is no answer.
        if first is None:
            raise read.error("max_window_layers", "is missing, and so is layer_types")
        return tuple(layer >= first for layer in range(layers))
    kinds = [kinds] * layers if isinstance(kinds, str) else kinds
    place = read.place("layer_types")
    is_valid = isinstance(kinds, list) and all(kind in (FULL, SLIDING) for kind in kinds)
    if not is_valid or len(kinds) != layers:
        raise read.error(place, f"must be {FULL} or {SLIDING} for each of the {layers} layers")
    if SLIDING in kinds and slides is False:
        raise read.error(place, "names sliding layers, but use_sliding_window is false")
    return tuple(kind == SLIDING for kind in kinds)


def read_rope(read: ConfigReader, positions: int) -> tuple[float, Mapping[str, Any] | None]:
    """Read `rope_theta`, and how the rotary frequencies are scaled; None for not at all.

    `rope_parameters` and `rope_scaling` override the root. Gemma 4 has parameters for each kind of
    layer.
    """
    theta = read.get("rope_theta", POSITIVE, 10000.0)
    old = read.get("rope_scaling", OBJECT, {})
    values = dict(read.get("rope_parameters", OBJECT, {}))
    gemma4 = read.packaging.gemma4
    place = read.place("rope_parameters" if values else "rope_scaling")
    if gemma4:
        place = f"{place}.{FULL}"
        values = dict(read.check(place, values.get(FULL), OBJECT))
    else:
        for key, value in old.items():
            if values.setdefault(key, value) != value:
                raise read.error(read.place("rope_scaling"), "contradicts rope_parameters")
    nested_theta = values.pop("rope_theta", None)
    if nested_theta is not None:
        read.sources["rope_theta"] = f"{place}.rope_theta"
        theta = read.check(f"{place}.rope_theta", nested_theta, POSITIVE)
    if theta <= 1:
        raise read.error("rope_theta", f"must be above 1, not {theta:g}")
    kinds = [kind for kind in ROPE_FIELDS if gemma4 == (kind == "proportional")]
    kind = values.pop("rope_type", None) or values.get("type") or "default"
    kind = read.check(f"{place}.rope_type", kind, one_of(*kinds))
    values.pop("type", None)
    kept = {"rope_type": kind}
    for key, value in values.items():
        kinds_with_key = [rope_kind for rope_kind in kinds if key in ROPE_FIELDS[rope_kind]]
        if kind in kinds_with_key and value is not None:
            if value != 0 or not key.startswith("mscale"):  # an mscale of 0 is off
                check = BOOLEAN if key == "truncate" else POSITIVE
                kept[key] = read.check(f"{place}.{key}", value, check)
        elif key == "partial_rotary_factor":
            if value not in (None, 1) and not read.packaging.embeds_target_config:
                raise read.error(f"{place}.{key}", f"must be 1, not {brief(value)}")
        elif isinstance(value, Mapping) or (kinds_with_key and value is not None):
            raise read.error(f"{place}.{key}", f"is not understood for {kind} rope")
        else:
            read.ignore(f"{place}.{key}", value)
    if kind == "default":
        return float(theta), None
    required = ROPE_FIELDS[kind][0]
    if required not in kept:
        raise read.error(f"{place}.{required}", "is missing")
    read.sources["rope_scaling"] = place
    if kind == "yarn":
        kept = {ORIGINAL: positions} | kept
    return float(theta), kept


def rope_amplitude(read: ConfigReader, fields: Mapping[str, Any]) -> float:
    """Compute the factor on rotated queries and keys, as Transformers does."""
    scaling = fields["rope_scaling"]
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    read.sources["rope_amplitude"] = read.sources["rope_scaling"]
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    up = scaling.get("mscale", 0)
    down = scaling.get("mscale_all_dim", 0)
    is_kimi = fields.items() >= KIMI_K25.items() and (scaling["factor"], up, down) == (64, 1, 1)
    if is_kimi:
        read.sources["rope_amplitude"] = "as Kimi-K2.5-DFlash was trained"
    if is_kimi or not (up and down):
        up = 1
        down = 0
    growth = 0.1 * math.log(max(scaling["factor"], 1))
    return float((up * growth + 1) / (down * growth + 1))
