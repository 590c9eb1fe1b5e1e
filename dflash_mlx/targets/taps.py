"""Taps: the outputs of chosen layers, which a drafter conditions on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .overrides import Overrides

EMBEDDING = -1  # as an index


class Taps:
    """Records the outputs of some layers of one model, for one request.

    Args:
        layers: the model's decoder layers.
        indices: the layers to tap, in the drafter's order; -1 is the embedding's output.
        overrides: the recorders are added to it, and record while it is installed.
    """

    def __init__(
        self, layers: Sequence[nn.Module], indices: Sequence[int], overrides: Overrides
    ) -> None:
        self._indices = tuple(indices)
        self._seen: dict[int, tuple[Any, Any]] = {}  # a layer's input and result
        for index in {max(index, 0) for index in indices}:  # -1 is the first layer's input
            overrides.watch(layers[index], partial(self._record, index))

    def take(self, rows: int) -> mx.array:
        """The last forward's outputs, concatenated: [N, rows, K*D]; [1, rows, 0] if K = 0."""
        if not self._indices:
            return mx.zeros((1, rows, 0))
        seen, self._seen = self._seen, {}
        hidden = []
        for index in self._indices:
            if index == EMBEDDING:
                x = seen[0][0]  # DeepSeek-V4.1 repeats the embeddings hc times: [N, S, hc, D]
                hidden.append(x[:, :, 0] if x.ndim == 4 else x)
            else:
                hidden.append(_hidden(seen[index][1]))
        return mx.concatenate(hidden, axis=-1)

    def _record(self, index: int, x: Any, result: Any) -> None:
        self._seen[index] = x, result


def gathered(taps: mx.array, kept: Sequence[int]) -> mx.array:
    """The kept rows of features [1, N, K*D]."""
    if len(kept) == taps.shape[1]:
        return taps
    return taps[:, : len(kept)] if kept[-1] < len(kept) else taps[:, mx.array(list(kept))]


def _hidden(result: Any) -> mx.array:
    """The hidden states [N, S, D] in a decoder layer's result."""
    hidden: mx.array = result[0] if isinstance(result, tuple) else result
    if hidden.ndim == 4:
        # DeepSeek-V4.1 has several residual streams [N, S, hc, D], and a mix [N, S, hc] by which
        # the next layer or the final norm sums them: record that sum.
        mix = result[1][..., None]
        return (mix * hidden.astype(mx.float32)).sum(axis=2).astype(hidden.dtype)
    return hidden  # Gemma 4 adds the keys and values that later layers share
