"""A drafter's config.json, in every published packaging, as one validated `DraftConfig`.

Published drafters spell the same fact in several places: the block size at the root or nested in
`dflash_config`, the rope base at the root or in `rope_parameters`, causality as `is_causal` or
`causal`. A reader of only one of them runs a drafter at the wrong block size without a word. The
tables of `packagings` say where a field may stand and what its absence means. What is missing,
contradicts itself or is not understood is a `ConfigError` that names the field.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, IncompatibleDrafterError
from ..validation import brief, read_json
from .config_attention import (
    read_causality,
    read_first_row,
    read_rope,
    read_sinks,
    read_taps,
    read_windows,
    rope_amplitude,
)
from .config_reader import ConfigReader, ResolvedField
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

MAX_LAYERS, MAX_HEADS, MAX_WIDTH, MAX_ROWS = 1024, 2**14, 2**20, 2**12
MAX_VOCABULARY = 2**24
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
    first_row: int = 1  # the first row of a block that drafts; 0 is the anchor's
    draft_vocab_size: int = 0  # tokens that it can draft; 0 means all
    target_hidden_size: int = 0  # the width of its taps; 0 means its own
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
    unreadable: str | None = None  # why the weights cannot be read, if they cannot
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    unused: tuple[ResolvedField, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        """Fill in the fields whose default is another field's value."""
        object.__setattr__(self, "draft_vocab_size", self.draft_vocab_size or self.vocab_size)
        object.__setattr__(self, "target_hidden_size", self.target_hidden_size or self.hidden_size)
        object.__setattr__(self, "sinks", self.sinks or (False,) * self.num_hidden_layers)

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
        """How the rotary frequencies are scaled; "default" for not at all."""
        return "default" if self.rope_scaling is None else str(self.rope_scaling["rope_type"])

    @classmethod
    def from_file(cls, path: str | Path) -> DraftConfig:
        """Read and resolve a config.json. Raises `ConfigError`."""
        return cls.from_dict(read_json(path), where=str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "drafter config") -> DraftConfig:
        """Resolve a parsed config.json; `where` starts the error messages. Raises `ConfigError`."""
        architecture = _architecture(raw, where)
        read = ConfigReader(raw, where, architecture.packaging)
        for place, _ in read.found("architectures", "speculators_model_type"):
            read.sources[place] = place
        resolved = _sizes(read)
        resolved |= _heads(read, architecture, resolved)
        layers, rows = resolved["num_hidden_layers"], resolved["block_size"]
        resolved["first_row"] = read_first_row(read, resolved["kind"], rows)
        if rows <= resolved["first_row"]:
            problem = f"must be a whole number of at least 2, not {rows}"
            raise read.error(read.place("block_size"), problem)
        resolved["windows"], sliding = read_windows(read, layers)
        resolved["causal"] = read_causality(read, sliding)
        resolved["sinks"] = read_sinks(read, resolved["windows"])
        resolved["target_layer_ids"] = read_taps(read, resolved["num_target_layers"])
        positions = resolved["max_position_embeddings"]
        resolved["rope_theta"], resolved["rope_scaling"] = read_rope(read, positions)
        resolved["rope_neox"] = read.boolean("rope_neox", architecture.rope_neox)
        resolved["rope_amplitude"] = rope_amplitude(resolved, read.sources)
        if resolved["head_dim"] % 2:
            raise read.error("head_dim", "must be even for rotary positions")
        resolved |= _weights(read)
        unused = tuple(read.unused())
        return cls(**resolved, sources=read.sources, unused=unused)

    def describe(self) -> list[ResolvedField]:
        """Every field with the place where it was read.

        Keys of the config that are not used are in `unused`.
        """
        names = [item.name for item in fields(self) if item.name not in ("sources", "unused")]
        return [
            ResolvedField(name, getattr(self, name), self.sources.get(name, "default"))
            for name in names
        ]

    def check_fits(self, hidden_size: int, vocab_size: int, num_layers: int) -> None:
        """Raise `IncompatibleDrafterError` unless a target of this shape is the drafter's own.

        A `num_target_layers` that is one off, as in some files, only warns.
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
            # At this line for every caller: a pair is checked in several places, and warned once.
            warnings.warn(
                f"dflash-mlx: the drafter may be another target's: {message}", stacklevel=1
            )
        if max(self.target_layer_ids) >= num_layers:
            raise IncompatibleDrafterError(
                f"The drafter was made for another target: it reads layer "
                f"{max(self.target_layer_ids)} of {num_layers}."
            )


def _architecture(raw: Mapping[str, Any], where: str) -> Architecture:
    """The packaging and the kind that the config's labels mean. Raises `ConfigError`."""
    names = raw.get("architectures") or [None]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str | None):
        raise ConfigError(f"{where}: architectures must name one drafter, not {brief(names)}.")
    [name] = names
    if name in OTHER_NETWORKS:
        raise ConfigError(
            f"{where}: architectures {name!r} is {OTHER_NETWORKS[name]}, another network."
        )
    unknown = ConfigError(f"{where}: architectures {name!r} is not a known drafter.")
    algorithm = raw.get("speculators_model_type")
    if algorithm is not None or "transformer_layer_config" in raw:
        kind = SPECULATORS_KINDS.get(algorithm) if isinstance(algorithm, str) else None
        if kind is None:
            raise ConfigError(
                f"{where}: speculators_model_type must be one of {', '.join(SPECULATORS_KINDS)}, "
                f"not {brief(algorithm)}."
            )
        if name is not None and name not in ARCHITECTURES and "Speculator" not in name:
            raise unknown
        return Architecture(SPECULATORS, kind)
    if name is None:
        muse = raw.get("model_type") == "muse_glimmer_assistant"
        name = "MuseGlimmerAssistantModel" if muse else "DFlashDraftModel"
    if name not in ARCHITECTURES:
        raise unknown
    found = ARCHITECTURES[name]
    nested = raw.get("dflash_config")
    nested = nested if isinstance(nested, Mapping) else {}
    if found.kind == DFLASH and any("causal_head" in place for place in (raw, nested)):
        return replace(found, packaging=JETSPEC)
    return found


