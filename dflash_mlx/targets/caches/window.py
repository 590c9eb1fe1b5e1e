"""The last keys and values of a layer with a sliding window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..internals import RotatingKVCache
from .base import Arrays, reference
from .row_cache import RowCache


class WindowCache(RowCache, RotatingKVCache):
    """Keys and values [1, H, N, D] of the last `max_size` tokens, in mlx-lm's two orders.

    A step of one row writes into a ring. A forward of several rows leaves them in order of
    position, with `max_size - 1` older ones: no later row misses what a commit cuts at the end.
    """

    can_trim = False  # what left the window is gone
    keys: mx.array
    values: mx.array
    offset: int
    max_size: int
    _idx: int  # where the next row goes

    def visible(self) -> tuple[int, int]:
        """Return the number of older rows that are seen, and the window."""
        return min(self.offset, self.max_size - 1), self.max_size

    def write(self, keys: mx.array, values: mx.array, rows: int) -> None:
        """Write these rows over the first of the last `rows` rows."""
        start = self._idx - rows
        end = start + keys.shape[2]
        self.keys[..., start:end, :] = keys
        self.values[..., start:end, :] = values

    def cut(self, rows: int) -> None:
        """Forget the last rows. mlx-lm's `trim` refuses once the window has wrapped."""
        end = self._idx - rows
        self.keys = self.keys[..., :end, :]
        self.values = self.values[..., :end, :]
        self._idx = end
        self.offset -= rows

    def in_order(self, rows: mx.array) -> mx.array:
        """What `update_and_fetch` returned, [1, H, N, D], in order of position."""
        if self.offset <= rows.shape[2]:
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

    def checkpoint(self) -> tuple[Any, ...]:
        """Hold the window by reference."""
        return reference(self.keys), reference(self.values), self.offset, self._idx

    def rewind(self, saved: tuple[Any, ...], rows: int) -> None:
        """Go back to a checkpoint."""
        keys, values, self.offset, self._idx = saved
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
