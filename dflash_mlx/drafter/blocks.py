"""What a config says about its blocks: which taps, which row drafts first, who sees whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..validation import brief, is_integer
from .fields import Fields
from .packagings import FIRST_ROW_FLAGS, FULL, SLIDING, SPELLINGS

TAPS = "target_layer_ids"
MOST_TAPS = 1024
EMBEDDING_OUTPUT = -1  # as a tap: what the target's first layer reads


def read_taps(fields: Fields) -> tuple[int, ...]:
    """The tapped layers, 0-based, -1 for the embedding's output.

    They are not derived where they are missing: published drafters follow no one rule.
    """
    own, shifted = fields.get(TAPS), fields.one("ids of Speculators")
    taps = None if own is None else _layers(fields, TAPS, own, least=EMBEDDING_OUTPUT)
    if shifted is None:
        if taps is None:
            raise fields.error(TAPS, "is missing")
        return taps
    # The stream after k layers, which is the output of layer k - 1.
    place, value = shifted
    found = tuple(layer - 1 for layer in _layers(fields, place, value, least=0))
    if taps not in (None, found):
        raise fields.error(TAPS, f"contradicts {place}, which is one higher")
    fields.sources[TAPS] = f"{place}, minus one"
    return found


def _layers(fields: Fields, place: str, value: Any, least: int) -> tuple[int, ...]:
    whole = isinstance(value, list) and all(is_integer(tap, least) for tap in value)
    if not whole or not 0 < len(value) <= MOST_TAPS:
        name = place.rpartition(".")[2]
        raise fields.error(name, f"must be a list of layer numbers, not {brief(value)}")
    return tuple(value)


def read_first_row(fields: Fields, kind: str, block: int) -> int:
    """The row of a block that drafts the first token: 1, or 0 where the anchor's row drafts.

    Getting this wrong runs, and drafts badly; so it is known, or an error.
    """
    said: list[tuple[str, int]] = []
    for flag, row in FIRST_ROW_FLAGS.items():
        for place, value in fields.found(flag):
            said.append((place, row if fields.truth(place, value) else 1 - row))
    if (drafts := _speculative_tokens(fields)) is not None:
        # A smaller number is how many drafts to ask for, and says nothing.
        if drafts[1] > block:
            raise fields.error("speculators_config", f"has more {drafts[0]} than block_size")
        if drafts[1] >= block - 1:
            said.append((f"speculators_config.{drafts[0]}", block - drafts[1]))
    for place, row in said[1:]:
        if row != said[0][1]:
            name = said[0][0]
            raise fields.error(name.rpartition(".")[2], f"contradicts {place}")
    if said:
        fields.sources["first_row"] = said[0][0]
        return said[0][1]
    default = fields.packaging.first_row.get(kind, 1)
    if default is None:
        flags = ", ".join(FIRST_ROW_FLAGS)
        raise fields.error(
            "markov_rank", f"without any of {flags}: which row drafts first is not said"
        )
    fields.sources["first_row"] = f"default of {fields.packaging.name}"
    return default


def _speculative_tokens(fields: Fields) -> tuple[str, int] | None:
    methods = fields.mapping("speculators_config").get("proposal_methods")
    if not (isinstance(methods, list) and methods and isinstance(methods[0], Mapping)):
        return None
    name, value = "speculative_tokens", methods[0].get("speculative_tokens")
    if value is not None and not is_integer(value):
        raise fields.error("speculators_config", f"has {name} {brief(value)}")
    return None if value is None else (name, value)


def read_windows(fields: Fields, layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Each layer's window, None for full attention, and whether `layer_types` made it slide."""
    kinds, source = _kinds(fields, layers)
    named = tuple(kind == SLIDING for kind in kinds)
    window = (
        fields.optional_integer("sliding_window") if any(named) else fields.get("sliding_window")
    )
    width_source = "sliding_window"
    slides = named
    use_swa, width = fields.boolean("use_swa"), fields.optional_integer("swa_window_size")
    if use_swa:
        width_source = "swa_window_size" if width else width_source
        window = width or fields.optional_integer("sliding_window")
        if not any(named):
            slides, source = (True,) * layers, "use_swa"
    if not any(slides):
        fields.sources["windows"] = source
        return (None,) * layers, named
    if window is None:
        raise fields.error("sliding_window", "is missing")
    fields.sources["windows"] = f"{source}, {width_source}"
    return tuple(window if slide else None for slide in slides), named


def _kinds(fields: Fields, layers: int) -> tuple[list[str], str]:
    """Each layer's kind, from `layer_types` or, in older files, `use_sliding_window`."""
    kinds, source = fields.get("layer_types"), fields.sources["layer_types"]
    copied = fields.packaging.copied  # then it is the target that slides, or not
    slides = False if copied else fields.get("use_sliding_window")
    first = None if copied else fields.optional_integer("max_window_layers", minimum=0)
    if isinstance(slides, str | int | float | list | dict) and not isinstance(slides, bool):
        fields.boolean("use_sliding_window")
    if kinds is None and slides:
        # Transformers' own rule for Qwen3 files without a list; its default, 28, is no answer.
        if first is None:
            raise fields.error(
                "max_window_layers",
                "is missing, and layer_types too, while use_sliding_window is true",
            )
        source = "derived from use_sliding_window, max_window_layers"
        return [SLIDING if layer >= first else FULL for layer in range(layers)], source
    if kinds is None or isinstance(kinds, str):
        return [kinds or FULL] * layers, source
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.error("layer_types", f"must name the kind of each of the {layers} layers")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise fields.error("layer_types", f"has the unknown kind {brief(kind)}")
    if SLIDING in kinds and slides is False and not copied:
        raise fields.error("layer_types", "names sliding layers while use_sliding_window is false")
    return kinds, source


def read_causality(fields: Fields, sliding: tuple[bool, ...]) -> tuple[bool, ...]:
    """Whether a block's rows are blind to later rows of it, by layer.

    An explicit flag rules every layer. Without one, the layers that `layer_types` calls sliding
    are causal where the packaging has it so.
    """
    explicit = fields.one("causal")
    non_causal = fields.get("sliding_window_non_causal")
    if non_causal is not None:
        non_causal = fields.truth("sliding_window_non_causal", non_causal)
    if explicit is not None:
        fields.sources["causal"] = explicit[0]
        return (fields.truth(*explicit),) * len(sliding)
    if fields.packaging.causal == "never":
        fields.sources["causal"] = f"rule of {fields.packaging.name}: no layer is causal"
        return (False,) * len(sliding)
    if non_causal:
        said = fields.sources["sliding_window_non_causal"]
        fields.sources["causal"] = f"sliding_window_non_causal ({said})"
        return (False,) * len(sliding)
    fields.sources["causal"] = "rule: sliding layers are causal, full ones are not"
    return sliding


def read_sinks(fields: Fields, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Which layers have a learned logit in every softmax's denominator."""
    everywhere = fields.flag("sinks") or False
    sliding = fields.flag("sinks of sliding layers") or False
    full = fields.flag("sinks of full layers") or False
    fields.sources["sinks"] = (
        ", ".join(
            place
            for field in ("sinks", "sinks of sliding layers", "sinks of full layers")
            for place, _ in fields.found(*SPELLINGS[field])
        )
        or "default"
    )
    return tuple(everywhere or (sliding if window is not None else full) for window in windows)
