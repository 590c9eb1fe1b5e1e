"""Gated DeltaNet in a forest: projections and convolution of all rows, states of each request.

The recurrence is a step a row, so requests advance side by side: the longest chains come first,
and where a shorter one ends the others go on without it. No row is a padding, no state steps on
past its end, and a request's numbers are those that it has alone. A tree steps by itself, as do
chains on our kernels. What the commit replays is recorded as ever (`recurrent`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .forest_rows import Caches
from .internals import gated_delta_update
from .recurrent_tree import (
    convolve,
    delta_gates,
    first_state,
    heads,
    held_inputs,
    leave,
    project,
    recur,
)

if TYPE_CHECKING:
    from ..kernels.modules import Kernels


def flat_recurrence(index: int) -> Callable[..., mx.array]:
    """What stands for the Gated DeltaNet of a layer: x [1, R, D] -> [1, R, D]."""

    def call(mixer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """x [1, R, D] of all requests -> [1, R, D]; `cache` are those of all."""
        caches: Caches = cache
        rows, size = caches.rows, mixer.conv_kernel_size
        mixed, z, b, a = project(mixer, x)
        inputs = [
            mx.concatenate([held_inputs(mixer, one, x.dtype), part], axis=1)
            for one, part in zip(caches.parts, rows.split(mixed), strict=True)
        ]
        convolved = convolve(mixer, mx.concatenate(inputs, axis=1), rows.windows(size))
        recorded = zip(inputs, *map(rows.split, (convolved, a, b)), strict=True)
        tapes: list[Any] = [segment.rollbacks[index] for segment in rows.segments]
        for tape, entered in zip(tapes, recorded, strict=True):
            tape.record(*entered)
        for segment, one, own in zip(rows.segments, caches.parts, inputs, strict=True):
            if segment.tree is None:
                one[0] = mx.contiguous(own[:, 1 - size :])
        kernels = tapes[0].kernels  # of the target, so the same for all
        out = _recur(mixer, (*heads(mixer, convolved), a, b), caches, kernels)
        return leave(mixer, mixer.norm(out, z))

    return call


def _recur(
    mixer: Any, parts: Sequence[mx.array], caches: Caches, kernels: Kernels | None
) -> mx.array:
    """The recurrence's output [1, R, Hv, Dv] of q, k, v, a, b, each [1, R, ...]."""
    rows, outputs = caches.rows, []
    if kernels is None:
        outputs += _side_by_side(mixer, parts, caches)
    each = zip(rows.segments, caches.parts, zip(*map(rows.split, parts), strict=True), strict=True)
    for segment, cache, own in each:
        if segment.tree is not None:
            outputs.append(recur(mixer, own, cache[1], segment.tree, kernels))
        elif kernels is not None:
            q, k, v, a, b = own
            state = first_state(v, k) if cache[1] is None else cache[1]
            out, cache[1] = kernels.delta(q, k, v, *delta_gates(mixer, a, b), state)
            outputs.append(out)
    together = mx.concatenate(outputs, axis=1)
    return together if kernels is not None else together[:, rows.strided]


def _side_by_side(mixer: Any, parts: Sequence[mx.array], caches: Caches) -> list[mx.array]:
    """The outputs [1, n, Hv, Dv] of the chains' strides, one after the other."""
    rows, outputs = caches.rows, []
    state: mx.array | None = None
    for stride, following in zip_longest(rows.strides, rows.strides[1:]):
        q, k, v, a, b = (part[0][stride.places] for part in parts)
        if state is None:
            held = [caches.parts[at][1] for at in stride.requests]
            state = mx.concatenate([first_state(v, k) if one is None else one for one in held])
        gates = (a, b, mixer.A_log, mixer.dt_bias)
        out, state = gated_delta_update(q, k, v, *gates, state[: len(stride.requests)])
        outputs.append(out.flatten(0, 1)[None])
        going_on = 0 if following is None else len(following.requests)
        for place, at in enumerate(stride.requests[going_on:], start=going_on):
            # Its own array: a part of all requests' would keep theirs alive.
            caches.parts[at][1] = mx.contiguous(state[place : place + 1])
    return outputs
