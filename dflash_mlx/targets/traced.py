"""A step's forward as one traced function, which is replayed without Python (`traces`).

Tokens, position and the caches' contents are arguments and the new contents are results. The trace
is of `Target`'s own forward on other caches (`caches.step`), with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..traces import Shape, Traces, UntraceableError
from .caches import FullCache, QuantizedCache, RecurrentCache
from .caches.step import STEPS, step_cache

FINE = 128  # keys by which the attended ones grow
COARSE = 256  # from so many keys on, and by as many; caches grow by as many
FINE_UNTIL = 1024

# ids [1, N], caches of a step -> logits [1, N, V] and taps [1, N, K*D]
Forward = Callable[[mx.array, Sequence[Any]], tuple[mx.array, mx.array]]


def replay(
    traces: Traces,
    key: Shape,
    forward: Callable[[], Forward],
    ids: mx.array,
    caches: Sequence[Any],
) -> tuple[mx.array, mx.array] | None:
    """Replay a forward that has been traced, or trace it; None if it is to be run without.

    Args:
        traces: the target's.
        key: what the forward depends on besides its arguments, such as the tapped layers.
        forward: makes it. It must not refer to a request.
        ids: the rows' tokens [1, N].
        caches: the request's; their contents change as the forward changes them.
    """
    offset = _offset_of(caches)
    if not offset:
        return None
    rows = ids.shape[1]
    for cache in caches:
        if not isinstance(cache, RecurrentCache):
            cache.reserve(rows)
    attended = attended_keys(offset + rows)
    kinds = tuple(_shape_of(cache) for cache in caches)
    shape = *key, rows, attended, kinds
    return traces.call(shape, lambda: _Step(forward(), caches, attended), ids, offset, caches)


class _Step:
    """A forward as a function of arrays, traced at its first call.

    Args:
        forward: the forward.
        caches: of a request, whose kinds count; it keeps none of their arrays.
        attended: keys that the layers attend to.
    """

    def __init__(self, forward: Forward, caches: Sequence[Any], attended: int) -> None:
        self._forward: Forward = forward
        self._attended = attended
        self._like = [_without_arrays(cache) for cache in caches]
        self._recurrences: list[Any] = []
        self._function = mx.compile(self._step)

    def __call__(
        self, ids: mx.array, offset: int, caches: Sequence[Any]
    ) -> tuple[mx.array, mx.array]:
        """The logits [1, N, V] and taps [1, N, K*D] of ids [1, N]; the caches change. Lazy."""
        contents = [cache.contents() for cache in caches]
        logits, taps, made = self._function(ids, mx.array([offset], mx.int32), contents)
        rows = ids.shape[1]
        for cache, new, recurrence in zip(caches, made, self._recurrences, strict=True):
            cache.take(new, rows if recurrence is None else recurrence)
        return logits, taps

    def _step(self, ids: mx.array, offset: mx.array, contents: Sequence[Any]) -> Any:
        """The forward: logits, taps, and what each cache has made of its contents."""
        caches = [
            step_cache(like, held, offset, self._attended)
            for like, held in zip(self._like, contents, strict=True)
        ]
        logits, taps = self._forward(ids, caches)
        with_rows = [cache for cache in caches if not isinstance(cache, RecurrentCache)]
        if with_rows and not any(cache.mask_was_read for cache in with_rows):
            raise UntraceableError("The model makes masks of its own.")
        self._recurrences = [getattr(cache, "_recurrence", None) for cache in caches]
        made = [
            cache.recorded_step if isinstance(cache, RecurrentCache) else cache.contents()
            for cache in caches
        ]
        return logits, taps, made


def attended_keys(keys: int) -> int:
    """The keys that layers attend to where so many are there."""
    step = FINE if keys <= FINE_UNTIL else COARSE
    return -(-keys // step) * step


def can_trace(caches: Sequence[Any]) -> bool:
    """Whether a step can be a function of the contents of all of these caches."""
    kinds = {type(cache) for cache in caches}
    return kinds <= STEPS.keys() and kinds != {RecurrentCache} and bool(kinds)


def _offset_of(caches: Sequence[Any]) -> int:
    """The position of the next row; 0 where caches are empty."""
    return next(
        (cache.offset for cache in caches if isinstance(cache, FullCache | QuantizedCache)), 0
    )


def _shape_of(cache: Any) -> Any:
    return None if isinstance(cache, RecurrentCache) else cache.capacity


def _without_arrays(cache: Any) -> Any:
    """A cache of the same kind and settings that holds nothing."""
    kind: Any = type(cache)
    empty = kind.__new__(kind)
    settings = {n: v for n, v in vars(cache).items() if v is None or isinstance(v, int)}
    vars(empty).update(settings)
    return empty
