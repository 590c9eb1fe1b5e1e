"""DeepSeek-V4.1's layers in a forest: where a request's rows stand is told to each layer anew.

Its model asks the first layer's cache for the position and the window of a forward, once, and hands
them to all layers, with a dictionary in which one layer leaves the entries that others read. Of
many requests there is one of each for every request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .forest_rows import Caches, Parts
from .internals import window_indices


class CompressedCaches(Caches):
    """Of a DeepSeek-V4.1 layer. What the model asks of the first one is not used."""

    offset, window = 0, None


def for_each_position(for_each: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for an attention layer; `for_each` calls it for each request."""

    def call(
        attention: nn.Module, x: mx.array, *, cache: Caches, shared: dict[str, Any], **_: Any
    ) -> mx.array:
        """x [1, R, D] of all requests -> [1, R, D]; `shared` is one forward's, of all layers."""
        if not shared:  # the first layer
            pairs = zip(cache.parts, cache.rows.widths, strict=True)
            shared["start"] = Parts(one.offset for one in cache.parts)
            shared["windows"] = Parts(window_indices(one, rows)[None] for one, rows in pairs)
            shared["shared"] = Parts({} for _ in cache.parts)
        return for_each(
            attention,
            x,
            start_pos=shared["start"],
            window_idx=shared["windows"],
            cache=cache,
            shared=shared["shared"],
        )

    return call
