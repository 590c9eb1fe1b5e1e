"""Caches inside a traced step: what they hold comes in as arrays and goes out as arrays.

A trace must not depend on how many tokens a text has. So the offset is an array, rows are written
at it, and the layers attend to a fixed number of keys, of which a mask hides those that are not
there yet. Hidden keys have a weight of exactly zero, so that they change no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from .base import Contents, reference
from .kv import FullCache, QuantizedCache
from .recurrent import RecurrentCache
from .window import WindowCache


class StepRows:
    """The first base of a cache with a row per token in a traced step.

    Attributes:
        offset: the position of the step's first row, [1] int32.
        attended: keys that the layers attend to.
        place: [2] int32, the position of the first of these, and how many are there.
        mask_was_read: whether the model has asked for the mask.
    """

    place: mx.array
    keys: Any
    values: Any
    offset: Any
    attended: int
    mask_was_read = False

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Which keys each of the next N rows sees, [N, attended] bool."""
        self.mask_was_read = True
        rows = (self.offset + mx.arange(N))[:, None]
        keys = self.positions()[None]
        seen = keys <= rows
        return seen if window_size is None else seen & (rows - keys < window_size)

    def in_order(self, rows: mx.array) -> mx.array:
        """What `update_and_fetch` returned, which is in order of position."""
        return rows

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write keys and values [1, H, N, D]; returns those that the layers attend to."""
        self.keys = self.written(self.keys, keys)
        self.values = self.written(self.values, values)
        self.offset = self.offset + keys.shape[2]
        return self.seen(self.keys), self.seen(self.values)

    def positions(self) -> mx.array:
        """Of the keys that the layers attend to, [attended] int32."""
        return mx.arange(self.attended)

    def seen(self, held: mx.array) -> mx.array:
        """The rows that the layers attend to."""
        return held[..., : self.attended, :]

    def written(self, held: mx.array, new: mx.array) -> mx.array:
        """The rows [1, H, capacity, D] with new ones [1, H, N, D] at the offset."""
        return mx.slice_update(held, new, self.offset, axes=(2,))


class FullStep(StepRows, FullCache):
    """A `FullCache` in a traced step."""


class QuantizedStep(StepRows, QuantizedCache):
    """A `QuantizedCache` in a traced step: its keys and values are in three parts each."""

    def seen(self, held: Any) -> Any:
        """The rows that the layers attend to, in parts."""
        return tuple(map(super().seen, held))

    def written(self, held: Any, new: mx.array) -> Any:
        """The parts with new rows [1, H, N, D], quantized, at the offset."""
        parts = mx.quantize(new, group_size=self.group_size, bits=self.bits)
        return tuple(map(super().written, held, parts))


class Ring:
    """Where the rings of equal windows have a traced step's rows.

    Args:
        cache: one of the windows.
        capacity: its places.
        offset: the position of the step's first row, [1] int32.
        rows: the step's.
        attended: keys that layers without a window attend to.

    Attributes:
        positions: of the keys that its layers attend to, in order, [K] int32.
        read: their places; None where these are the first ones.
        place: the first position and the number of keys that are there, [2] int32.
        written: the places of the step's rows, [rows] int32.
    """

    def __init__(
        self, cache: WindowCache, capacity: int, offset: mx.array, rows: int, attended: int
    ) -> None:
        older = cache.max_size - 1
        self.written = (offset + mx.arange(rows)) % capacity
        self.positions = mx.arange(min(attended, older + rows))
        self.read: mx.array | None = None
        first = mx.zeros(1, mx.int32)
        if attended > older:  # the oldest may have left the window
            first = mx.maximum(offset - older, 0)
            self.positions = self.positions + first
            self.read = self.positions % capacity
        self.place = mx.concatenate([first, offset + rows - first])


class WindowStep(StepRows, WindowCache):
    """A `WindowCache` in a traced step, in its ring.

    Attributes:
        ring: the places of its rows.
    """

    ring: Ring

    def positions(self) -> mx.array:
        """Of the keys that the layers attend to, [K] int32."""
        return self.ring.positions

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Which keys each of the next N rows sees, [N, K] bool."""
        return super().make_mask(N, window_size=window_size or self.max_size)

    def written(self, held: mx.array, new: mx.array) -> mx.array:
        """The ring [1, H, capacity, D] with new rows [1, H, N, D]."""
        if new.shape[2] == 1:
            return mx.slice_update(held, new, self.ring.written, axes=(2,))
        ring = reference(held)
        ring[..., self.ring.written, :] = new  # it may begin again behind some of them
        return cast(mx.array, ring)

    def seen(self, held: mx.array) -> mx.array:
        """The rows that the layers attend to, in order."""
        places = self.ring.read
        return super().seen(held) if places is None else mx.take(held, places, axis=2)


# The exact type decides: a subclass may hold something else.
STEPS: dict[type, type] = {
    FullCache: FullStep,
    QuantizedCache: QuantizedStep,
    WindowCache: WindowStep,
    RecurrentCache: RecurrentCache,
}


def step_caches(
    caches: Sequence[Any],
    contents: Sequence[Contents],
    offset: mx.array,
    rows: int,
    attended: int,
) -> list[Any]:
    """The forms in which a traced step has these caches.

    Args:
        caches: of kinds in `STEPS`; they stay as they are.
        contents: what stands for the `contents()` of each.
        offset: the position of the first row, [1] int32.
        rows: the step's.
        attended: keys that layers without a window attend to.
    """
    rings: dict[tuple[int, int], Ring] = {}
    place = mx.concatenate([mx.zeros(1, mx.int32), offset + rows])
    made = []
    for cache, held in zip(caches, contents, strict=True):
        kind: Any = STEPS[type(cache)]
        step = kind.__new__(kind)
        vars(step).update(vars(cache))
        made.append(step)
        if isinstance(cache, RecurrentCache):
            step.cache = list(held)
            continue
        step.keys, step.values = held
        step.offset = offset
        step.attended = attended
        step.place = place
        if isinstance(cache, WindowCache):
            key = cache.max_size, step.capacity
            if key not in rings:
                rings[key] = Ring(cache, step.capacity, offset, rows, attended)
            step.ring = rings[key]
            step.place = step.ring.place
    return made
