"""A drafter's config.json, in every published packaging, resolved into one validated form.

Published drafters spell the same fact in several places: the block size at the root or nested in
`dflash_config`, the rope base at the root or in `rope_parameters`, causality as `is_causal` or
`causal`. Reading only one of them is how other ports ran drafters at the wrong block size without
a word. Here the table of `packagings` says where a field may stand and what its absence means,
every decision remembers the place it was read from, and what is missing, contradicts itself or is
not understood is a `ConfigError` that names the field.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, IncompatibleDrafterError
from ..validation import brief, read_json
from .blocks import read_causality, read_first_row, read_sinks, read_taps, read_windows
from .fields import Decision, Fields
from .packagings import (
    ARCHITECTURES,
    DFLASH,
    DFLASH2,
    DSPARK,
    JETSPEC,
    OTHER_NETWORKS,
    PROJECTORS,
    SPECFORGE,
    SPECULATORS,
    SPECULATORS_KINDS,
    Architecture,
)
from .rotation import amplitude, read_rotation

MOST_LAYERS, MOST_HEADS, MOST_WIDTH, MOST_ROWS = 1024, 2**14, 2**20, 2**12
MOST_TOKENS = 2**24  # of a vocabulary
MARKOV_TYPES = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class Markov:
    """DSpark's head: a bias on a row's logits that the token before it decides.

    Attributes:
        rank: of the bias.
        type: "vanilla", "gated" by the row's hidden state, or "rnn" over the drafted tokens.
    """

    rank: int
    type: str = "vanilla"


@dataclass(frozen=True)
class DraftConfig:
    """The resolved configuration of a block drafter: DFlash (arXiv 2602.06036), DFlash2, DSpark."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # the target's
    block_size: int  # rows of a block, the anchor's included
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # the target's layers whose outputs are read; -1: embedding
    num_target_layers: int | None  # None: the config does not say
    windows: tuple[int | None, ...]  # per layer: the sliding window, None for full attention
    causal: tuple[bool, ...]  # per layer: are a block's rows blind to later rows of the block?
    kind: str = DFLASH
    packaging: str = "zlab"
    first_row: int = 1  # of a block that drafts: 0 where the anchor's does
    draft_vocab_size: int = 0  # tokens that it can draft; 0 stands for all
    target_hidden_size: int = 0  # the width of its taps; 0 stands for its own
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None  # None, or {"rope_type": "linear" | "yarn", ...}
    rope_amplitude: float = 1.0  # on rotated queries and keys
    rope_neox: bool = True  # pairs (i, i + d/2); False: (2i, 2i + 1)
    max_position_embeddings: int = 40960
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    sinks: tuple[bool, ...] = ()  # per layer: a learned logit per head in the denominator
    tie_word_embeddings: bool = False  # of a drafter with its own embedding: its head too
    input_embedding_scale: float = 1.0  # on the embeddings of a block
    output_multiplier: float = 1.0  # on the head's logits
    final_logit_softcapping: float | None = None  # then cap * tanh(logits / cap)
    logit_scale: float = 1.0  # on all of that, a Markov bias included
    conv_kernel_size: int = 0  # this and the four below: of DFlash2, 0 in the others
    conv_group_size: int = 0  # channels that share a dynamic kernel
    selector_rank: int = 0
    selector_top_k: int = 0  # candidates per drafted token
    selector_vocab_size: int | None = None  # ids from here on are never drafted
    markov: Markov | None = None  # this and the one below: of DSpark
    confidence: bool = False  # a head that says how sure each row is
    runtime_block_size: int | None = None  # rows that the publisher suggests to run
    quantization: Mapping[str, Any] | None = None  # of weights stored quantized, as mlx-lm says it
    unreadable: str | None = None  # why the weights cannot be read, where the config says so
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    unused: tuple[Decision, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        """What stands for another field's value becomes it."""
        object.__setattr__(self, "draft_vocab_size", self.draft_vocab_size or self.vocab_size)
        object.__setattr__(self, "target_hidden_size", self.target_hidden_size or self.hidden_size)
        object.__setattr__(self, "sinks", self.sinks or (False,) * self.num_hidden_layers)

    @property
    def is_dflash2(self) -> bool:
        """Whether the drafter has DFlash2's convolutions and candidate selector."""
        return self.conv_kernel_size > 0

    @property
    def drafts(self) -> int:
        """Tokens that a whole block drafts."""
        return self.block_size - self.first_row

    @property
    def attention_sinks(self) -> bool:
        """Whether any layer has a learned logit in its softmax's denominator."""
        return any(self.sinks)

    @property
    def rope_type(self) -> str:
        """How the rotary frequencies are stretched; "default" for not at all."""
        return "default" if self.rope_scaling is None else str(self.rope_scaling["rope_type"])

    @classmethod
    def from_file(cls, path: str | Path) -> DraftConfig:
        """Read and resolve a config.json. Raises `ConfigError`."""
        return cls.from_dict(read_json(path), where=str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "drafter config") -> DraftConfig:
        """Resolve a parsed config.json; `where` starts the error messages. Raises `ConfigError`."""
        said = _architecture(raw, where)
        read = Fields(raw, where, said.packaging)
        read.found_at_root("architectures", "speculators_model_type")
        resolved = _shape(read)
        resolved |= _heads(read, said, resolved)
        layers, rows = resolved["num_hidden_layers"], resolved["block_size"]
        resolved["first_row"] = read_first_row(read, resolved["kind"], rows)
        if rows <= resolved["first_row"]:
            raise read.error("block_size", f"must be a whole number of at least 2, not {rows}")
        resolved["windows"], sliding = read_windows(read, layers)
        resolved["causal"] = read_causality(read, sliding)
        resolved["sinks"] = read_sinks(read, resolved["windows"])
        resolved["target_layer_ids"] = _taps(read, resolved["num_target_layers"])
        resolved |= read_rotation(read, resolved["max_position_embeddings"])
        resolved["rope_neox"] = read.flag("rope_neox", said.rope_neox)
        resolved["rope_amplitude"] = amplitude(resolved, read.sources)
        if resolved["head_dim"] % 2:
            raise read.error("head_dim", "must be even for rotary positions")
        resolved |= _weights(read)
        unused = tuple(read.check_all_known())
        return cls(**resolved, sources=read.sources, unused=unused)

    def describe(self) -> list[Decision]:
        """Every resolved field with the place it came from, for people to check.

        What is in the config and not used is in `unused`.
        """
        names = [item.name for item in fields(self) if item.name not in ("sources", "unused")]
        return [
            Decision(name, getattr(self, name), self.sources.get(name, "default")) for name in names
        ]

    def check_fits(self, hidden_size: int, vocab_size: int, num_layers: int) -> None:
        """Raise `IncompatibleDrafterError` unless a target of this shape is the drafter's own.

        A `num_target_layers` that is one off, as some files have it, only warns.
        """
        pairs = [("hidden_size", self.target_hidden_size, hidden_size)]
        if not self.sources.get("vocab_size", "").startswith("default of"):
            pairs.append(("vocab_size", self.vocab_size, vocab_size))
        depth = num_layers if self.num_target_layers is None else self.num_target_layers
        pairs.append(("num_target_layers", depth, num_layers))
        for name, ours, theirs in pairs:
            if ours == theirs:
                continue
            message = f"its {name} is {ours}, this target has {theirs}."
            if name != "num_target_layers" or abs(ours - theirs) > 1:
                raise IncompatibleDrafterError(
                    f"The drafter was made for another target: {message}"
                )
            # Of this place, whoever asks: a pair is checked in several, and it is said once.
            warnings.warn(
                f"dflash-mlx: the drafter may be another target's: {message}", stacklevel=1
            )
        if max(self.target_layer_ids) >= num_layers:
            raise IncompatibleDrafterError(
                f"The drafter was made for another target: it reads layer "
                f"{max(self.target_layer_ids)} of {num_layers}."
            )


def _architecture(raw: Mapping[str, Any], where: str) -> Architecture:
    """What the config's labels stand for. Raises `ConfigError`."""
    names = raw.get("architectures") or [None]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str | None):
        raise ConfigError(f"{where}: architectures must name one drafter, not {brief(names)}.")
    [name] = names
    if name in OTHER_NETWORKS:
        raise ConfigError(
            f"{where}: architectures {name!r} is {OTHER_NETWORKS[name]}, another network."
        )
    algorithm = raw.get("speculators_model_type")
    if algorithm is not None or "transformer_layer_config" in raw:
        kind = SPECULATORS_KINDS.get(algorithm) if isinstance(algorithm, str) else None
        if kind is None:
            raise ConfigError(
                f"{where}: speculators_model_type must be one of {', '.join(SPECULATORS_KINDS)}, "
                f"not {brief(algorithm)}."
            )
        if name is not None and name not in ARCHITECTURES and "Speculator" not in name:
            raise _unknown(where, name)
        return Architecture(SPECULATORS, kind)
    if name is None:
        muse = raw.get("model_type") == "muse_glimmer_assistant"
        name = "MuseGlimmerAssistantModel" if muse else "DFlashDraftModel"
    if name not in ARCHITECTURES:
        raise _unknown(where, name)
    said = ARCHITECTURES[name]
    nested = raw.get("dflash_config")
    nested = nested if isinstance(nested, Mapping) else {}
    if said.kind == DFLASH and any("causal_head" in place for place in (raw, nested)):
        return replace(said, packaging=JETSPEC)
    return said


