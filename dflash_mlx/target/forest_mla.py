"""Multi-head latent attention in a forest: projections of all rows, latents of each request.

It is the absorbed form of `mla`, in which a verify computes any number of rows. Its scores have a
rotary part that is computed ahead of the attention, so that parts by request as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from . import mla
from .forest_rows import Parts
from .internals import ATTENTION
from .overrides import rebound


def flat_mla(attend: Callable[..., mx.array], rows: Callable[[], Any]) -> Callable[..., mx.array]:
    """DeepSeek-V3's attention, `attend` being called where requests part."""

    def scores(attention: Any, queries: mx.array, keys: Parts, mask: Parts) -> Parts:
        """The rotary scores [1, H, n, K] of each request, from queries [1, H, R, D]."""
        each = zip(rows().split(queries, 2), keys.parts, mask.parts, strict=True)
        return Parts(mla.rotary_scores(attention, *of) for of in each)

    return rebound(mla.dense, **{ATTENTION: attend, mla.rotary_scores.__name__: scores})
