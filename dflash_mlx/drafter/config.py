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
from dataclasses import MISSING, dataclass, field, fields, replace
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
from .config_heads import READERS, Eagle, Lattice, Markov
from .config_reader import (
    BOOLEAN,
    OBJECT,
    POSITIVE,
    REQUIRED,
    ConfigReader,
    FieldCheck,
    one_of,
    whole,
)
from .packagings import (
    ARCHITECTURES,
    DFLASH,
    DFLASH2,
    DSPARK,
    EAGLE3,
    JETSPEC,
    LILICORR,
    OTHER_KINDS,
    SPECULATORS_KINDS,
    ZLAB,
    Packaging,
)

LAYERS, ROWS, WIDTH, TOKENS = whole(1024), whole(2**12), whole(2**20), whole(2**24)
HEADS = whole(2**14)


def checked(check: FieldCheck, default: Any = MISSING) -> Any:
    """A field of `DraftConfig` that is read as it is, after a check."""
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """The resolved configuration of a block drafter: DFlash (arXiv 2602.06036), DFlash2, DSpark."""

    hidden_size: int = checked(WIDTH)
    num_hidden_layers: int = checked(LAYERS)
    intermediate_size: int = checked(WIDTH)
    num_attention_heads: int = checked(HEADS)
    num_key_value_heads: int = checked(HEADS, 0)  # absent: num_attention_heads
    head_dim: int = checked(WIDTH, 0)  # absent: hidden_size / num_attention_heads
    vocab_size: int = checked(TOKENS)  # the target's
    block_size: int = checked(ROWS)  # rows of a block, the anchor's included
    mask_token_id: int = checked(whole(least=0))
    # The target's layers whose outputs are read; -1: embedding. EAGLE-3 without any: its authors'.
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None = checked(LAYERS, None)  # None: the config does not say
    windows: tuple[int | None, ...]  # per layer: the sliding window, None for full attention
    causal: tuple[bool, ...]  # per layer: are a block's rows blind to later rows of the block?
    kind: str = DFLASH
    packaging: str = "zlab"
    first_row: int = 1  # the first row of a block that drafts; 0 is the anchor's
    draft_vocab_size: int = checked(TOKENS, 0)  # tokens that it can draft; absent: all
    target_hidden_size: int = checked(WIDTH, 0)  # the width of its taps; absent: its own
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None  # None, or {"rope_type": "linear" | "yarn", ...}
    rope_amplitude: float = 1.0  # on rotated queries and keys
    rope_neox: bool = checked(BOOLEAN, True)  # pairs (i, i + d/2); False: (2i, 2i + 1)
    max_position_embeddings: int = checked(whole(), 40960)
    rms_norm_eps: float = checked(POSITIVE, 1e-6)
    attention_bias: bool = checked(BOOLEAN, False)
    sinks: tuple[bool, ...] = ()  # per layer: a learned logit per head in the denominator
    tie_word_embeddings: bool = checked(BOOLEAN, False)  # its own embedding is its head, too
    input_embedding_scale: float = checked(POSITIVE, 1.0)  # on the embeddings of a block
    output_multiplier: float = checked(POSITIVE, 1.0)  # on the head's logits
    final_logit_softcapping: float | None = checked(POSITIVE, None)  # then cap * tanh(logits / cap)
    logit_scale: float = checked(POSITIVE, 1.0)  # on all of that, a Markov bias included
    conv_kernel_size: int = 0  # this and the four below: of DFlash2, 0 in the others
    conv_group_size: int = 0  # channels that share a dynamic kernel
    selector_rank: int = 0
    selector_top_k: int = 0  # candidates per drafted token
    selector_vocab_size: int | None = checked(TOKENS, None)  # ids from here on are never drafted
    markov: Markov | None = None  # of DSpark
    eagle: Eagle | None = None  # of EAGLE-3
    lattice: Lattice | None = None  # of LiLiCorr
    gemma4: bool = False  # Gemma 4's layers,
    keys_are_values: bool = False  # whose values are the keys, before the keys' norm
    own_embedding_scale: float = 1.0  # on embeddings of its own table; the target scales its own
    draft_window_size: int | None = checked(whole(), None)  # rows that it should remember
    quantization: Mapping[str, Any] | None = None  # of weights stored quantized, as mlx-lm says it
    unreadable: str | None = None  # why the weights cannot be read, if they cannot
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    unused: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def drafts(self) -> int:
        """Tokens that a whole block drafts."""
        return self.block_size - self.first_row

    def within(self, window: int | None) -> DraftConfig:
        """The config of a drafter that remembers at most `window` rows; None: as it suggests."""
        most = window or self.draft_window_size
        if most is None:
            return self
        return replace(self, windows=tuple(min(own or most, most) for own in self.windows))

    def for_target(self, num_layers: int | None) -> DraftConfig:
        """The config with taps: in a target of so many layers, EAGLE-3's authors read three.

        Raises `ConfigError` if the file names none and the target is not known.
        """
        if self.target_layer_ids:
            return self
        if num_layers is None:
            raise ConfigError(
                "This EAGLE-3 drafter names no target layers to read: load it with its target, "
                "load(target, draft=...)."
            )
        return replace(self, target_layer_ids=(1, num_layers // 2 - 1, num_layers - 4))

    @classmethod
    def from_file(cls, path: str | Path) -> DraftConfig:
        """Read and resolve a config.json. Raises `ConfigError`."""
        return cls.from_dict(read_json(path), where=str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "drafter config") -> DraftConfig:
        """Resolve a parsed config.json; `where` starts the error messages. Raises `ConfigError`."""
        packaging, kind = _packaging(raw, where)
        read = ConfigReader(raw, where, packaging)
        for place, _ in read.found("architectures", "speculators_model_type"):
            read.sources[place] = place
        read.get("projector_type", one_of(DFLASH, DFLASH2, DSPARK, LILICORR))
        resolved = {"kind": kind} | READERS[kind](read, kind)
        resolved["packaging"] = read.packaging.name
        resolved |= _sizes(read, resolved["kind"])
        layers, rows = resolved["num_hidden_layers"], resolved["block_size"]
        is_eagle = resolved["kind"] == EAGLE3
        resolved["first_row"] = 1 if is_eagle else read_first_row(read, resolved["kind"], rows)
        if rows <= resolved["first_row"]:
            raise read.error(read.place("block_size"), f"must be at least 2, not {rows}")
        resolved["windows"], sliding = read_windows(read, layers)
        resolved["causal"] = (True,) * layers if is_eagle else read_causality(read, sliding)
        resolved["sinks"] = read_sinks(read, resolved["windows"])
        resolved["target_layer_ids"] = read_taps(read)
        positions = resolved["max_position_embeddings"]
        resolved["rope_theta"], resolved["rope_scaling"] = read_rope(read, positions)
        resolved["rope_amplitude"] = rope_amplitude(read, resolved)
        resolved |= _quantization(read)
        return cls(**resolved, sources=read.sources, unused=read.unused())

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
        last = max(self.for_target(num_layers).target_layer_ids)
        if last >= num_layers:
            raise IncompatibleDrafterError(
                f"The drafter was made for another target: it reads layer {last} of {num_layers}."
            )


def _packaging(raw: Mapping[str, Any], where: str) -> tuple[Packaging, str]:
    """The packaging and the kind that the config's labels mean. Raises `ConfigError`."""
    names = raw.get("architectures") or [None]
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    nested = raw.get("dflash_config")
    nested = nested if isinstance(nested, Mapping) else {}
    key, known = "architectures", ARCHITECTURES
    if "speculators_model_type" in raw or "transformer_layer_config" in raw:
        key, known = "speculators_model_type", SPECULATORS_KINDS
        name = raw.get(key)
    elif name is None and raw.get("model_type") == "muse_glimmer_assistant":
        name = "MuseGlimmerAssistantModel"
    elif name == "LlamaForCausalLM" and "draft_vocab_size" in raw:
        name = "LlamaForCausalLMEagle3"  # as EAGLE-3's authors label it
    elif nested.get("projector_type") == LILICORR or nested.get("lilicorr_enabled"):
        name = "LiLiCorrDraftModel"
    label = raw.get("model_type") if name is None else name
    if name is None and key == "architectures" and _other_kind(label) is None:
        name = "DFlashDraftModel"
    if not isinstance(name, str) or name not in known:
        if (other := _other_kind(label)) is not None:
            raise ConfigError(f"{where}: {brief(label)} is {other}: it cannot be read here.")
        if key != "architectures":
            problem = f"must be one of {', '.join(known)}, not {brief(name)}"
            raise ConfigError(f"{where}: {key} {problem}.")
        raise ConfigError(f"{where}: architectures {brief(name)} is not a known drafter.")
    packaging, kind = known[name]
    if packaging is ZLAB and kind == DFLASH and ("causal_head" in raw or "causal_head" in nested):
        return JETSPEC, kind
    return packaging, kind


def _other_kind(label: Any) -> str | None:
    """What a drafter is that is not loaded from its config, where its label tells."""
    text = str(label).lower()
    return next((OTHER_KINDS[part] for part in OTHER_KINDS if part in text), None)


def _sizes(read: ConfigReader, kind: str) -> dict[str, Any]:
    """The `checked` fields, and whether they go together."""
    found: dict[str, Any] = {}
    for item in fields(DraftConfig):
        if "check" in item.metadata:
            default = REQUIRED if item.default is MISSING else item.default
            found[item.name] = read.get(item.name, item.metadata["check"], default)
    read.get("attention_mode", one_of("gqa", "mha"))
    hidden, heads, vocabulary = (
        found[name] for name in ("hidden_size", "num_attention_heads", "vocab_size")
    )
    found["num_key_value_heads"] = found["num_key_value_heads"] or heads
    found["head_dim"] = found["head_dim"] or max(hidden // heads, 1)
    found["target_hidden_size"] = found["target_hidden_size"] or hidden
    if read.packaging.gemma4:
        found |= _gemma4(read, hidden)
    drafted = found["draft_vocab_size"] or vocabulary
    if read.sources["draft_vocab_size"].startswith("default"):
        drafted = min(drafted, vocabulary)
    found["draft_vocab_size"] = drafted
    rules = {
        "num_key_value_heads": (heads % found["num_key_value_heads"], f"must divide {heads}"),
        "head_dim": (found["head_dim"] % 2, "must be even for rotary positions"),
        "mask_token_id": (found["mask_token_id"] >= vocabulary, f"must be below {vocabulary}"),
        "draft_vocab_size": (drafted > vocabulary, f"must be at most {vocabulary}"),
    }
    if kind == DFLASH2:
        problem = f"must be {vocabulary}, the selector's"
        rules["draft_vocab_size"] = drafted != vocabulary, problem
    for name, (broken, problem) in rules.items():
        if broken:
            raise read.error(read.place(name), problem)
    return found


def _gemma4(read: ConfigReader, hidden: int) -> dict[str, Any]:
    """What is Gemma 4's: its full-attention layers, and the scale of its embeddings."""
    read.get("hidden_activation", one_of("gelu_pytorch_tanh"))
    shared = read.get("attention_k_eq_v", BOOLEAN, False)
    heads = read.get("num_global_key_value_heads", HEADS, REQUIRED if shared else None)
    return {
        "gemma4": True,
        "keys_are_values": shared,
        "own_embedding_scale": hidden**0.5,
        "head_dim": read.get("global_head_dim", WIDTH, REQUIRED),
        **({"num_key_value_heads": heads} if shared else {}),
    }


def _quantization(read: ConfigReader) -> dict[str, Any]:
    """How mlx-lm quantized the stored weights, and why they cannot be read if they cannot.

    mlx-lm's converters write both spellings.
    """
    both = {name: read.get(name, OBJECT) for name in ("quantization", "quantization_config")}
    name, stored = next(((name, stored) for name, stored in both.items() if stored), ("", None))
    if stored is None:
        return {}
    sizes = all(type(stored.get(size)) is int for size in ("bits", "group_size"))
    if sizes and "quant_method" not in stored:
        return {"quantization": stored}
    return {"unreadable": f"{name} {brief(stored)} is not one of mlx-lm's"}
