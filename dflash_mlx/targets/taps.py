"""Taps: the outputs of chosen layers, which a drafter conditions on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

EMBEDDING = -1  # as an index

Runs = Mapping[int, Sequence[tuple[Any, Any]]]  # by a layer's id: each run's input and result


class Taps:
    """Which runs of which layers are tapped.

    Args:
        layers: the model's decoder layers in the order in which they run.
        indices: the layers to tap, in the drafter's order; -1 is the embedding's output.

    Attributes:
        tapped: the ids of the tapped layers.
    """

    def __init__(self, layers: Sequence[nn.Module], indices: Sequence[int]) -> None:
        # The layer of each index, and which run of it, from the last one: models may loop.
        self._taps: list[tuple[int, int, bool]] = []
        ids = [id(layer) for layer in layers]
        for index in indices:
            place = max(index, 0)  # -1 is the first layer's input
            run = -ids[place:].count(ids[place])
            self._taps.append((ids[place], run, index == EMBEDDING))
        self.tapped = frozenset(layer for layer, _, _ in self._taps)

    def of(self, runs: Runs, rows: int) -> mx.array:
        """The tapped outputs of a forward, concatenated: [N, rows, K*D]; [1, rows, 0] if K = 0."""
        if not self._taps:
            return mx.zeros((1, rows, 0))
        outputs = []
        for layer, run, embedded in self._taps:
            x, result = runs[layer][run]
            if not embedded:
                # Gemma 4 adds the keys and values that later layers share.
                x = result[0] if isinstance(result, tuple) else result
            if x.ndim == 4:  # DeepSeek-V4.1's streams [N, S, hc, D], which all begin equal
                x = x[:, :, 0] if embedded else _sum_of_streams(*result[:2])
            outputs.append(x)
        return mx.concatenate(outputs, axis=-1)


def gathered(taps: mx.array, kept: Sequence[int]) -> mx.array:
    """The kept rows of features [1, N, K*D]."""
    if len(kept) == taps.shape[1]:
        return taps
    first = kept[0]
    end = kept[-1] + 1
    return taps[:, first:end] if end - first == len(kept) else taps[:, mx.array(list(kept))]


def _sum_of_streams(streams: mx.array, mix: mx.array) -> mx.array:
    """What the next layer or the final norm reads [N, S, D] of streams [N, S, hc, D] and a mix."""
    mixed = mix[..., None] * streams.astype(mx.float32)
    return mixed.sum(axis=2).astype(streams.dtype)
