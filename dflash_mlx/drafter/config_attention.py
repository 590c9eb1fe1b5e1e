"""What a config says about attention: taps, the first drafting row, windows, causality, rotation.

Published files say these in many ways. A wrong reading runs, and drafts badly; so whatever is
missing or contradicts itself is a `ConfigError`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..validation import brief, is_integer
from .config_reader import BOOLEAN, OBJECT, POSITIVE, ConfigReader, FieldCheck, one_of, whole
from .packagings import EAGLE3, FIRST_ROW_FLAGS, FULL, SLIDING

TAPS = "target_layer_ids"
ORIGINAL = "original_max_position_embeddings"
# The fields of each kind of rope. All but "default" need the factor.
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": (
        ("factor", ORIGINAL, "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        + ("attention_factor", "truncate")
    ),
}
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


def _are_layers(value: Any) -> bool:
    listed = isinstance(value, list) and 0 < len(value) <= 1024
    return listed and all(is_integer(layer, -1) for layer in value)


LAYERS = FieldCheck(_are_layers, "a list of layer numbers")
LAYERS_OR_NONE = FieldCheck(lambda value: value == [] or _are_layers(value), LAYERS.words)


def read_taps(read: ConfigReader) -> tuple[int, ...]:
    """The tapped layers of the target: 0-based, -1 for the embedding's output.

    They are required, but for EAGLE-3: other drafters follow no one rule.
    """
    is_eagle = EAGLE3 in read.packaging.first_row
    taps, check = read.get(TAPS, LAYERS), LAYERS_OR_NONE if is_eagle else LAYERS
    shifted, place = read.get("shifted_layer_ids", check), read.place("shifted_layer_ids")
    if shifted and place.startswith("eagle_config."):
        taps = shifted  # SGLang's and NVIDIA's name the layers themselves
    elif shifted:
        # The stream after k layers, which is the output of layer k - 1.
        found = [layer - 1 for layer in shifted]
        if taps not in (None, found):
            raise read.error(read.place(TAPS), f"contradicts {place}")
        taps = found
    if taps is None and not is_eagle:
        raise read.error(TAPS, "is missing")
    if not taps:
        read.sources[TAPS] = "the authors' rule: 1, the one before the middle, the fourth last"
    return tuple(taps or ())


def read_first_row(read: ConfigReader, kind: str, block: int) -> int:
    """The row of a block that drafts the first token: 1, or 0 if the anchor's row drafts."""
    said: list[tuple[str, int]] = []
    for flag, row in FIRST_ROW_FLAGS.items():
        for place, value in read.found(flag):
            said.append((place, row if read.check(place, value, BOOLEAN) else 1 - row))
    match read.get("speculators_config", OBJECT):
        # Fewer tokens are only how many drafts to ask for.
        case {"proposal_methods": [{"speculative_tokens": int(drafts)}, *_]} if drafts >= block - 1:
            said.append(("speculators_config", block - drafts))
    default = read.packaging.first_row.get(kind, 1)
    if not said and default is None:
        flags = ", ".join(FIRST_ROW_FLAGS)
        raise read.error("markov_rank", f"needs one of {flags}, to say which row drafts first")
    place, first = said[0] if said else (f"default of {read.packaging.name}", int(default or 0))
    for other, row in said:
        if row != first or row < 0:
            raise read.error(place, f"contradicts {other} or block_size")
    read.sources["first_row"] = place
    return first


