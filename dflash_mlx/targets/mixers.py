"""Recurrent layers in a verify: chains, trees and many requests.

The layer's projections and its convolution read all rows together; the convolution of a tree looks
along ancestors. Each request's cache records what enters its recurrence, see `caches.recurrent`. Of
many requests, chains of one length step together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from .caches import RecurrentCache
from .overrides import Overrides
from .recurrences import Recurrence, recurrence_of

if TYPE_CHECKING:
    from ..kernels.modules import Kernels


def record_recurrence(layer: nn.Module, overrides: Overrides, kernels: Kernels | None) -> None:
    """Have a recurrent layer read the rows of one request or many, and record them for each.

    Args:
        layer: the decoder layer; one with an unknown recurrence stays as it is.
        overrides: the verify's, which the layer is added to.
        kernels: those that the recurrence runs on; None for mlx-lm's own.
    """
    if (recurrence := recurrence_of(layer)) is None:
        return
    recurrence.kernels = kernels

    def call(mixer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """The mixer's forward, x [1, R, D] -> [1, R, D]; `cache` is a `BatchedCache` of many."""
        projected = recurrence.project(x)
        caches: Sequence[RecurrentCache] = [cache]
        split = _alone
        windows = None
        if not isinstance(cache, RecurrentCache):
            caches = cache.parts
            split = cache.rows.split
            windows = cache.rows.windows(recurrence.window)
        elif cache.tree is not None:
            windows = cache.tree.windows(recurrence.window, recurrence.window - 1)
        inputs = [
            mx.concatenate([each.inputs(recurrence, x.dtype), part], axis=1)
            for each, part in zip(caches, split(projected.inputs), strict=True)
        ]
        entered = mx.concatenate(inputs, axis=1)
        if windows is None:
            convolved = recurrence.convolve(entered)
        else:  # the inputs [window, C] of each row
            convolved = recurrence.convolve(entered[0][windows]).swapaxes(0, 1)
        rows = zip(*map(split, (convolved, *projected.gates)), strict=True)
        for each, part, recorded in zip(caches, inputs, rows, strict=True):
            each.record(recurrence, part, recorded)
        return recurrence.output(_recur(recurrence, caches), projected.beside)

    overrides.replace(recurrence.mixer, call)


def _alone(rows: mx.array) -> Sequence[mx.array]:
    """The rows of each request, of one."""
    return [rows]


def _recur(recurrence: Recurrence, caches: Sequence[RecurrentCache]) -> mx.array:
    """The recurrence's output [1, R, ...] of all requests' recorded rows."""
    if len(caches) == 1:
        return caches[0].recur()
    outputs: list[Any] = [None] * len(caches)
    chains: dict[tuple[int, bool], list[int]] = {}  # requests by their rows, and if they are new
    for number, cache in enumerate(caches):
        if recurrence.has_state and recurrence.kernels is None and cache.tree is None:
            key = cache.recorded[0].shape[1], cache.cache[1] is None
            chains.setdefault(key, []).append(number)
        else:
            outputs[number] = cache.recur()
    for (_, new), together in chains.items():
        of_all = zip(*(caches[number].recorded for number in together), strict=True)
        convolved, *gates = (mx.concatenate(list(each)) for each in of_all)
        states = None if new else mx.concatenate([caches[number].cache[1] for number in together])
        out, states = recurrence.step(convolved, gates, states)
        assert states is not None
        for place, number in enumerate(together):
            outputs[number] = out[place : place + 1]
            # Its own array: a slice would keep every request's state alive.
            caches[number].cache[1] = mx.contiguous(states[place : place + 1])
    return mx.concatenate(outputs, axis=1)
