"""The DFlash drafter: a small block-diffusion transformer that drafts a whole block in one pass.

The network (arXiv 2602.06036) is a Qwen3-style decoder without an embedding and a head of its
own; it borrows the target's. Hidden states of a few target layers (the *taps*) are fused into one
context feature per token, which enters every draft layer as extra keys and values (KV injection).
The block is [last token, mask, mask, ...], and all its rows are drafted together without iteration.
In z-lab's drafters row i predicts the token i places after the last one, so the first predicts
nothing; in others (`first_row` 0) it already predicts the next token, and every row is a draft.

Parameter names are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.activations import swiglu

from ..errors import IncompatibleDrafterError
from ..sampling import DraftScores, Sampler
from .candidates import MOST_CANDIDATES, Candidates, Ranking, Slots, top_candidates
from .config import DraftConfig
from .context import ContextCache
from .packagings import ADAPTER, EMBEDDING, HEAD, MASK
from .rope import make_rope
from .session import NetworkSession

if TYPE_CHECKING:
    from ..targets import Target
    from .calibration import Calibration


Sublayer = Callable[[mx.array], mx.array]


# A module is a dict of its parts. What a round calls asks for them by key, as MLX's own layers do:
# an attribute is looked for in every class first, and only then by a function of Python's.


class Attention(nn.Module):
    """Attention of a block over the context rows and over itself."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        hidden, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.scale = head_dim, head_dim**-0.5
        self.window, self.causal = config.windows[layer], config.causal[layer]
        self.q_proj = nn.Linear(hidden, self.heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * head_dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        if config.sinks[layer]:
            self.attention_sink_bias = mx.zeros((self.heads,))
        self.rope = make_rope(config)

    def queries(self, x: mx.array, offset: int | mx.array) -> mx.array:
        """Rotated queries [N, H, L, head_dim] of x [N, L, D], whose first row is at `offset`.

        `offset` is a position, or one per batch row as an integer array [N].
        """
        queries = self["q_proj"](x).reshape(*x.shape[:2], self.heads, self.head_dim)
        return self["rope"](self["q_norm"](queries).transpose(0, 2, 1, 3), offset=offset)

    def keys_values(self, x: mx.array, offset: int | mx.array) -> tuple[mx.array, mx.array]:
        """Rotated keys and values, each [N, KV, L, head_dim], of x [N, L, D] at `offset`."""
        keys = self["k_proj"](x).reshape(*x.shape[:2], self.kv_heads, self.head_dim)
        values = self["v_proj"](x).reshape(*x.shape[:2], self.kv_heads, self.head_dim)
        keys = self["rope"](self["k_norm"](keys).transpose(0, 2, 1, 3), offset=offset)
        return keys, values.transpose(0, 2, 1, 3)

    def __call__(self, x: mx.array, context: mx.array, cache: ContextCache) -> mx.array:
        """Attend from the block x [1, B, D], remembering the new `context` [1, S, D].

        Returns the heads' outputs before the output projection, [1, H, B, head_dim].
        """
        block, start = x.shape[1], cache.offset
        rows = mx.concatenate([context, x], axis=1) if context.shape[1] else x
        keys, values = cache.update(*self.keys_values(rows, start), block=block)
        return self.attend(self.queries(x, cache.offset), keys, values)

    def output(self, seen: mx.array) -> mx.array:
        """The attention's share of the stream [N, L, D] from its heads' outputs."""
        return self["o_proj"](seen.transpose(0, 2, 1, 3).flatten(2))

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """The heads' outputs [1, H, B, head_dim] of a block's queries, whose own keys are last."""
        masks = self.causal or self.window is not None  # else every row sees everything
        return mx.fast.scaled_dot_product_attention(
            queries,
            keys,
            values,
            scale=self.scale,
            mask=self._mask(queries.shape[2], keys.shape[2]) if masks else None,
            # A logit per head [H] in every softmax's denominator, as gpt-oss has it.
            sinks=self.get("attention_sink_bias"),
        )

    def _mask(self, block: int, keys: int) -> mx.array | str | None:
        """Which of `keys` (the block's own `block` rows last) each row of the block may see.

        A window counts from the query's own position; without causality the block sees all of
        itself. Returns None (everything), "causal", or booleans [block, keys].
        """
        if self.window is None or keys <= self.window:
            return "causal" if self.causal else None
        query = mx.arange(keys - block, keys)[:, None]
        key = mx.arange(keys)[None]
        near = query - key < self.window
        return near & (key <= query) if self.causal else near | (key >= keys - block)


class MLP(nn.Module):
    """The gated MLP of Qwen3."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self["down_proj"](swiglu(self["gate_proj"](x), self["up_proj"](x)))


class DraftLayer(nn.Module):
    """One decoder layer: attention over context and block, then the MLP."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, attend: Sublayer, places: mx.array | None = None) -> mx.array:
        """The layer's output [N, L, D] from its input x [N, L, D].

        `attend` makes the heads' outputs [N, H, L, head_dim] of the input of the attention: what
        there is to see is its caller's affair (a cache when drafting, whole texts in training).
        `places` [L] are the rows' in their blocks, where x holds several one after the other.
        """
        x = x + self["self_attn"].output(attend(self["input_layernorm"](x)))
        return x + self["mlp"](self["post_attention_layernorm"](x))


class DFlash(nn.Module):
    """The drafter's weights, shared by all requests; a request's state is in its cache.

    Args:
        config: the resolved config.
        parts: the names of further tensors that the checkpoint brings: `EMBEDDING` and `HEAD` of
            its own instead of the target's, `MASK` in place of the mask token's embedding,
            `ADAPTER` of taps that are not as wide as the drafter.
    """

    layer_class: type[DraftLayer] = DraftLayer
    drafts_trees = True  # its sessions have propose_tree

    def __init__(self, config: DraftConfig, parts: Container[str] = ()) -> None:
        super().__init__()
        self.config: DraftConfig = config
        hidden, eps, width = config.hidden_size, config.rms_norm_eps, config.target_hidden_size
        if ADAPTER in parts:
            self.hidden_dim_adapter = {"proj": nn.Linear(width, hidden, bias=False)}
            width = hidden
        self.fc = nn.Linear(len(config.target_layer_ids) * width, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.layers = [self.layer_class(config, i) for i in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(hidden, eps=eps)
        if EMBEDDING in parts:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        if MASK in parts:
            self.mask_embedding = mx.zeros((hidden,))
        reduced = config.draft_vocab_size < config.vocab_size
        if HEAD in parts or reduced:
            self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        if reduced:
            # What is added to the number of a token among those that can be drafted.
            self.d2t = mx.zeros((config.draft_vocab_size,), mx.int64)

    def __repr__(self) -> str:
        """A line instead of MLX's tree of every layer."""
        config = self.config
        return (
            f"{type(self).__name__}(num_hidden_layers={config.num_hidden_layers}, "
            f"hidden_size={config.hidden_size}, block_size={config.block_size}, "
            f"target_layer_ids={config.target_layer_ids})"
        )

    @property
    def block_size(self) -> int:
        """The most rows of a draft, the anchor included."""
        return self.config.drafts + 1

    @property
    def identity(self) -> str:
        """The kind of network, and the bytes of its weights, which tell every quantization."""
        size = sum(value.nbytes for _, value in tree_flatten(self.parameters()))
        return f"{type(self).__name__} {size}"

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The target layers whose outputs the drafter reads, in the order it expects them."""
        return self.config.target_layer_ids

    def make_cache(self) -> list[ContextCache]:
        """An empty context cache, one entry per draft layer."""
        return [ContextCache(window) for window in self.config.windows]

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of a request's caches after so many tokens. Nothing is computed."""
        config, cache = self.config, self.make_cache()
        taps = mx.zeros((1, tokens, len(config.target_layer_ids) * config.target_hidden_size))
        self.extend(taps.astype(self.norm.weight.dtype), cache)
        return sum(array.nbytes for layer in cache for array in layer.state)

    def fuse(self, taps: mx.array) -> mx.array:
        """Context features [N, S, D] from the concatenated taps [N, S, K*Dt]."""
        if "hidden_dim_adapter" in self:
            each = taps.reshape(*taps.shape[:2], -1, self.config.target_hidden_size)
            taps = self.hidden_dim_adapter["proj"](each).flatten(2)
        return self["hidden_norm"](self["fc"](taps))

    def __call__(
        self, block_embeddings: mx.array, taps: mx.array, cache: list[ContextCache]
    ) -> mx.array:
        """Run one block against the context, which grows by the new features first.

        Args:
            block_embeddings: [1, B, D], the target's embeddings of [anchor, mask, ...].
            taps: [1, S, K*D], outputs of the tapped target layers for the S tokens committed
                since the last call, in order; S may be 0.
            cache: from `make_cache`; it remembers the context, not the block.

        Returns:
            [1, B, D], hidden states after the final norm; the target's head makes logits of them.
        """
        context = self.fuse(taps) if taps.shape[1] else taps
        x = block_embeddings
        for layer, layer_cache in zip(self["layers"], cache, strict=True):
            x = layer(x, partial(layer["self_attn"], context=context, cache=layer_cache))
        return self["norm"](x)

    def extend(self, taps: mx.array, cache: list[ContextCache]) -> None:
        """Remember the context features of taps [1, S, K*D] without drafting (prefill chunks)."""
        if not taps.shape[1]:
            return
        context = self.fuse(taps)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            layer_cache.update(*layer.self_attn.keys_values(context, layer_cache.offset), block=0)

    def embed(self, tokens: mx.array, target: Target) -> mx.array:
        """Embeddings [N, L, D] of a block's token ids [N, L], the drafter's own or the target's."""
        embeddings = self.embed_tokens(tokens) if "embed_tokens" in self else target.embed(tokens)
        scale = self.config.input_embedding_scale
        return embeddings if scale == 1 else embeddings * scale

    def embed_block(self, block: mx.array, target: Target) -> mx.array:
        """Embeddings [1, B, D] of a block [B]: the anchor, and masks."""
        if "mask_embedding" in self:
            return self.embed_rows(block, mx.arange(len(block)), target)
        return self.embed(block[None], target)

    def embed_rows(self, tokens: mx.array, places: mx.array, target: Target) -> mx.array:
        """Embeddings [1, R, D] of the rows of blocks, [R] each; 0 is the place of an anchor."""
        if "mask_embedding" not in self:
            return self.embed(tokens[None], target)
        rows = self.embed(mx.where(places == 0, tokens, 0)[None], target)
        mask = (self.mask_embedding * self.config.input_embedding_scale).astype(rows.dtype)
        return mx.where((places == 0)[:, None], rows, mask)

    def logits(self, hidden: mx.array, target: Target) -> mx.array:
        """Logits [N, L, DV] of hidden states [N, L, D], through its own head or the target's.

        They are of the tokens that can be drafted; `widen` makes them those of all. The target's
        soft cap is not applied: drafters are trained on the bare head, and name a multiplier or a
        cap of their own in their config.
        """
        if "lm_head" in self:
            logits = self.lm_head(hidden)
        elif "embed_tokens" in self and self.config.tie_word_embeddings:
            logits = self.embed_tokens.as_linear(hidden)
        else:
            logits = target.head(hidden)
        multiplier, cap = self.config.output_multiplier, self.config.final_logit_softcapping
        if multiplier != 1 or cap is not None:
            logits = logits.astype(mx.float32) * multiplier  # a cap leaves few bits between tokens
        if cap is not None:
            logits = cap * mx.tanh(logits / cap)
        return logits if self.config.logit_scale == 1 else logits * self.config.logit_scale

    def token_ids(self) -> mx.array | None:
        """The ids [DV] of the tokens that can be drafted; None for all."""
        return self.d2t + mx.arange(len(self.d2t)) if "d2t" in self else None

    def widen(self, scores: mx.array) -> mx.array:
        """Scores [L, DV] as scores [L, V] in f32, minus infinity for what is never drafted."""
        ids, vocabulary = self.token_ids(), self.config.vocab_size
        if ids is None:
            return scores
        scores = scores.astype(mx.float32)
        nothing = mx.full((len(scores), vocabulary), -mx.inf)
        return mx.put_along_axis(nothing, mx.broadcast_to(ids, scores.shape), scores, axis=-1)

    def narrow(self, scores: mx.array) -> mx.array:
        """Of scores [L, V] those of the tokens that can be drafted, [L, DV]."""
        ids = self.token_ids()
        return scores if ids is None else scores[:, ids]

    def draft(
        self, hidden: mx.array, anchor: mx.array, target: Target, sampler: Sampler
    ) -> mx.array:
        """The drafted tokens [L] that follow `anchor`, from their slots' hidden states [1, L, D].

        On the device, like everything before it: nothing waits.
        """
        slots = Slots(self.logits(hidden, target).squeeze(0), hidden.squeeze(0), anchor, sampler)
        return self.choose([(slots, self.draft_scores(slots))])[0]

    def draft_scores(self, slots: Slots) -> DraftScores:
        """What the tokens of a request's slots are chosen by; a processor of the request's runs."""
        return slots.sampler.draft_scores(self.widen(slots.logits))

    def choose(self, requests: Sequence[tuple[Slots, DraftScores]]) -> list[mx.array]:
        """The drafted tokens [L] of every request, given its `draft_scores`."""
        return [scores.argmax(axis=-1) for _, (scores, _) in requests]

    def candidates(
        self,
        hidden: mx.array,
        anchor: mx.array,
        target: Target,
        sampler: Sampler,
        calibration: Calibration,
        count: int,
    ) -> Candidates:
        """The likeliest `count` tokens of every slot, from the slots' hidden states [1, L, D].

        Ranked on the device with the noise of the target's choice, and then read: this waits.
        """
        slots = Slots(self.logits(hidden, target).squeeze(0), hidden.squeeze(0), anchor, sampler)
        return Candidates.read_together([self.rank(slots, calibration, count)])[0]

    def rank(self, slots: Slots, calibration: Calibration, count: int) -> Ranking:
        """What `candidates` reads; nothing waits."""
        log_q, noise = slots.sampler.foresee(self.widen(slots.logits))
        count = min(count, MOST_CANDIDATES, log_q.shape[-1])
        tokens = top_candidates(calibration.ranking(log_q, noise), count)
        chosen = mx.take_along_axis(log_q, tokens, axis=-1)[:, None]
        return Ranking.of(tokens, chosen, noise)

    def start(self, target: Target, sampler: Sampler | None = None) -> NetworkSession:
        """Begin one request over `target`; without a sampler it drafts greedily.

        Raises `IncompatibleDrafterError`.
        """
        self.check_fits(target)
        return NetworkSession(self, target, sampler or Sampler())

    def check_fits(self, target: Target) -> None:
        """Raise `IncompatibleDrafterError` unless the target is the drafter's own."""
        config = self.config
        config.check_fits(target.hidden_size, target.vocab_size, target.num_layers)
        complete = "embed_tokens" in self and ("lm_head" in self or config.tie_word_embeddings)
        if config.hidden_size != target.hidden_size and not complete:
            raise IncompatibleDrafterError(
                f"The drafter is {config.hidden_size} wide and borrows an embedding and a head, "
                f"which are {target.hidden_size} wide in this target."
            )