def _unknown(where: str, name: str) -> ConfigError:
    return ConfigError(f"{where}: architectures {name!r} is not a drafter that is known here.")


def _shape(read: Fields) -> dict[str, Any]:
    """The sizes of the network, and of the target that it was made for."""
    heads = read.integer("num_attention_heads", most=MOST_HEADS)
    hidden = read.integer("hidden_size", most=MOST_WIDTH)
    vocabulary = read.integer("vocab_size", most=MOST_TOKENS)
    return {
        "hidden_size": hidden,
        "num_hidden_layers": read.integer("num_hidden_layers", most=MOST_LAYERS),
        "intermediate_size": read.integer("intermediate_size", most=MOST_WIDTH),
        "num_attention_heads": heads,
        "num_key_value_heads": _key_value_heads(read, heads),
        "head_dim": read.integer("head_dim", max(hidden // heads, 1), most=MOST_WIDTH // heads),
        "vocab_size": vocabulary,
        "draft_vocab_size": _drafted_vocabulary(read, vocabulary),
        "target_hidden_size": _target_width(read, hidden),
        "block_size": read.integer("block_size", most=MOST_ROWS),
        "mask_token_id": read.integer("mask_token_id", minimum=0, below=vocabulary),
        "num_target_layers": read.optional_integer("num_target_layers", most=MOST_LAYERS),
        "max_position_embeddings": read.integer("max_position_embeddings", 40960),
    }


def _drafted_vocabulary(read: Fields, vocabulary: int) -> int:
    """How many tokens can be drafted."""
    count = read.optional_integer("draft_vocab_size")
    if count is None:
        return vocabulary
    if read.sources["draft_vocab_size"].startswith("default"):
        return min(count, vocabulary)
    if count > vocabulary or (count < vocabulary and not read.packaging.reduced):
        raise read.error("draft_vocab_size", f"must be {vocabulary}, not {count}")
    return count


def _target_width(read: Fields, hidden: int) -> int:
    width = read.integer("target_hidden_size", hidden, most=MOST_WIDTH)
    if width != hidden and not read.packaging.other_width:
        raise read.error("target_hidden_size", f"must be {hidden}, not {width}")
    return width


def _key_value_heads(read: Fields, heads: int) -> int:
    count = read.integer("num_key_value_heads", heads, divides=heads)
    mode = read.get("attention_mode")
    if mode not in (None, "gqa", "mha") or (mode == "mha" and count != heads):
        raise read.error("attention_mode", f"is {brief(mode)} with {count} heads of keys")
    return count


def _heads(read: Fields, said: Architecture, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """What comes after the backbone, and so what the drafter is."""
    kind, packaging = said.kind, said.packaging
    rank, markov = read.one("markov_rank"), None
    if rank is None and kind == DSPARK:
        raise read.error("markov_rank", "is missing")
    if rank is not None:
        read.sources["markov"] = rank[0]
        width = read.integer(rank[0].rpartition(".")[2], minimum=0, most=MOST_WIDTH)
        markov = Markov(width, _markov_type(read)) if width else None
    confidence = read.flag("confidence", packaging.confidence and kind == DSPARK) or False
    if markov is not None and kind == DFLASH2:
        raise read.error("markov_rank", "and DFlash2's selector do not go together")
    if kind != DFLASH2:
        kind = DSPARK if markov is not None or (kind == DSPARK and confidence) else DFLASH
    projector = read.get("projector_type")
    if projector is not None and (
        not isinstance(projector, str) or kind not in PROJECTORS.get(projector, ())
    ):
        raise read.error("projector_type", f"is {brief(projector)}, the rest says {kind}")
    if markov is not None and packaging.name == "zlab":
        # DSpark under DFlash's label. There are both kinds, so the file has to say more.
        packaging = replace(SPECFORGE, first_row={DSPARK: None})
    read.packaging = packaging
    kept: dict[str, Any] = {"kind": kind, "packaging": packaging.name, "markov": markov}
    kept["confidence"] = confidence and kind == DSPARK
    if kind == DFLASH2:
        kept |= _dflash2(read, resolved)
    return kept


def _markov_type(read: Fields) -> str:
    kind = read.get("markov_head_type") or "vanilla"
    if kind not in MARKOV_TYPES:
        raise read.error("markov_head_type", f"must be one of {', '.join(MARKOV_TYPES)}")
    return str(kind)


def _dflash2(read: Fields, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of DFlash2's convolutions and of its candidate selector."""
    hidden, vocabulary = resolved["hidden_size"], resolved["vocab_size"]
    if resolved["draft_vocab_size"] != vocabulary:
        raise read.error("draft_vocab_size", f"must be {vocabulary}, the selector's")
    return {
        "conv_kernel_size": read.integer("conv_kernel_size", most=64),
        "conv_group_size": read.integer("conv_group_size", divides=hidden),
        "selector_rank": read.integer("selector_rank", most=MOST_WIDTH),
        "selector_top_k": read.integer("selector_top_k", below=vocabulary + 1),
        "selector_vocab_size": read.optional_integer("selector_vocab_size", most=vocabulary),
    }


def _taps(read: Fields, depth: int | None) -> tuple[int, ...]:
    taps = read_taps(read)
    if depth is not None and max(taps) >= depth:
        raise read.error("target_layer_ids", f"names layer {max(taps)} of {depth}")
    return taps


def _weights(read: Fields) -> dict[str, Any]:
    """What is done to embeddings and logits, and how the weights are stored."""
    stored, unreadable = _quantization(read)
    return {
        "rms_norm_eps": read.number("rms_norm_eps", 1e-6),
        "attention_bias": read.boolean("attention_bias"),
        "tie_word_embeddings": read.boolean("tie_word_embeddings"),
        "input_embedding_scale": read.number("input_embedding_scale", 1.0),
        "output_multiplier": read.number("output_multiplier", 1.0),
        "final_logit_softcapping": read.optional_number("final_logit_softcapping"),
        "logit_scale": read.number("logit_scale", 1.0),
        "runtime_block_size": read.optional_integer("runtime_block_size", most=MOST_ROWS),
        "quantization": stored,
        "unreadable": unreadable,
    }


def _quantization(read: Fields) -> tuple[Mapping[str, Any] | None, str | None]:
    """How mlx-lm quantized the stored weights (its converters write both spellings).

    ModelOpt's files name an algorithm; then the network is known and its weights are not readable.
    """
    both = [name for name in ("quantization", "quantization_config") if read.mapping(name)]
    if not both:
        return None, None
    name = both[0]
    stored = read.mapping(name)
    if "quant_algo" in stored and "quant_method" not in stored:
        read.sources["unreadable"] = name
        return None, f"{name}.quant_algo {brief(stored['quant_algo'])} is not one of mlx-lm's"
    sizes = [type(stored.get(size)) is int for size in ("bits", "group_size")]
    if "quant_method" in stored or not all(sizes):
        raise read.error(name, "is not one of mlx-lm's, with bits and group_size")
    read.sources["quantization"] = name
    return stored, None
