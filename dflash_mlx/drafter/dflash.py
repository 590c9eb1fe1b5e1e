"""The DFlash drafter: a small block-diffusion transformer that drafts a whole block in one pass.

The network (arXiv 2602.06036) is a Qwen3-style decoder that borrows the target's embedding and
head. Hidden states of a few target layers (the *taps*) are fused into one context feature per
token, which enters every draft layer as extra keys and values (KV injection). The block is
[anchor, mask, mask, ...], where the anchor is the last committed token. One pass drafts all rows.
In z-lab's drafters row i predicts the token i places after the anchor, so row 0 predicts nothing.
In others (`first_row` 0), row 0 predicts the next token, and every row is a draft.

Parameter names are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from ..errors import IncompatibleDrafterError
from ..sampling import Sampler
from ..targets.caches import FullCache, WindowCache
from .candidates import DraftScores
from .config import DraftConfig
from .gemma4 import Gemma4Layer
from .layers import ContextCache, ConvolvedLayer, DraftLayer, append_rows
from .network_session import FeatureSession, NetworkDrafter, NetworkSession
from .networks import ADAPTER, EMBEDDING, HEAD, MASK

if TYPE_CHECKING:
    from ..targets import Target


class DFlash(NetworkDrafter, nn.Module):
    """The weights of the drafter, shared by all requests. A request's state is in its cache.

    Args:
        config: the resolved config.
        parts: the names of optional tensors in the checkpoint: `EMBEDDING` and `HEAD` replace the
            target's, `MASK` the mask token's embedding; `ADAPTER` is for taps of another width.
    """

    def __init__(self, config: DraftConfig, parts: Container[str] = ()) -> None:
        super().__init__()
        self.config: DraftConfig = config
        hidden = config.hidden_size
        eps = config.rms_norm_eps
        width = config.target_hidden_size
        if ADAPTER in parts:
            self.hidden_dim_adapter = {"proj": nn.Linear(width, hidden, bias=False)}
            width = hidden
        self.fc = nn.Linear(len(config.target_layer_ids) * width, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        layer = ConvolvedLayer if config.conv_kernel_size else DraftLayer
        layer = Gemma4Layer if config.gemma4 else layer
        self.layers = [layer(config, i) for i in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(hidden, eps=eps)
        if EMBEDDING in parts:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        if MASK in parts:
            self.mask_embedding = mx.zeros((hidden,))
        reduced = config.draft_vocab_size < config.vocab_size
        if HEAD in parts or reduced:
            self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        if reduced:
            # Offset from a token's index among those that can be drafted to its id.
            self.d2t = mx.zeros((config.draft_vocab_size,), mx.int64)

    @property
    def block_size(self) -> int:
        """The most rows of a draft, the anchor included."""
        return self.config.drafts + 1

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The target layers whose outputs the drafter reads, in the order it expects them."""
        return self.config.target_layer_ids

    def make_cache(self) -> list[ContextCache]:
        """An empty context cache, one entry per draft layer."""
        return [
            FullCache() if window is None else WindowCache(window) for window in self.config.windows
        ]

    def fuse(self, taps: mx.array) -> mx.array:
        """Context features [N, S, D] from the concatenated taps [N, S, K*Dt]."""
        if "hidden_dim_adapter" in self:
            by_layer = taps.reshape(*taps.shape[:2], -1, self.config.target_hidden_size)
            taps = self.hidden_dim_adapter["proj"](by_layer).flatten(2)
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
            rows = layer.self_attn.keys_values(context, layer_cache.offset)
            append_rows(layer_cache, *rows, block=0)

    def embed(self, blocks: mx.array, target: Target, places: mx.array | None = None) -> mx.array:
        """Embed blocks [N, L] of an anchor and masks each, as [N, L, D].

        The table is the drafter's own, if it has one, or the target's. `places` [L] are the tokens'
        places in their blocks, if each line holds several blocks.
        """
        scale = self.config.input_embedding_scale
        if "embed_tokens" in self:
            embeddings = self.embed_tokens(blocks)
            scale = scale * self.config.own_embedding_scale
        else:
            embeddings = target.embed(blocks)
        embeddings = embeddings if scale == 1 else embeddings * scale
        if "mask_embedding" not in self:
            return embeddings
        is_anchor = (mx.arange(blocks.shape[1]) if places is None else places) == 0
        mask = (self.mask_embedding * scale).astype(embeddings.dtype)
        return mx.where(is_anchor[:, None], embeddings, mask)

    def logits(self, hidden: mx.array, target: Target) -> mx.array:
        """Logits [N, L, DV] of hidden states [N, L, D], through its own head or the target's.

        They cover the tokens that can be drafted; `to_full_vocab` adds the others. The soft cap of
        the target is not applied: drafters are trained on the bare head, with a multiplier and a
        cap of their own.
        """
        if "lm_head" in self:
            logits = self.lm_head(hidden)
        elif "embed_tokens" in self and self.config.tie_word_embeddings:
            logits = self.embed_tokens.as_linear(hidden)
        else:
            logits = target.head(hidden)
        multiplier = self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        if multiplier != 1 or cap is not None:
            logits = logits.astype(mx.float32) * multiplier  # a cap leaves few bits between tokens
        if cap is not None:
            logits = cap * mx.tanh(logits / cap)
        return logits if self.config.logit_scale == 1 else logits * self.config.logit_scale

    def token_ids(self) -> mx.array | None:
        """The ids [DV] of the tokens that can be drafted; None for all."""
        return self.d2t + mx.arange(len(self.d2t)) if "d2t" in self else None

    def to_full_vocab(self, scores: mx.array) -> mx.array:
        """Scores [L, DV] as scores [L, V] in f32, minus infinity for what is never drafted."""
        if "d2t" not in self or (ids := self.token_ids()) is None:
            return scores
        scores = scores.astype(mx.float32)
        nothing = mx.full((len(scores), self.config.vocab_size), -mx.inf)
        return mx.put_along_axis(nothing, mx.broadcast_to(ids, scores.shape), scores, axis=-1)

    def to_draft_vocab(self, scores: mx.array) -> mx.array:
        """Pick the scores [L, DV] of the tokens that can be drafted from scores [L, V]."""
        ids = self.token_ids()
        return scores if ids is None else scores[:, ids]

    def block(self, anchor: int, width: int) -> mx.array:
        """The token ids [B] of a block that drafts at most `width` rows: the anchor and masks."""
        config = self.config
        rows = min(width - 1, config.drafts) + config.first_row
        return mx.array([anchor, *[config.mask_token_id] * (rows - 1)])

    def with_lattice(
        self, draft: DraftScores, logits: mx.array, newest: mx.array | None, target: Target
    ) -> DraftScores:
        """Add a lattice to the scores of a block, if the network `reads_newest`.

        Args:
            draft: the scores of a block.
            logits: [L, DV], the logits that the scores come from.
            newest: [1, 1, K*D], the newest features of the text; None before the first.
            target: the target, whose embedding the network may use.
        """
        raise NotImplementedError

    def start(self, target: Target, sampler: Sampler | None = None) -> NetworkSession:
        """Begin one request over `target`. Raises `IncompatibleDrafterError`."""
        self.check_fits(target)
        return BlockSession(self, target, sampler or Sampler())

    def check_fits(self, target: Target) -> None:
        """Raise `IncompatibleDrafterError` unless the drafter was made for this target."""
        config = self.config
        depth = target.num_layers
        distinct_layers = len(set(map(id, target.layers)))
        if len(target.layers) == depth and config.num_target_layers == distinct_layers:
            depth = distinct_layers  # the target runs its layers more than once
        config.check_fits(target.hidden_size, target.vocab_size, depth)
        complete = "embed_tokens" in self and ("lm_head" in self or config.tie_word_embeddings)
        if config.hidden_size != target.hidden_size and not complete:
            raise IncompatibleDrafterError(
                f"The drafter is {config.hidden_size} wide and borrows an embedding and a head, "
                f"which are {target.hidden_size} wide in this target."
            )


class BlockSession(FeatureSession):
    """Drafts blocks for one request, each in one pass of a DFlash network."""

    drafter: DFlash

    def draft(self, anchor: int, width: int) -> DraftScores:
        """Score a block of at most `width` rows, without the anchor's row if it drafts nothing."""
        network = self.drafter
        target = self.target
        block = network.block(anchor, width)
        taps, _ = self.pop_features()
        hidden = network(network.embed(block[None], target), taps, self.cache)
        hidden = hidden[:, network.config.first_row :]
        return self.scores(network.logits(hidden, target)[0], hidden[0], anchor)

    def scores(self, logits: mx.array, hidden: mx.array, anchor: int) -> DraftScores:
        """Score a block from its logits [L, DV] and hidden states [L, D]. Runs processors."""
        network = self.drafter
        scores, weight = self.sampler.draft_scores(network.to_full_vocab(logits))
        draft = DraftScores(scores, weight=weight, hidden=hidden, anchor=anchor)
        if network.reads_newest:
            draft = network.with_lattice(
                draft, logits=logits, newest=self.newest, target=self.target
            )
        return draft

    def _read(self) -> None:
        self.drafter.extend(self.pop_features()[0], self.cache)
