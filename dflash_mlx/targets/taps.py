"""Taps: the outputs of chosen layers, which a drafter conditions on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .overrides import Overrides

EMBEDDING = -1  # as an index


class TapRecorder:
    """Records the outputs of some layers of one model, in one forward after another.

    Args:
        layers: the model's decoder layers in the order in which they run.
        indices: the layers to tap, in the drafter's order; -1 is the embedding's output.
        overrides: the recorders are added to it, and record while it is installed.
    """

    def __init__(
        self, layers: Sequence[nn.Module], indices: Sequence[int], overrides: Overrides
    ) -> None:
        self._runs: dict[int, list[tuple[Any, Any]]] = {}  # inputs and results, by layer
        # The layer of each index, and which run of it, from the last one: models may loop.
        self._taps: list[tuple[int, int, bool]] = []
        ids = [id(layer) for layer in layers]
        for index in indices:
            place = max(index, 0)  # -1 is the first layer's input
            run = -ids[place:].count(ids[place])
            self._taps.append((ids[place], run, index == EMBEDDING))
        for layer in {
            id(layers[max(index, 0)]): layers[max(index, 0)] for index in indices
        }.values():
            overrides.watch(layer, partial(self._record, id(layer)))

    def take(self, rows: int) -> mx.array:
        """The last forward's outputs, concatenated: [N, rows, K*D]; [1, rows, 0] if K = 0."""
        if not self._taps:
            return mx.zeros((1, rows, 0))
        runs, hidden = self._runs, []
        self.clear()
        for layer, run, embedded in self._taps:
            x, result = runs[layer][run]
            # Gemma 4 adds the keys and values that later layers share.
            x = x if embedded else result[0] if isinstance(result, tuple) else result
            if x.ndim == 4:  # DeepSeek-V4.1's streams [N, S, hc, D]: equal embeddings first
                x = x[:, :, 0] if embedded else _sum_of_streams(*result[:2])
            hidden.append(x)
        return mx.concatenate(hidden, axis=-1)

    def clear(self) -> None:
        """Forget what was recorded and not taken."""
        self._runs = {}

    def _record(self, layer: int, x: Any, result: Any) -> None:
        self._runs.setdefault(layer, []).append((x, result))


def gathered(taps: mx.array, kept: Sequence[int]) -> mx.array:
    """The kept rows of features [1, N, K*D]."""
    if len(kept) == taps.shape[1]:
        return taps
    first, end = kept[0], kept[-1] + 1
    return taps[:, first:end] if end - first == len(kept) else taps[:, mx.array(list(kept))]


def _sum_of_streams(streams: mx.array, mix: mx.array) -> mx.array:
    """What the next layer or the final norm reads [N, S, D] of streams [N, S, hc, D] and a mix."""
    mixed = mix[..., None] * streams.astype(mx.float32)
    return mixed.sum(axis=2).astype(streams.dtype)
