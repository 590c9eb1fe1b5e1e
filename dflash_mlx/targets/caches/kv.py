"""Keys and values of every token: as they are, and quantized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from ..internals import KVCache, QuantizedKVCache
from .base import Arrays
from .row_cache import RowCache


class KeysAndValues(RowCache):
    """What both have in common: rejected rows go by moving `offset` back, and nothing is copied."""

    can_trim = True
    step: int  # rows by which it grows

    def visible(self) -> tuple[int, None]:
        """Return the number of older rows that are seen, and the window."""
        return self.offset, None

    def cut(self, rows: int) -> None:
        """Forget the last rows."""
        self.offset -= rows

    def checkpoint(self) -> None:
        """Hold nothing: there is no state."""

    def rewind(self, saved: None, rows: int) -> None:
        """Forget the rows since a checkpoint."""
        self.cut(rows)

    def arrays(self) -> list[Any]:
        """List the arrays that the cache consists of."""
        return [self.keys, self.values]

    def reserve(self, rows: int) -> None:
        """Make room for so many more rows. The capacity becomes a multiple of `step`.

        mlx-lm's caches grow from where they end, so that two texts would rarely share a trace.
        """
        if self.offset + rows > self.capacity or self.capacity % self.step:
            more = -(-(self.offset + rows) // self.step) * self.step - self.offset
            self.keys = tree_map(lambda held: self._with_room(held, more), self.keys)
            self.values = tree_map(lambda held: self._with_room(held, more), self.values)

    def export_state(self) -> Arrays:
        """Return nothing: there is no state."""
        return {}

    def _with_room(self, held: mx.array, more: int) -> mx.array:
        """The rows that are there [1, H, offset, D], and room for more."""
        empty = mx.zeros((*held.shape[:2], more, held.shape[3]), held.dtype)
        return mx.concatenate([held[..., : self.offset, :], empty], axis=2)

    def _joined(self, name: str, position: int, rows: Sequence[Arrays], room: int) -> mx.array:
        """The arrays of one name in one copy, with room behind them in steps of the cache's own."""
        more = -(-(position + room) // self.step) * self.step - position
        pieces = [piece[name] for piece in rows if name in piece]
        shape = pieces[0].shape
        empty = mx.zeros((*shape[:2], more, shape[3]), pieces[0].dtype)
        return mx.concatenate([*pieces, empty], axis=2)


class FullCache(KeysAndValues, KVCache):
    """Keys and values [1, H, N, D]."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append keys and values [1, H, N, D]; returns all.

        A chain's rows, where there is room, need none of the calls above this class: every layer of
        every step comes here.
        """
        start = self.offset
        end = start + keys.shape[2]
        if self.tree is not None or self.keys is None or end > self.keys.shape[2]:
            return super().update_and_fetch(keys, values)
        self.offset = end
        self.keys[..., start:end, :] = keys
        self.values[..., start:end, :] = values
        return self.keys[..., :end, :], self.values[..., :end, :]

    def write(self, keys: mx.array, values: mx.array, rows: int) -> None:
        """Write these rows over the first of the last `rows` rows."""
        start = self.offset - rows
        end = start + keys.shape[2]
        self.keys[..., start:end, :] = keys
        self.values[..., start:end, :] = values

    def export_rows(self, start: int, end: int) -> Arrays:
        """Slice the rows of these tokens, [1, H, end - start, D]."""
        return {"keys": self.keys[..., start:end, :], "values": self.values[..., start:end, :]}

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Fill the empty cache with these arrays."""
        self.keys = self._joined("keys", position, rows, room)
        self.values = self._joined("values", position, rows, room)
        self.offset = position


class QuantizedCache(KeysAndValues, QuantizedKVCache):
    """Keys and values in groups of 4 or 8 bits: of each the words, the scales and the biases."""

    bits: int
    group_size: int

    def write(self, keys: mx.array, values: mx.array, rows: int) -> None:
        """Write these rows over the first of the last `rows` rows."""
        start = self.offset - rows
        end = start + keys.shape[2]
        for arrays, new in ((self.keys, keys), (self.values, values)):
            parts = mx.quantize(new, group_size=self.group_size, bits=self.bits)
            for array, part in zip(arrays, parts, strict=True):
                array[..., start:end, :] = part

    def export_rows(self, start: int, end: int) -> Arrays:
        """Slice the rows of these tokens; the three arrays of the keys are `keys.0` to `keys.2`."""
        parts = {"keys": self.keys, "values": self.values}
        return {
            f"{name}.{number}": part[..., start:end, :]
            for name, arrays in parts.items()
            for number, part in enumerate(arrays)
        }

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Fill the empty cache with these arrays."""
        parts = range(3)
        self.keys = tuple(self._joined(f"keys.{n}", position, rows, room) for n in parts)
        self.values = tuple(self._joined(f"values.{n}", position, rows, room) for n in parts)
        self.offset = position