def read_windows(
    read: ConfigReader, layers: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Each layer's window, None for full attention, and whether `layer_types` made it slide."""
    named = slides = _sliding_layers(read, layers)
    window = read.get("sliding_window", whole())
    use_swa, width = read.get("use_swa", BOOLEAN), read.get("swa_window_size", whole())
    if use_swa:
        window = width or window
        slides = named if any(named) else (True,) * layers
    if any(slides) and window is None:
        raise read.error("sliding_window", "is missing")
    return tuple(window if slide else None for slide in slides), named


def _sliding_layers(read: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Which layers slide, from `layer_types` or, in older files, `use_sliding_window`."""
    kinds = read.get("layer_types", default=FULL)
    slides = first = None
    if not read.packaging.copied:  # else these two are the target's
        slides = read.get("use_sliding_window", BOOLEAN)
        first = read.get("max_window_layers", whole(least=0))
    if slides and read.sources["layer_types"] == "default":
        # Transformers' own rule for Qwen3; its default for `max_window_layers`, 28, is no answer.
        if first is None:
            raise read.error("max_window_layers", "is missing, and so is layer_types")
        return tuple(layer >= first for layer in range(layers))
    kinds = [kinds] * layers if isinstance(kinds, str) else kinds
    place = read.place("layer_types")
    known = isinstance(kinds, list) and all(kind in (FULL, SLIDING) for kind in kinds)
    if not known or len(kinds) != layers:
        raise read.error(place, f"must be {FULL} or {SLIDING} for each of the {layers} layers")
    if SLIDING in kinds and slides is False:
        raise read.error(place, "names sliding layers, but use_sliding_window is false")
    return tuple(kind == SLIDING for kind in kinds)


def read_causality(read: ConfigReader, sliding: tuple[bool, ...]) -> tuple[bool, ...]:
    """Whether a block's rows are blind to later rows of it, by layer.

    An explicit flag applies to every layer. Without one, the layers that `layer_types` calls
    sliding are causal if the packaging has it so.
    """
    explicit = read.get("causal", BOOLEAN)
    non_causal = read.get("sliding_window_non_causal", BOOLEAN)
    if explicit is None:
        read.sources["causal"] = f"rule of {read.packaging.name}"
        if not non_causal and read.packaging.causal == "sliding":
            return sliding
    return (bool(explicit),) * len(sliding)


def read_sinks(read: ConfigReader, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Which layers have a learned logit in every softmax's denominator."""
    everywhere = read.get("attention_sink_bias", BOOLEAN, False)
    sliding = read.get("add_swa_attention_sink_bias", BOOLEAN, False)
    full = read.get("add_full_attention_sink_bias", BOOLEAN, False)
    return tuple(everywhere or (full if window is None else sliding) for window in windows)


def read_rope(read: ConfigReader, positions: int) -> tuple[float, Mapping[str, Any] | None]:
    """`rope_theta`, and how the rotary frequencies are scaled, None for not at all.

    `rope_parameters` wins over `rope_scaling`, and both over the root. Gemma 4 has one for each
    kind of layer.
    """
    if read.packaging.gemma4:
        return _gemma4_rope(read)
    theta = read.get("rope_theta", POSITIVE, 10000.0)
    found: dict[str, Any] | None = None
    for name in ("rope_scaling", "rope_parameters"):
        values = dict(read.get(name, OBJECT, {}))
        place = read.place(name)
        if (own := values.pop("rope_theta", None)) is not None:
            read.sources["rope_theta"] = f"{place}.rope_theta"
            theta = read.check(f"{place}.rope_theta", own, POSITIVE)
        scaling = _scaling(read, place, values)
        if scaling is not None and found not in (None, scaling):
            raise read.error("rope_scaling", "contradicts rope_parameters")
        if scaling is not None and found is None:
            found, read.sources["rope_scaling"] = scaling, place
    if theta <= 1:
        raise read.error("rope_theta", f"must be above 1, not {theta:g}")
    if found is not None and found["rope_type"] == "yarn":
        found.setdefault(ORIGINAL, positions)
    return float(theta), found


def _gemma4_rope(read: ConfigReader) -> tuple[float, Mapping[str, Any]]:
    place = f"rope_parameters.{FULL}"
    values = read.check(place, read.get("rope_parameters", OBJECT, {}).get(FULL), OBJECT)
    found = {
        name: read.check(f"{place}.{name}", values.get(name), check)
        for name, check in (
            ("rope_type", one_of("proportional")),
            ("rope_theta", POSITIVE),
            ("partial_rotary_factor", POSITIVE),
        )
    }
    read.sources["rope_theta"] = read.sources["rope_scaling"] = place
    return float(found.pop("rope_theta")), found


def _scaling(read: ConfigReader, place: str, values: dict[str, Any]) -> dict[str, Any] | None:
    """A rope object with its kind checked and the fields of that kind; None for the default."""
    old_name = values.pop("type", None)
    kind = values.pop("rope_type", None) or old_name or "default"
    kind = read.check(f"{place}.rope_type", kind, one_of(*ROPE_FIELDS))
    partial = values.pop("partial_rotary_factor", None)
    if partial not in (None, 1) and not read.packaging.copied:
        raise read.error(f"{place}.partial_rotary_factor", f"must be 1, not {brief(partial)}")
    kept = {"rope_type": kind}
    for key, value in values.items():
        if key not in ROPE_FIELDS[kind] or value is None:
            known = any(key in fields for fields in ROPE_FIELDS.values())
            if isinstance(value, Mapping) or (known and value is not None):
                raise read.error(f"{place}.{key}", f"is not understood for {kind} rope")
            read.ignore(f"{place}.{key}")
            continue
        off = value == 0 and key in ("mscale", "mscale_all_dim")
        if not off:
            check = BOOLEAN if key == "truncate" else POSITIVE
            kept[key] = read.check(f"{place}.{key}", value, check)
    if kind == "default":
        return None
    if "factor" not in kept:
        raise read.error(f"{place}.factor", "is missing")
    return kept


def rope_amplitude(read: ConfigReader, resolved: Mapping[str, Any]) -> float:
    """The factor on rotated queries and keys, as Transformers computes it."""
    scaling = resolved["rope_scaling"]
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    read.sources["rope_amplitude"] = read.sources["rope_scaling"]
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    weights = (1.0, 0.0)
    if KIMI_K25.items() <= resolved.items() and KIMI_K25_YARN.items() <= scaling.items():
        read.sources["rope_amplitude"] = "as Kimi-K2.5-DFlash was trained"
    elif "mscale" in scaling and "mscale_all_dim" in scaling:
        weights = (scaling["mscale"], scaling["mscale_all_dim"])
    growth = 0.1 * math.log(max(scaling["factor"], 1))
    return (weights[0] * growth + 1) / (weights[1] * growth + 1)
