"""A drafter's config.json, in every published packaging, as one validated `DraftConfig`.

Published drafters spell the same fact in several places: the block size at the root or nested in
`dflash_config`, the rope base at the root or in `rope_parameters`, causality as `is_causal` or
`causal`. A reader of only one of them runs a drafter at the wrong block size without a word. The
tables of `networks` say where a field may stand and what its absence means. What is missing,
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
    read_first_row,
    read_layer_attention,
    read_rope,
    read_taps,
    rope_amplitude,
)
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
from .networks import DFLASH, DFLASH2, DSPARK, LILICORR, MARKOV_IN_ZLAB, ZLAB, identify

# The checks of sizes: whole numbers from 1 to a generous limit.
LAYERS = whole(1024)
ROWS = whole(2**12)
WIDTH = whole(2**20)
TOKENS = whole(2**24)
HEADS = whole(2**14)
MARKOV_HEADS = one_of("vanilla", "gated", "rnn")


def key(check: FieldCheck, default: Any = MISSING, **kind_defaults: Any) -> Any:
    """Define a field of `DraftConfig` whose value is read as it stands, after a check.

    With `kind_defaults`, only the kinds of drafters named there have the field.
    """
    metadata = {"check": check, "kind_defaults": kind_defaults}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """The resolved configuration of a block drafter: DFlash (arXiv 2602.06036), DFlash2, DSpark."""

    hidden_size: int = key(WIDTH)
    num_hidden_layers: int = key(LAYERS)
    intermediate_size: int = key(WIDTH)
    num_attention_heads: int = key(HEADS)
    num_key_value_heads: int = key(HEADS, 0)  # absent: num_attention_heads
    head_dim: int = key(WIDTH, 0)  # absent: hidden_size / num_attention_heads
    vocab_size: int = key(TOKENS)  # the vocabulary size of the target
    block_size: int = key(ROWS)  # rows of a block, the anchor's included
    mask_token_id: int = key(whole(least=0))
    # The target's layers whose outputs are read; -1 is the embedding. Empty for an EAGLE-3 drafter
    # that names none: `for_target` fills them in.
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None = key(LAYERS, None)  # None: the config does not say
    windows: tuple[int | None, ...]  # per layer: the sliding window, None for full attention
    causal: tuple[bool, ...]  # per layer: whether a block's rows do not see later rows of it
    kind: str = DFLASH
    packaging: str = "zlab"
    first_row: int = 1  # the first row of a block that drafts; 0 is the anchor's
    draft_vocab_size: int = key(TOKENS, 0)  # tokens that it can draft; absent: as its tensors
    target_hidden_size: int = key(WIDTH, 0)  # the width of its taps; absent: hidden_size
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None  # None, or {"rope_type": "linear" | "yarn", ...}
    rope_amplitude: float = 1.0  # on rotated queries and keys
    rope_neox: bool = key(BOOLEAN, True)  # pairs (i, i + d/2); False: (2i, 2i + 1)
    max_position_embeddings: int = key(whole(), 40960)
    rms_norm_eps: float = key(POSITIVE, 1e-6)
    attention_bias: bool = key(BOOLEAN, False)
    sinks: tuple[bool, ...] = ()  # per layer: a learned logit per head in the denominator
    tie_word_embeddings: bool = key(BOOLEAN, False)  # whether its embedding is also its head
    input_embedding_scale: float = key(POSITIVE, 1.0)  # on the embeddings of a block
    output_multiplier: float = key(POSITIVE, 1.0)  # on the head's logits
    final_logit_softcapping: float | None = key(POSITIVE, None)  # cap * tanh(logits / cap)
    logit_scale: float = key(POSITIVE, 1.0)  # on the result, a Markov bias included
    conv_kernel_size: int = key(whole(64, 0), 0, dflash2=REQUIRED, lilicorr=0)  # 0: none
    conv_group_size: int = key(WIDTH, 0, dflash2=REQUIRED, lilicorr=0)  # channels of a kernel
    selector_rank: int = key(WIDTH, 0, dflash2=REQUIRED)
    selector_top_k: int = key(whole(1024), 0, dflash2=REQUIRED)  # candidates per drafted token
    selector_vocab_size: int | None = key(TOKENS, None)  # ids from here on are never drafted
    markov_rank: int = key(whole(2**20, 0), 0, dspark=REQUIRED, dflash=0)
    markov_head_type: str = key(MARKOV_HEADS, "vanilla", dspark="vanilla", dflash="vanilla")
    lilicorr_candidate_topk: int = key(WIDTH, 0, lilicorr=REQUIRED)
    lilicorr_hidden_size: int = key(whole(2**20, 0), 0, lilicorr=0)  # 0: the drafter's
    lilicorr_num_layers: int = key(WIDTH, 0, lilicorr=REQUIRED)
    lilicorr_num_heads: int = key(WIDTH, 0, lilicorr=REQUIRED)
    lilicorr_mlp_ratio: float = key(POSITIVE, 0.0, lilicorr=REQUIRED)
    lilicorr_factor_dim: int = key(WIDTH, 0, lilicorr=REQUIRED)
    lilicorr_vector_eps: float = key(POSITIVE, 0.0, lilicorr=REQUIRED)
    lilicorr_logit_scale: float = key(POSITIVE, 0.0, lilicorr=REQUIRED)
    # For EAGLE-3: the residual stream begins with the normed feature; one norm of all taps together
    # comes first; a norm of each tap comes first; drafted rows read states after the final norm
    # (EAGLE 3.1).
    norm_before_residual: bool = key(BOOLEAN, False, eagle3=False)
    norm_before_fc: bool = key(BOOLEAN, False, eagle3=False)
    fc_norm: bool = key(BOOLEAN, False, eagle3=False)
    norm_output: bool = key(BOOLEAN, False, eagle3=False)
    gemma4: bool = False  # whether the layers are Gemma 4's
    # In Gemma 4's layers: whether values are the keys before the norm.
    keys_are_values: bool = False
    own_embedding_scale: float = 1.0  # on embeddings of the drafter's table, not on the target's
    draft_window_size: int | None = key(whole(), None)  # rows that it should remember
    quantization: Mapping[str, Any] | None = None  # mlx-lm's settings of weights stored quantized
    unreadable: str | None = None  # why the weights cannot be read, if they cannot
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    unused: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def drafts(self) -> int:
        """Tokens that a whole block drafts."""
        return self.block_size - self.first_row

    def within(self, window: int | None) -> DraftConfig:
        """Limit the rows that each layer remembers to `window`; None takes the config's limit."""
        limit = window or self.draft_window_size
        if limit is None:
            return self
        return replace(self, windows=tuple(min(size or limit, limit) for size in self.windows))

    def for_target(self, num_layers: int | None) -> DraftConfig:
        """Fill in the tapped layers, for an EAGLE-3 drafter whose file names none.

        As in the authors' code, these are three layers of a target with `num_layers` layers. Raises
        `ConfigError` if they are needed and `num_layers` is None.
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
        packaging, kind = identify(raw, where)
        read = ConfigReader(raw, where, packaging)
        for place, _ in read.found("architectures", "speculators_model_type"):
            read.sources[place] = place
        values = _fields(read, kind)
        if kind in (DFLASH, DSPARK):  # a rank means DSpark, whatever the label is
            kind = DSPARK if values["markov_rank"] else DFLASH
        if kind == DSPARK and packaging is ZLAB:
            packaging = MARKOV_IN_ZLAB
            read.packaging = packaging
        values |= {"kind": kind, "packaging": packaging.name}
        _check_sizes(read, values)
        rows = values["block_size"]
        values["first_row"] = read_first_row(read, kind, rows)
        if rows <= values["first_row"]:
            raise read.error(read.place("block_size"), f"must be at least 2, not {rows}")
        values |= read_layer_attention(read, values["num_hidden_layers"])
        values["target_layer_ids"] = read_taps(read, kind)
        theta, scaling = read_rope(read, values["max_position_embeddings"])
        values["rope_theta"] = theta
        values["rope_scaling"] = scaling
        values["rope_amplitude"] = rope_amplitude(read, values)
        values |= _quantization(read)
        return cls(**values, sources=read.sources, unused=read.unused())

    def check_fits(self, hidden_size: int, vocab_size: int, num_layers: int) -> None:
        """Raise `IncompatibleDrafterError` unless the drafter was made for a target of this shape.

        A `num_target_layers` that is off by one, as in some files, only warns.
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
            # The warning names this line, not the caller's: a pair is checked in several places,
            # and Python shows a warning of one line once.
            warnings.warn(
                f"dflash-mlx: the drafter may be another target's: {message}", stacklevel=1
            )
        last = max(self.for_target(num_layers).target_layer_ids)
        if last >= num_layers:
            raise IncompatibleDrafterError(
                f"The drafter was made for another target: it reads layer {last} of {num_layers}."
            )


