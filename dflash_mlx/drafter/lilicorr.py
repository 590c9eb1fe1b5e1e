"""LiLiCorr (NVIDIA, arXiv 2608.20530): a DFlash whose head scores neighbouring candidates together.

The most probable tokens of all slots form a lattice. A small bidirectional transformer reads all of
them, with their probabilities and the block's hidden states, and gives each a vector on either
side: a candidate follows another as well as their vectors agree. The newest feature of the text
stands in for the anchor. Checkpoints may have DFlash2's convolutions.

Parameter names are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from .candidates import DraftScores, log_softmax, top_candidates
from .config import DraftConfig
from .dflash2 import LatticeDrafter

if TYPE_CHECKING:
    from ..targets import Target


class LatticeAttention(nn.Module):
    """Attention of all candidates over all, with a bias by the distance of their slots."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = mx.zeros((3 * width, width))
        self.in_proj_bias = mx.zeros((3 * width,))
        self.out_proj = nn.Linear(width, width)

    def __call__(self, x: mx.array, bias: mx.array) -> mx.array:
        """Outputs [N, W] of x [N, W]; the bias is [H, N, N]."""
        joint = x @ self.in_proj_weight.T + self.in_proj_bias
        # Queries, keys and values, each [1, H, N, head_dim].
        parts = joint.reshape(1, len(x), 3, self.heads, -1).transpose(2, 0, 3, 1, 4)
        scale = parts.shape[-1] ** -0.5
        heads = mx.fast.scaled_dot_product_attention(*parts, scale=scale, mask=bias[None])
        return self.out_proj(heads[0].swapaxes(0, 1).flatten(1))


class LatticeLayer(nn.Module):
    """A layer of the lattice's transformer."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        width = config.lilicorr_hidden_size
        eps = config.rms_norm_eps
        inner = int(width * config.lilicorr_mlp_ratio)
        self.attn_norm = nn.RMSNorm(width, eps=eps)
        self.attn = LatticeAttention(width, config.lilicorr_num_heads)
        self.mlp_norm = nn.RMSNorm(width, eps=eps)
        self.mlp = [nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width)]

    def __call__(self, x: mx.array, bias: mx.array) -> mx.array:
        """Outputs [N, W] of x [N, W]."""
        x = x + self.attn(self.attn_norm(x), bias)
        return x + _sequence(self.mlp, self.mlp_norm(x))


class LatticeHead(nn.Module):
    """Scores how well each candidate follows each candidate of the slot before."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        width = config.lilicorr_hidden_size
        eps = config.rms_norm_eps
        heads = config.lilicorr_num_heads
        top_k = config.lilicorr_candidate_topk
        factors = config.lilicorr_factor_dim
        slots = config.block_size - 1
        self.vector_eps = config.lilicorr_vector_eps
        self.logit_scale = config.lilicorr_logit_scale
        if hidden != width:
            self.token_proj = nn.Linear(hidden, width)
        self.pass_hidden_proj = nn.Linear(hidden, width)
        # Five features of a candidate: log-probability, probability, log-probability minus that of
        # the best one, relative rank, and whether it is the best.
        self.feature_mlp = [
            nn.LayerNorm(5),
            nn.Linear(5, width),
            nn.SiLU(),
            nn.Linear(width, width),
        ]
        self.slot_embedding = mx.zeros((1, 1, slots, 1, width))
        self.rank_embedding = mx.zeros((1, 1, 1, top_k, width))
        self.relative_slot_bias = mx.zeros((heads, 2 * slots + 1))
        self.same_slot_bias = mx.zeros((heads,))
        self.context_proj = nn.Linear(hidden, width)
        self.layers = [LatticeLayer(config) for _ in range(config.lilicorr_num_layers)]
        self.output_norm = nn.RMSNorm(width, eps=eps)
        self.anchor_norm = nn.RMSNorm(width, eps=eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head = nn.Linear(width, factors)
        self.in_head = nn.Linear(width, factors)
        self.anchor_out_head = nn.Linear(width, factors)

    def pairs(
        self, embeddings: mx.array, log_probs: mx.array, hidden: mx.array, newest: mx.array
    ) -> mx.array:
        """Scores [L, K, K] in f32 of every candidate after every candidate of the slot before.

        Args:
            embeddings: [L, K, D] of the candidates, the most probable first.
            log_probs: [L, K], theirs among all tokens, in f32.
            hidden: [L, D], the slots' hidden states.
            newest: [D], the newest feature of the text, which all rows of the first slot follow.
        """
        slots, count = log_probs.shape
        ranks = mx.broadcast_to(mx.arange(count), log_probs.shape)
        below_best = log_probs - log_probs[:, :1]
        relative_ranks = ranks / max(count - 1, 1)
        parts = [log_probs, mx.exp(log_probs), below_best, relative_ranks, ranks == 0]
        features = mx.stack(parts, axis=-1).astype(hidden.dtype)
        x = self.token_proj(embeddings) if "token_proj" in self else embeddings
        x = x + self.pass_hidden_proj(hidden)[:, None] + _sequence(self.feature_mlp, features)
        x = (x + self.slot_embedding[0, 0, :slots] + self.rank_embedding[0, 0]).flatten(0, 1)
        slot_numbers = mx.repeat(mx.arange(slots), count)
        distances = slot_numbers[:, None] - slot_numbers  # the bias of distance 0 is in the middle
        bias = self.relative_slot_bias[:, distances + self.slot_embedding.shape[2]]
        bias = bias + (distances == 0) * self.same_slot_bias[:, None, None]
        for layer in self.layers:
            x = layer(x, bias.astype(x.dtype))
        x = self.output_norm(x).reshape(slots, count, -1)
        anchor = self.anchor_norm(self.context_proj(newest))
        rows = mx.broadcast_to(anchor, x.shape)
        x = nn.silu(self.factor_input_proj(mx.concatenate([x, rows, x * rows], axis=-1)))
        before = self._unit(self.out_head(x))
        after = self._unit(self.in_head(x))
        first = mx.broadcast_to(self._unit(self.anchor_out_head(anchor)), (1, *before.shape[1:]))
        scores = mx.concatenate([first, before[:-1]]) @ after.swapaxes(-1, -2)
        return scores.astype(mx.float32) * self.logit_scale

    def _unit(self, x: mx.array) -> mx.array:
        return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), self.vector_eps)


