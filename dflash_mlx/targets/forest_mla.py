"""Multi-head latent attention in a forest: projections of all rows, latents of each request.

It is the absorbed form of `mla`, in which a verify computes any number of rows. Its scores have a
rotary part that is computed ahead of the attention, so that parts by request as well. With an
indexer (DeepSeek-V3.2), requests part earlier: each has its own rows picked, and attends to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import mla
from .forest_rows import Caches, Parts, Rows
from .internals import ATTENTION
from .overrides import rebound


def flat_mla(attend: Callable[..., mx.array], rows: Callable[[], Rows]) -> Callable[..., mx.array]:
    """DeepSeek-V3's attention, `attend` being called where requests part."""

    def scores(attention: Any, queries: mx.array, keys: Parts, mask: Parts) -> Parts:
        """The rotary scores [1, H, n, K] of each request, from queries [1, H, R, D]."""
        each = zip(rows().split(queries, 2), keys.parts, mask.parts, strict=True)
        return Parts(mla.rotary_scores(attention, *of) for of in each)

    return rebound(mla.dense, **{ATTENTION: attend, mla.rotary_scores.__name__: scores})


def flat_sparse(rows: Callable[[], Rows]) -> Callable[..., mx.array]:
    """DeepSeek-V3.2's attention, whose indexer gives `Parts`."""

    def attend(
        attention: Any,
        q: mx.array,
        q_pe: mx.array,
        latent: Parts,
        k_pe: Parts,
        picked: Parts,
        mask: Parts,
        cache: Caches,
    ) -> mx.array:
        """The outputs [1, H, R, v_head_dim] of all requests' queries, each on its own rows."""
        queries = rows().split(q, 2), rows().split(q_pe, 2)
        others = (latent, k_pe, picked, mask, cache)
        each = zip(*queries, *(other.parts for other in others), strict=True)
        outputs = [mla.attend_to_picked(attention, *of) for of in each]
        return mx.concatenate(outputs, axis=2)

    return rebound(mla.sparse, **{mla.attend_to_picked.__name__: attend})


def for_each_pick(for_each: Callable[..., Parts]) -> Callable[..., Parts]:
    """What stands for an indexer; `for_each` calls it for each request."""

    def call(
        indexer: nn.Module, x: mx.array, residual: mx.array, mask: Parts, cache: Caches
    ) -> Parts:
        """The rows that each request's queries pick, from all rows x and residual [1, R, D]."""
        return for_each(indexer, x, Parts(cache.rows.split(residual)), mask, cache=cache)

    return call
