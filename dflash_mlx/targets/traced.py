"""A step's forward as one traced function, which is replayed without Python (`traces`).

Tokens, position and the caches' contents are arguments and the new contents are results. The trace
is of `Target`'s own forward on other caches (`caches.step`), with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx

from ..proposal import Proposal
from ..traces import Traces, UntraceableError
from .caches import RecurrentCache, WindowCache
from .caches.kv import KeysAndValues
from .caches.step import STEPS, step_caches
from .intercept import Forward
from .model_parts import MODEL_ERRORS
from .rope_tables import RopeTables
from .rows import Rows, Verified
from .span import Span
from .taps import Taps

FINE = 128  # the number of attended keys is a multiple of this
COARSE = 256  # the same beyond `FINE_UNTIL` keys, where caches grow by as many
FINE_UNTIL = 1024

EMPTY = SimpleNamespace(position=0, tap_layers=())  # stands for a request while a step is traced


class TracedSteps(Traces):
    """The traced forwards of one model's steps.

    Args:
        run: a forward of the model: ids [1, N], caches, taps and what its modules are to do.
        make_forward: makes a `Forward` of rows, with the target's kernels.
    """

    def __init__(
        self,
        run: Callable[[mx.array, Sequence[Any], Taps, Forward], Verified],
        make_forward: Callable[..., Forward],
    ) -> None:
        super().__init__(MODEL_ERRORS)
        self._run = run
        self._make_forward = make_forward

    def replay(self, rows: Rows, ids: mx.array, taps: Taps) -> Verified | None:
        """Replay a step that has been traced, or trace it; None if it is to be run without.

        Only chains of one request are replayed.

        Args:
            rows: of the step; the request's caches change as the forward changes them.
            ids: their tokens [1, N].
            taps: the layers to tap.

        Returns the logits [1, N, V] and the taps [1, N, K*D].
        """
        if self.why_not is not None or rows.is_prompt or rows.is_shared or rows.tree:
            return None
        session = rows.spans[0].session
        caches = session.cache
        offset = session.position
        if not session.can_trace or not offset:
            return None
        count = ids.shape[1]
        for cache in caches:
            if isinstance(cache, KeysAndValues):  # windows have had room since the step began
                cache.reserve(count)
        attended = attended_keys(offset + count)
        capacities = tuple(
            None if isinstance(cache, RecurrentCache) else cache.capacity for cache in caches
        )
        shape = (session.tap_layers, session.kv_bits, count, attended, capacities)

        def make() -> _Chain:
            chain = Rows([Span(EMPTY, Proposal([0] * count))])
            run = self._run
            make_forward = self._make_forward
            on_cpu = mx.default_device() == mx.Device(mx.cpu)

            def forward(ids: mx.array, held: Sequence[Any]) -> Verified:
                rope_tables = RopeTables() if on_cpu else None
                return run(ids, held, taps, make_forward(chain, rope_tables=rope_tables))

            return _Chain(forward, caches, attended)

        return cast(Verified | None, self.call(shape, make, ids, offset, caches))


class _Chain:
    """A forward as a function of arrays, traced at its first call.

    Args:
        forward: the forward.
        caches: of a request, whose kinds count; it keeps none of their arrays.
        attended: keys that the layers attend to.
    """

    def __init__(
        self,
        forward: Callable[[mx.array, Sequence[Any]], Verified],
        caches: Sequence[Any],
        attended: int,
    ) -> None:
        self._forward = forward
        self._attended = attended
        self._like = [_without_arrays(cache) for cache in caches]
        self._recurrences: list[Any] = []
        self._function = mx.compile(self._step)

    def __call__(self, ids: mx.array, offset: int, caches: Sequence[Any]) -> Verified:
        """The logits [1, N, V] and taps [1, N, K*D] of ids [1, N]; the caches change. Lazy."""
        contents = [cache.contents() for cache in caches]
        logits, taps, made = self._function(ids, mx.array([offset], mx.int32), contents)
        rows = ids.shape[1]
        for cache, new, recurrence in zip(caches, made, self._recurrences, strict=True):
            cache.take(new, rows if recurrence is None else recurrence)
        return logits, taps

    def _step(self, ids: mx.array, offset: mx.array, contents: Sequence[Any]) -> Any:
        """The forward: logits, taps, and what each cache has made of its contents."""
        caches = step_caches(self._like, contents, offset, ids.shape[1], self._attended)
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
    """How many keys layers attend to if there are so many: the next multiple of a step."""
    step = FINE if keys <= FINE_UNTIL else COARSE
    return -(-keys // step) * step


def can_trace(caches: Sequence[Any]) -> bool:
    """Whether a step can be a function of the contents of all of these caches."""
    if any(isinstance(cache, WindowCache) and cache.keep for cache in caches):
        return False  # it has no ring
    kinds = {type(cache) for cache in caches}
    return kinds <= STEPS.keys() and kinds != {RecurrentCache} and bool(kinds)


def _without_arrays(cache: Any) -> Any:
    """A cache of the same kind and settings that holds nothing."""
    kind: Any = type(cache)
    empty = kind.__new__(kind)
    for name, value in vars(cache).items():
        if value is None or isinstance(value, int):
            setattr(empty, name, value)
    return empty
