"""Multi-head latent attention (MLA) in the absorbed form, for one row and many.

mlx-lm computes one row in the *absorbed* form (queries move into the latent space, where all heads
share one row of keys) and several rows in the *expanded* form (the whole latent cache is multiplied
out into keys and values per head). The two round differently, so drafted text could differ from
plain text, and expanding costs more the longer the context is. A verification of any number of rows
therefore uses the absorbed form, which for one row is mlx-lm's own, bit for bit. Prefill keeps the
expanded form.

With an indexer (DeepSeek-V3.2), each row picks the rows that it attends to.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..subclassing import Call
from .attention import attend_each
from .internals import scaled_dot_product_attention
from .rows import OneRequestCache, PerRequest


def dense(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    """DeepSeek-V3's attention over one request's rows or many: x [1, L, D] -> [1, L, D]."""
    if self.q_lora_rank is None:
        queries = self.q_proj(x)
    else:
        queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
    q, q_pe, latent, k_pe = _project(self, x, queries, cache)
    queries = self.embed_q(q)
    if isinstance(latent, PerRequest):
        parts = zip(latent.rows.split(q_pe, 2), k_pe.parts, mask.parts, strict=True)
        scores = PerRequest(latent.rows, [rotary_scores(self, *part) for part in parts])
        output = attend_each(
            scaled_dot_product_attention, queries, latent, latent, cache, self.scale, scores
        )
    else:
        output = scaled_dot_product_attention(
            queries,
            latent,
            latent,
            cache=cache,
            scale=self.scale,
            mask=rotary_scores(self, q_pe, k_pe, mask),
        )
    return _heads_to_output(self, self.unembed_out(output))


def sparse(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    """DeepSeek-V3.2's attention: beyond `index_topk` rows, each query sees the rows it picks.

    x [1, L, D] -> [1, L, D], of one request's rows or many.
    """
    residual = self.q_a_layernorm(self.q_a_proj(x))
    q, q_pe, latent, k_pe = _project(self, x, self.q_b_proj(residual), cache[0])
    picked = self.indexer(x, residual, mask, cache=cache[1])
    if not isinstance(latent, PerRequest):
        output = attend_to_picked(self, q, q_pe, latent, k_pe, picked, mask, cache)
        return _heads_to_output(self, output)
    parts = zip(
        latent.rows.split(q, 2),
        latent.rows.split(q_pe, 2),
        latent.parts,
        k_pe.parts,
        picked.parts,
        mask.parts,
        cache.parts,
        strict=True,
    )
    outputs = [attend_to_picked(self, *part) for part in parts]
    return _heads_to_output(self, mx.concatenate(outputs, axis=2))


def indexer(stock: Call) -> Call:
    """The call of DeepSeek-V3.2's indexer over many requests, one after another.

    It returns the rows that each request's queries pick, `PerRequest`.
    """

    def call(
        self: Any, x: mx.array, residual: mx.array, mask: PerRequest, cache: Any
    ) -> PerRequest:
        rows = mask.rows
        caches = map(OneRequestCache, cache.parts, rows.split(rows.offset, 0))
        requests = zip(rows.split(x), rows.split(residual), mask.parts, caches, strict=True)
        return PerRequest(rows, [stock(self, *request) for request in requests])

    return call


def attend_to_picked(
    self: Any,
    q: mx.array,
    q_pe: mx.array,
    latent: mx.array,
    k_pe: mx.array,
    picked: mx.array | None,
    mask: mx.array | None,
    cache: Any,
) -> mx.array:
    """The heads' outputs [1, H, L, v_head_dim] of the results of `_project`.

    `picked` [1, 1, L, topk] are the rows that each query sees; None for all.
    """
    # As in mlx-lm: the indexer's cache is evaluated even while every row is still picked.
    cache[0].keys = mx.depends(cache[0].keys, (cache[1].keys, cache[1].values))
    if picked is not None:
        # Each query has its own keys, so the queries become a batch of one-row steps.
        picked = picked[0, 0]  # [L, topk]
        q = q.transpose(2, 1, 0, 3)
        q_pe = q_pe.transpose(2, 1, 0, 3)
        latent = latent[0, 0][picked][:, None]
        k_pe = k_pe[0, 0][picked][:, None]
        if mask is not None:
            mask = mx.take_along_axis(mask, picked, axis=-1)[:, None, None]
    scores = rotary_scores(self, q_pe, k_pe, mask)
    output = scaled_dot_product_attention(
        self.embed_q(q), latent, latent, cache=cache, scale=self.scale, mask=scores
    )
    output = self.unembed_out(output)
    return output if picked is None else output.transpose(2, 1, 0, 3)


def _project(
    self: Any, x: mx.array, queries: mx.array, cache: Any
) -> tuple[mx.array, mx.array, Any, Any]:
    """Queries and rotated queries per head [1, H, L, .]; all latents, rotated keys [1, 1, K, .]."""
    rows = x.shape[1]
    queries = queries.reshape(1, rows, self.num_heads, self.q_head_dim).transpose(0, 2, 1, 3)
    q, q_pe = mx.split(queries, [self.qk_nope_head_dim], axis=-1)
    latent, k_pe = mx.split(self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1)
    k_pe = k_pe.reshape(1, rows, 1, self.qk_rope_head_dim).transpose(0, 2, 1, 3)
    offset = cache.offset
    q_pe = self.rope(q_pe, offset)
    k_pe = self.rope(k_pe, offset)
    latent, k_pe = cache.update_and_fetch(self.kv_a_layernorm(latent)[:, None], k_pe)
    return q, q_pe, latent, k_pe


def rotary_scores(self: Any, q_pe: mx.array, k_pe: mx.array, mask: mx.array | None) -> mx.array:
    """The rotary part of the attention scores, which also carries the mask."""
    scores = (q_pe * self.scale) @ k_pe.swapaxes(-1, -2)
    if mask is None:
        return scores
    return mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))


def _heads_to_output(self: Any, output: mx.array) -> mx.array:
    """The output projection of [1, H, L, v_head_dim]."""
    return self.o_proj(output.transpose(0, 2, 1, 3).flatten(2))
