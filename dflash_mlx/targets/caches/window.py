"""The last keys and values of a layer with a sliding window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..internals import RotatingKVCache
from .base import Arrays, Contents, reference
from .row_cache import RowCache

SPARE = 32  # places of a ring that the window does not need


class WindowCache(RowCache, RotatingKVCache):
    """Keys and values [1, H, N, D] of the last `max_size` tokens.

    A prompt leaves them in order of position, as mlx-lm's own code does; where steps are not traced
    (`targets.traced`), so do verifications of several rows, and one row is written as mlx-lm does
    it.

    Traced steps need them in a ring: a row's place is its position modulo the capacity. The ring is
    so much larger than the window that rejected rows overwrite none that a later row may see. The
    layers get them in order of position again, because the order decides the bits of a sum.

    Attributes:
        in_ring: whether they are in the ring. Those of a window that keeps first rows never are.
    """

    can_trim = False  # what left the window is gone
    max_size: int
    keep: int
    in_ring = False
    _idx: int  # where the next row goes

    def visible(self) -> tuple[int, int]:
        """Return the number of older rows that are seen, and the window."""
        return min(self.offset, self.max_size - 1), self.max_size

    def reserve(self, rows: int) -> None:
        """Move the rows into the ring, with places for so many more."""
        if self.keys is None or self.keep:
            return
        # While the text is short, the ring grows by `step`. Both sizes are rounded up.
        full = self.max_size + max(rows, SPARE)
        full += -full % SPARE
        used = self.offset + rows
        places = min(full, used + -used % self.step)
        if self.in_ring and self.capacity >= places:
            return
        keys, values = self.window()
        first = self.offset - keys.shape[2]  # the oldest row's position
        unused = [(0, 0), (0, 0), (0, places - keys.shape[2]), (0, 0)]
        self.keys = mx.roll(mx.pad(keys, unused), first, 2)
        self.values = mx.roll(mx.pad(values, unused), first, 2)
        self.in_ring = True
        self._move_to(self.offset)

    def leave_ring(self) -> None:
        """Put the rows in order of position."""
        if self.in_ring:
            self.fill(self.offset, *self.window())

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask of the next N rows, as mlx-lm's caches have it: [N, K] bool, or its name."""
        if N == 1 and self.in_ring and self.tree is None:
            keys = min(self.offset, self.max_size - 1) + 1
            if window_size is None or window_size >= keys:
                return None
            return mx.arange(keys) >= keys - window_size
        return super().make_mask(N, return_array=return_array, window_size=window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append keys and values [1, H, N, D]; returns those to attend to."""
        if not self.in_ring:
            return super().update_and_fetch(keys, values)
        if self.tree is not None:
            self._new = keys, values
        rows = keys.shape[2]
        older, _ = self.visible()
        first = self.offset - older
        self._write_from(self.offset, keys, values)
        self._move_to(self.offset + rows)
        return (
            self._read_from(self.keys, first, older + rows),
            self._read_from(self.values, first, older + rows),
        )

    def _write_from(self, position: int, keys: mx.array, values: mx.array) -> None:
        """Write keys and values [1, H, N, D] into the ring. Rows beyond its end wrap around."""
        start = position % self.capacity
        fitting = min(keys.shape[2], self.capacity - start)
        wrapped = keys.shape[2] - fitting
        for ring, new in ((self.keys, keys), (self.values, values)):
            ring[..., start : start + fitting, :] = new[..., :fitting, :]
            if wrapped:
                ring[..., :wrapped, :] = new[..., fitting:, :]

    def _read_from(self, ring: mx.array, position: int, rows: int) -> mx.array:
        """So many rows of a ring, [1, H, N, D], in order."""
        start = position % self.capacity
        wrapped = start + rows - self.capacity
        if wrapped <= 0:
            return ring[..., start : start + rows, :]
        return mx.concatenate([ring[..., start:, :], ring[..., :wrapped, :]], axis=2)

    def _move_to(self, position: int) -> None:
        self.offset = position
        self._idx = position % self.capacity

    def take(self, contents: Contents, rows: int) -> None:
        """Hold what a traced step of so many rows has made of the contents."""
        self.keys, self.values = contents
        self._move_to(self.offset + rows)

    def write(self, keys: mx.array, values: mx.array, rows: int) -> None:
        """Write these rows over the first of the last `rows` rows."""
        if self.in_ring:
            self._write_from(self.offset - rows, keys, values)
            return
        start = self._idx - rows
        end = start + keys.shape[2]
        self.keys[..., start:end, :] = keys
        self.values[..., start:end, :] = values

    def cut(self, rows: int) -> None:
        """Forget the last rows. mlx-lm's `trim` refuses once the window has wrapped."""
        if self.in_ring:
            self._move_to(self.offset - rows)
            return
        end = self._idx - rows
        self.keys = self.keys[..., :end, :]
        self.values = self.values[..., :end, :]
        self._idx = end
        self.offset -= rows

    def in_order(self, rows: mx.array) -> mx.array:
        """What `update_and_fetch` returned, [1, H, N, D], in order of position."""
        if self.in_ring or self.offset <= rows.shape[2]:
            return rows
        ordered: mx.array = self._temporal_order(rows)
        return ordered

    def window(self) -> tuple[mx.array, mx.array]:
        """Keys and values [1, H, N, D] in order of position, without rows outside the window."""
        keys = self._temporal_order(self.keys)
        values = self._temporal_order(self.values)
        outside = keys.shape[2] - self.max_size
        if outside > 0:
            keys = self._trim(outside, keys)
            values = self._trim(outside, values)
        return keys, values

    def fill(self, position: int, keys: mx.array, values: mx.array) -> None:
        """Hold the result of `window` at a position."""
        self.keys = keys
        self.values = values
        self.offset = position
        self._idx = keys.shape[2]
        self.in_ring = False

    def checkpoint(self) -> tuple[Any, ...]:
        """Hold the window by reference."""
        keys = reference(self.keys)
        values = reference(self.values)
        return keys, values, self.offset, self._idx, self.in_ring

    def rewind(self, saved: tuple[Any, ...], rows: int) -> None:
        """Go back to a checkpoint."""
        keys, values, self.offset, self._idx, self.in_ring = saved
        self.keys = reference(keys)
        self.values = reference(values)

    def arrays(self) -> list[Any]:
        """List the arrays that the cache consists of."""
        return [self.keys, self.values]

    def export_rows(self, start: int, end: int) -> Arrays:
        """Return nothing: most tokens' rows are gone."""
        return {}

    def export_state(self) -> Arrays:
        """Name the keys and values of the window, in order of position."""
        keys, values = self.window()
        return {"keys": keys, "values": values}

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Fill the empty cache with these arrays."""
        self.fill(position, state["keys"][...], state["values"][...])