def _sizes(read: ConfigReader) -> dict[str, Any]:
    """The sizes of the network and of its target."""
    heads = read.integer("num_attention_heads", most=MAX_HEADS)
    hidden = read.integer("hidden_size", most=MAX_WIDTH)
    vocabulary = read.integer("vocab_size", most=MAX_VOCABULARY)
    key_value_heads = read.integer("num_key_value_heads", heads, divides=heads)
    mode = read.get("attention_mode")
    if mode not in (None, "gqa", "mha") or (mode == "mha" and key_value_heads != heads):
        problem = f"is {brief(mode)} with {key_value_heads} heads of keys"
        raise read.error(read.place("attention_mode"), problem)
    width = read.integer("target_hidden_size", hidden, most=MAX_WIDTH)
    if width != hidden and not read.packaging.other_width:
        problem = f"must be {hidden}, not {width}"
        raise read.error(read.place("target_hidden_size"), problem)
    most = MAX_WIDTH // heads
    return {
        "hidden_size": hidden,
        "num_hidden_layers": read.integer("num_hidden_layers", most=MAX_LAYERS),
        "intermediate_size": read.integer("intermediate_size", most=MAX_WIDTH),
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": read.integer("head_dim", max(hidden // heads, 1), most=most),
        "vocab_size": vocabulary,
        "draft_vocab_size": _draft_vocabulary(read, vocabulary),
        "target_hidden_size": width,
        "block_size": read.integer("block_size", most=MAX_ROWS),
        "mask_token_id": read.integer("mask_token_id", least=0, most=vocabulary - 1),
        "num_target_layers": read.integer("num_target_layers", None, most=MAX_LAYERS),
        "max_position_embeddings": read.integer("max_position_embeddings", 40960),
    }


def _draft_vocabulary(read: ConfigReader, vocabulary: int) -> int:
    """How many tokens can be drafted."""
    count: int = read.integer("draft_vocab_size", vocabulary)
    if read.sources["draft_vocab_size"].startswith("default"):
        return min(count, vocabulary)
    if count > vocabulary or (count < vocabulary and not read.packaging.reduced):
        raise read.error(read.place("draft_vocab_size"), f"must be {vocabulary}, not {count}")
    return count


