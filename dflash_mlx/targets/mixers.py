"""Recurrent layers in a verification: chains, trees and many requests.

The layer's projections and its convolution read all rows together; the convolution of a tree looks
along ancestors. Each request's cache records what enters its recurrence, see `caches.recurrent`. Of
many requests, chains of one length step together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .caches import RecurrentCache
from .recurrences import Recurrence
from .rows import Rows


def read_rows(recurrence: Recurrence, rows: Rows, x: mx.array, cache: Any) -> mx.array:
    """A recurrent mixer's forward over one request's rows or many: x [1, R, D] -> [1, R, D].

    What enters the recurrence is recorded in each request's cache.

    Args:
        recurrence: the mixer's.
        rows: the forward's rows.
        x: the mixer's input.
        cache: the request's `RecurrentCache`, or the `SharedCache` of many.
    """
    projected = recurrence.project(x)
    caches: Sequence[RecurrentCache] = cache.parts if rows.is_shared else [cache]
    windows = None
    if rows.is_shared:
        windows = rows.windows(recurrence.window)
    elif rows.tree is not None:
        windows = rows.tree.windows(recurrence.window, recurrence.window - 1)
    inputs = [
        mx.concatenate([cache.inputs(recurrence, x.dtype), part], axis=1)
        for cache, part in zip(caches, rows.split(projected.inputs), strict=True)
    ]
    entered = mx.concatenate(inputs, axis=1)
    if windows is None:
        convolved = recurrence.convolve(entered)
    else:  # the inputs [window, C] of each row
        convolved = recurrence.convolve(entered[0][windows]).swapaxes(0, 1)
    recorded = zip(*map(rows.split, (convolved, *projected.gates)), strict=True)
    for cache, part, request_rows in zip(caches, inputs, recorded, strict=True):
        cache.record(recurrence, part, request_rows)
    return recurrence.output(_recur(recurrence, caches), projected.output_gate)


def _recur(recurrence: Recurrence, caches: Sequence[RecurrentCache]) -> mx.array:
    """The recurrence's output [1, R, ...] of all requests' recorded rows."""
    if len(caches) == 1:
        return caches[0].recur()
    outputs: list[Any] = [None] * len(caches)
    # Requests that step together: as many rows, and all of them new or none.
    chains: dict[tuple[int, bool], list[int]] = {}
    for number, cache in enumerate(caches):
        if recurrence.has_state and recurrence.kernels is None and cache.tree is None:
            key = cache.recorded[0].shape[1], cache.cache[1] is None
            chains.setdefault(key, []).append(number)
        else:
            outputs[number] = cache.recur()
    for (_, are_new), numbers in chains.items():
        recorded = zip(*(caches[number].recorded for number in numbers), strict=True)
        convolved, *gates = (mx.concatenate(list(parts)) for parts in recorded)
        states = None
        if not are_new:
            states = mx.concatenate([caches[number].cache[1] for number in numbers])
        out, states = recurrence.step(convolved, gates, states)
        assert states is not None
        for place, number in enumerate(numbers):
            outputs[number] = out[place : place + 1]
            # Its own array: a slice would keep every request's state alive.
            caches[number].cache[1] = mx.contiguous(states[place : place + 1])
    return mx.concatenate(outputs, axis=1)