def _fields(read: ConfigReader, kind: str) -> dict[str, Any]:
    """Read the fields defined by `key`, and derive those that a file may leave out."""
    values: dict[str, Any] = {}
    for item in fields(DraftConfig):
        if not item.metadata:
            continue
        # Without `kind_defaults`, every kind of drafter has the field.
        defaults = item.metadata["kind_defaults"] or {kind: item.default}
        if kind in defaults:
            default = REQUIRED if defaults[kind] is MISSING else defaults[kind]
            values[item.name] = read.get(item.name, item.metadata["check"], default)
    hidden = values["hidden_size"]
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = values["num_key_value_heads"] or heads
    values["head_dim"] = values["head_dim"] or max(hidden // heads, 1)
    values["target_hidden_size"] = values["target_hidden_size"] or hidden
    values["draft_vocab_size"] = values["draft_vocab_size"] or values["vocab_size"]
    if kind == LILICORR:
        values["lilicorr_hidden_size"] = values["lilicorr_hidden_size"] or hidden
    if read.packaging.gemma4:
        values |= _gemma4(read, hidden)
    return values


def _gemma4(read: ConfigReader, hidden: int) -> dict[str, Any]:
    """Read the fields of Gemma 4's full-attention layers, and derive the embeddings' scale."""
    read.get("hidden_activation", one_of("gelu_pytorch_tanh"))
    shared = read.get("attention_k_eq_v", BOOLEAN, False)
    heads = read.get("num_global_key_value_heads", HEADS, REQUIRED if shared else None)
    values = {
        "gemma4": True,
        "keys_are_values": shared,
        "own_embedding_scale": hidden**0.5,
        "head_dim": read.get("global_head_dim", WIDTH, REQUIRED),
    }
    if shared:
        values["num_key_value_heads"] = heads
    return values


def _check_sizes(read: ConfigReader, values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless the sizes agree with each other."""
    hidden = values["hidden_size"]
    heads = values["num_attention_heads"]
    vocabulary = values["vocab_size"]
    drafted = values["draft_vocab_size"]
    kind = values["kind"]
    # For each field: whether its value breaks the rule, and the rule in words.
    rules = {
        "num_key_value_heads": (heads % values["num_key_value_heads"], f"must divide {heads}"),
        "head_dim": (values["head_dim"] % 2, "must be even for rotary positions"),
        "mask_token_id": (values["mask_token_id"] >= vocabulary, f"must be below {vocabulary}"),
        "draft_vocab_size": (drafted > vocabulary, f"must be at most {vocabulary}"),
    }
    if kind == DFLASH2 and drafted != vocabulary:
        rules["draft_vocab_size"] = (True, f"must be {vocabulary}, the selector's")
    if kind == DFLASH2 or values.get("conv_kernel_size"):
        rules["conv_kernel_size"] = (not values["conv_kernel_size"], "must be above 0")
        group = values["conv_group_size"]
        rules["conv_group_size"] = (not group or hidden % group, f"must divide {hidden}")
    if kind == LILICORR:
        width = values["lilicorr_hidden_size"]
        rules["lilicorr_num_heads"] = (
            width % values["lilicorr_num_heads"],
            f"must divide {width}",
        )
    for name, (broken, problem) in rules.items():
        if broken:
            raise read.error(read.place(name), problem)


def _quantization(read: ConfigReader) -> dict[str, Any]:
    """Read how the stored weights are quantized, or why they cannot be read."""
    # mlx-lm's converters write both fields. Both are read, because `read` records what was used.
    quantization = read.get("quantization", OBJECT)
    config = read.get("quantization_config", OBJECT)
    name = "quantization" if quantization else "quantization_config"
    stored = quantization or config
    if not stored:
        return {}
    has_sizes = all(type(stored.get(size)) is int for size in ("bits", "group_size"))
    if has_sizes and "quant_method" not in stored:
        return {"quantization": stored}
    return {"unreadable": f"{name} {brief(stored)} is not one of mlx-lm's"}