def _heads(
    read: ConfigReader, architecture: Architecture, resolved: Mapping[str, Any]
) -> dict[str, Any]:
    """What comes after the backbone, and so the drafter's kind and packaging."""
    kind, packaging = architecture.kind, architecture.packaging
    rank = read.integer("markov_rank", None, least=0, most=MAX_WIDTH)
    if rank is None and kind == DSPARK:
        raise read.error("markov_rank", "is missing")
    markov = Markov(rank, _markov_type(read)) if rank else None
    if markov is not None and kind == DFLASH2:
        raise read.error(read.place("markov_rank"), "and DFlash2's selector do not go together")
    confidence = read.boolean("confidence", packaging.confidence and kind == DSPARK)
    if kind != DFLASH2:
        kind = DSPARK if markov is not None or (kind == DSPARK and confidence) else DFLASH
    projector = read.get("projector_type")
    if projector is not None and (
        not isinstance(projector, str) or kind not in PROJECTORS.get(projector, ())
    ):
        problem = f"is {brief(projector)}, the other fields say {kind}"
        raise read.error(read.place("projector_type"), problem)
    if markov is not None and packaging.name == "zlab":
        # DSpark under DFlash's label. There are both kinds, so the file has to say more.
        packaging = replace(SPECFORGE, first_row={DSPARK: None})
    read.packaging = packaging
    kept: dict[str, Any] = {"kind": kind, "packaging": packaging.name, "markov": markov}
    kept["confidence"] = confidence and kind == DSPARK
    if kind == DFLASH2:
        kept |= _selector(read, resolved)
    return kept


def _markov_type(read: ConfigReader) -> str:
    kind = read.get("markov_head_type") or "vanilla"
    if kind not in MARKOV_TYPES:
        problem = f"must be one of {', '.join(MARKOV_TYPES)}"
        raise read.error(read.place("markov_head_type"), problem)
    return str(kind)


def _selector(read: ConfigReader, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of DFlash2's convolutions and of its candidate selector."""
    hidden, vocabulary = resolved["hidden_size"], resolved["vocab_size"]
    if resolved["draft_vocab_size"] != vocabulary:
        raise read.error("draft_vocab_size", f"must be {vocabulary}, the selector's")
    return {
        "conv_kernel_size": read.integer("conv_kernel_size", most=64),
        "conv_group_size": read.integer("conv_group_size", divides=hidden),
        "selector_rank": read.integer("selector_rank", most=MAX_WIDTH),
        "selector_top_k": read.integer("selector_top_k", most=vocabulary),
        "selector_vocab_size": read.integer("selector_vocab_size", None, most=vocabulary),
    }


def _weights(read: ConfigReader) -> dict[str, Any]:
    """What is done to embeddings and logits, and how the weights are stored."""
    stored, unreadable = _quantization(read)
    return {
        "rms_norm_eps": read.number("rms_norm_eps", 1e-6),
        "attention_bias": read.boolean("attention_bias", False),
        "tie_word_embeddings": read.boolean("tie_word_embeddings", False),
        "input_embedding_scale": read.number("input_embedding_scale", 1.0),
        "output_multiplier": read.number("output_multiplier", 1.0),
        "final_logit_softcapping": read.number("final_logit_softcapping"),
        "logit_scale": read.number("logit_scale", 1.0),
        "runtime_block_size": read.integer("runtime_block_size", None, most=MAX_ROWS),
        "quantization": stored,
        "unreadable": unreadable,
    }


def _quantization(read: ConfigReader) -> tuple[Mapping[str, Any] | None, str | None]:
    """How mlx-lm quantized the stored weights, and why they cannot be read if they cannot.

    mlx-lm's converters write both spellings. ModelOpt's files name an algorithm of their own.
    """
    both = [name for name in ("quantization", "quantization_config") if read.mapping(name)]
    if not both:
        return None, None
    stored = read.mapping(both[0])
    if "quant_algo" in stored and "quant_method" not in stored:
        return None, f"{both[0]}.quant_algo {brief(stored['quant_algo'])} is not one of mlx-lm's"
    sizes = [type(stored.get(size)) is int for size in ("bits", "group_size")]
    if "quant_method" in stored or not all(sizes):
        raise read.error(both[0], "is not one of mlx-lm's, with bits and group_size")
    return stored, None
