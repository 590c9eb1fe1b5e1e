"""Which layers can take the rows of several requests in one forward.

All rows lie in one sequence, or on the batch axis (`rows`). Requests without a slot run attention
and recurrence on their own cache, as they would alone. A model with a layer that does more runs one
forward for each request.
"""

from __future__ import annotations

from typing import Any

import mlx.nn as nn

from ..subclassing import stock_class
from .attention import Pairs, calls_attention
from .caches import FullCache, RecurrentCache
from .internals import DeepseekV3Attention, DeepseekV32Attention, attention_of, is_mla
from .recurrences import recurrence_of
from .rows import SharedForward
from .tree_attention import why_no_trees


def find_sharing(pairs: Pairs, exact: bool, last_rows: bool) -> SharedForward | None:
    """What requests share, judging by the model's layers; None if a layer takes one request only.

    Args:
        pairs: of the model.
        exact: whether kernels compute the attention, which read one request's cache.
        last_rows: whether a forward can compute the logits of some rows only.
    """
    if not all(_shares_rows(layer, cache) for layer, cache in pairs):
        return None
    slot_layers = tuple(
        number
        for number, (layer, cache) in enumerate(pairs)
        # MLA's latents have another attention.
        if isinstance(cache, FullCache) and not exact and not is_mla(layer)
    )
    cache_count = sum(cache is not None for _, cache in pairs)
    recurrences = [recurrence_of(layer) for layer, _ in pairs]
    as_prefill = all(recurrence.as_prefill for recurrence in recurrences if recurrence is not None)
    as_prefill = as_prefill and not any(is_mla(layer) for layer, _ in pairs)
    reads_prompts = as_prefill and last_rows and not exact
    return SharedForward(slot_layers, len(slot_layers) == cache_count, reads_prompts)


def _shares_rows(layer: nn.Module | None, cache: Any) -> bool:
    """Whether a layer can take all requests' rows together."""
    attention = attention_of(layer)
    if isinstance(cache, RecurrentCache) or (attention is None and cache is None):
        return True  # it parts the requests' rows, or looks at no other rows at all
    if attention is None or why_no_trees(layer, cache) is not None:
        return False
    if is_mla(layer):
        return stock_class(attention) in (DeepseekV3Attention, DeepseekV32Attention)
    return calls_attention(attention)
