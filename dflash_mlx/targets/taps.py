"""Reading the outputs of chosen layers: what a drafter conditions on."""

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
        indices: the layers to read, in the order the drafter expects them; -1 is what the first
            of them reads, the embedding's output.
        overrides: where the recorders are added; they record while it is installed.
    """

    def __init__(
        self, layers: Sequence[nn.Module], indices: Sequence[int], overrides: Overrides
    ) -> None:
        self._indices = tuple(indices)
        self._seen: dict[int, tuple[Any, Any]] = {}  # what a layer has read and returned
        for index in {max(index, 0) for index in indices}:  # the first layer reads the embedding
            overrides.watch(layers[index], partial(self._record, index))

    def take(self, rows: int) -> mx.array:
        """The last forward's recorded outputs side by side, [N, rows, K*D]; [1, rows, 0] if K=0."""
        if not self._indices:
            return mx.zeros((1, rows, 0))
        seen, self._seen = self._seen, {}
        hidden = [
            _embedded(seen[0][0]) if at == EMBEDDING else _hidden(seen[at][1])
            for at in self._indices
        ]
        return mx.concatenate(hidden, axis=-1)

    def _record(self, index: int, x: Any, result: Any) -> None:
        self._seen[index] = x, result


def gathered(taps: mx.array, kept: Sequence[int]) -> mx.array:
    """Rows of features [1, N, K*D]: the first ones, or a path with others in between."""
    if len(kept) == taps.shape[1]:
        return taps
    return taps[:, : len(kept)] if kept[-1] < len(kept) else taps[:, mx.array(list(kept))]


def _embedded(x: mx.array) -> mx.array:
    """The embeddings [N, S, D] that the first layer reads; DeepSeek-V4.1's gets them hc times."""
    return x[:, :, 0] if x.ndim == 4 else x


def _hidden(result: Any) -> mx.array:
    """The hidden states [N, S, D] in what a decoder layer returns, which may be several things."""
    hidden: mx.array = result[0] if isinstance(result, tuple) else result
    if hidden.ndim == 4:
        # DeepSeek-V4.1 carries several residual streams [N, S, hc, D] and the mix [N, S, hc] with
        # which the next reader, a layer or the final norm, sums them: record what that one reads.
        mix = result[1][..., None]
        return (mix * hidden.astype(mx.float32)).sum(axis=2).astype(hidden.dtype)
    return hidden  # Gemma 4 adds the keys and values that later layers share