def _sequence(parts: Sequence[nn.Module], x: mx.array) -> mx.array:
    for part in parts:
        x = part(x)
    return x


class LiLiCorr(LatticeDrafter):
    """The LiLiCorr drafter: used, cached and fed exactly as a DFlash one."""

    reads_newest = True

    def __init__(self, config: DraftConfig, parts: Container[str] = ()) -> None:
        super().__init__(config, parts)
        self.lilicorr = LatticeHead(config)

    def with_lattice(
        self, draft: DraftScores, logits: mx.array, newest: mx.array | None, target: Target
    ) -> DraftScores:
        """Add candidates, their unary scores and their pair scores to the scores of a block.

        The head has read the candidates' probabilities, so their logits are taken out of the unary
        scores.
        """
        log_probs = log_softmax(logits)
        tokens = top_candidates(log_probs, self.config.lilicorr_candidate_topk)
        token_log_probs = mx.take_along_axis(log_probs, tokens, axis=-1)
        order = mx.argsort(-token_log_probs, axis=-1)
        tokens = mx.take_along_axis(tokens, order, axis=-1)
        token_log_probs = mx.take_along_axis(token_log_probs, order, axis=-1)
        ids = self.token_ids()
        tokens = tokens if ids is None else ids[tokens]
        hidden = draft.hidden
        context = mx.zeros_like(hidden) if newest is None else self.fuse(newest)[0]
        embeddings = self.embed(tokens, target)
        pair_scores = self.lilicorr.pairs(
            embeddings, log_probs=token_log_probs, hidden=hidden, newest=context[0]
        )
        scores = mx.take_along_axis(draft.scores, tokens, axis=-1).astype(mx.float32)
        unary_scores = scores - draft.weight * token_log_probs
        return draft._replace(lattice=(tokens, unary_scores, pair_scores))

    def lattice(self, draft: DraftScores) -> tuple[mx.array, mx.array, mx.array]:
        """Return the lattice that `with_lattice` added."""
        assert draft.lattice is not None
        return draft.lattice
