"""Keys and values of many requests in common arrays, so that a batch attends in one operation.

Alone, a request has a `KVCache` per layer. In a batch its rows move into a *slot*: an index on the
batch axis of arrays [S, H, capacity, D], two per layer. A forward then writes the new rows of all
slots with one operation, and attends to all of them with one call, masked to each one's length.

Slots of one `SlotArray` have equal capacity, `STEP` times a power of two; a request that outgrows
its slot moves on to the next array. So a request takes at most twice its rows, whatever the others'
lengths. Rows are copied when a request enters, outgrows or leaves a slot, never per step. While a
request has a slot its caches keep their offsets, so rejected rows go as from any `KVCache`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakSet

import mlx.core as mx
import numpy as np

from .internals import KVCache

STEP = KVCache.step  # rows of the smallest slot
SPARE = 4  # an array grows by this part of its slots, so that most entries copy no other rows


def capacity_for(rows: int) -> int:
    """Rows of the slot of a request with so many rows."""
    return STEP << (max(0, rows - 1) // STEP).bit_length()


class Slot:
    """A request's place in an array, held by its session.

    Attributes:
        array: the array; None once it was left.
        index: its number there.
        caches: the request's caches of the array's layers. Their keys and values are in the slot.
    """

    def __init__(self, array: SlotArray, index: int, caches: Sequence[KVCache]) -> None:
        self.array: SlotArray | None = array
        self.index, self.caches = index, caches

    def leave(self, keep: bool = True) -> None:
        """Free the slot; with `keep`, after its rows were copied back into the caches."""
        array, self.array = self.array, None
        if array is None:
            return
        if keep:
            for layer, cache in enumerate(self.caches):
                cache.keys, cache.values = array.copied(layer, self.index, cache.offset)
            # A lazy copy would hold the arrays, which could then not be written in place.
            mx.async_eval([(cache.keys, cache.values) for cache in self.caches])
        array.slots.discard(self)
        if not array.slots:
            array.layers = []


class SlotArray:
    """Slots of equal capacity.

    Attributes:
        capacity: rows of a slot.
        slots: those in use; a slot ends with its session.
        layers: per layer the keys and values of all slots, each [S * H * capacity, D]: one axis, so
            that one index says where a row goes. None while no slot is in use.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slots: WeakSet[Slot] = WeakSet()
        self.layers: list[list[mx.array]] = []
        self._sizes: list[list[int]] = []  # rows of a slot's keys and of its values: H * capacity

    def add(self, requests: Sequence[Sequence[KVCache]]) -> list[Slot]:
        """Move requests' rows into new slots, behind the others. There must be no gaps."""
        first = len(self.slots)
        if not self.layers:
            both = [(cache.keys, cache.values) for cache in requests[0]]
            self._sizes = [[x.shape[1] * self.capacity for x in pair] for pair in both]
            self.layers = [[mx.zeros((0, x.shape[3]), x.dtype) for x in pair] for pair in both]
        for caches, pair, sizes in zip(
            zip(*requests, strict=True), self.layers, self._sizes, strict=True
        ):
            lengths = [cache.offset for cache in caches]
            for at, name in enumerate(("keys", "values")):
                rows = [getattr(one, name) for one in caches]
                held, start = pair[at], first * sizes[at]
                if start + len(rows) * sizes[at] > len(held):
                    spare = (first + len(rows)) // SPARE
                    entering = self._padded(rows, lengths, spare)
                    pair[at] = mx.concatenate([held[:start], entering]) if start else entering
                else:
                    entering = self._padded(rows, lengths)
                    held[start : start + len(entering)] = entering
            for cache in caches:
                cache.keys = cache.values = None
        slots = [Slot(self, first + at, caches) for at, caches in enumerate(requests)]
        self.slots.update(slots)
        return slots

    def _padded(self, rows: Sequence[mx.array], lengths: Sequence[int], spare: int = 0) -> mx.array:
        """The first rows of arrays [1, H, L, D] as slots [n * H * capacity, D], then spare ones."""
        _, heads, _, size = rows[0].shape
        x = mx.zeros((len(rows) + spare, heads, self.capacity, size), rows[0].dtype)
        for index, (own, length) in enumerate(zip(rows, lengths, strict=True)):
            x[index : index + 1, :, :length] = own[:, :, :length]
        return x.flatten(0, 2)

    def read(self, layer: int, slots: int, rows: int) -> tuple[mx.array, mx.array]:
        """Keys and values [slots, H, rows, D] of the first slots."""
        keys, values = (
            x.reshape(-1, size // self.capacity, self.capacity, x.shape[1])[:slots, :, :rows]
            for x, size in zip(self.layers[layer], self._sizes[layer], strict=True)
        )
        return keys, values

    def write(
        self, layer: int, places: Callable[[int], mx.array], keys: mx.array, values: mx.array
    ) -> None:
        """Write rows [n, H, W, D]; `places` of H are their indices [n, H, W]."""
        for at, rows in enumerate((keys, values)):
            self.layers[layer][at][places(self._sizes[layer][at] // self.capacity)] = rows

    def copied(self, layer: int, index: int, rows: int) -> list[mx.array]:
        """A slot's keys and values [1, H, L, D], with room for more than so many rows."""
        room = min(self.capacity, STEP * (1 + rows // STEP))
        every = self.read(layer, index + 1, self.capacity)
        return [mx.take(x, mx.array([index]), axis=0)[:, :, :room] for x in every]

    def close_gaps(self) -> None:
        """Move the last slots into free ones, and shrink arrays of which most is free."""
        count = len(self.slots)
        gaps = {*range(count)} - {slot.index for slot in self.slots}
        for slot in [slot for slot in self.slots if slot.index >= count]:
            source, slot.index = slot.index, gaps.pop()
            for pair, sizes in zip(self.layers, self._sizes, strict=True):
                for x, size in zip(pair, sizes, strict=True):
                    rows = x[mx.arange(source * size, (source + 1) * size)]
                    x[slot.index * size : (slot.index + 1) * size] = rows
        if self.layers and 2 * count * self._sizes[0][0] < len(self.layers[0][0]):
            self.layers = [
                [x[mx.arange(count * size)] for x, size in zip(pair, sizes, strict=True)]
                for pair, sizes in zip(self.layers, self._sizes, strict=True)
            ]
        if not count:
            self.layers = []


class SupportsSlots(Protocol):
    """A request's session, of which `TargetSession` is the only kind."""

    slot: Slot | None
    position: int

    def slot_caches(self, numbers: Sequence[int]) -> list[KVCache]:
        """The caches of these numbers if they can be in a slot; else none."""


class KVSlots:
    """The slot arrays of a batch.

    Args:
        layers: the caches that move into slots, by number: plain keys and values.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = layers
        self._arrays: dict[int, SlotArray] = {}

    def arrange(self, sessions: Sequence[SupportsSlots], rows: Sequence[int]) -> None:
        """Have these sessions' requests in slots, and no others.

        Requests that cannot have one keep their own caches: new ones without any rows, those with
        quantized keys, and those whose drafts were trees. So do all if the slots belong to others:
        then this is the first step of new requests, while the others' step is under way.

        Args:
            sessions: that share the next forward.
            rows: of each in it.
        """
        arrays = self._arrays.values()
        staying = {one.slot for one in sessions if one.slot is not None and one.slot.array}
        if not staying and any(array.slots for array in arrays):
            return
        for absent in [slot for array in arrays for slot in array.slots if slot not in staying]:
            absent.leave()
        joining: dict[int, dict[SupportsSlots, Sequence[KVCache]]] = {}
        for session, more in zip(sessions, rows, strict=True):
            capacity = capacity_for(session.position + more)
            slot = session.slot
            if slot is not None and slot.array and slot.array.capacity < capacity:
                slot.leave()
            if slot is None or slot.array is None:
                if caches := session.slot_caches(self._layers):
                    joining.setdefault(capacity, {})[session] = caches
        for array in arrays:
            array.close_gaps()
        for capacity, entering in joining.items():
            array = self._arrays.setdefault(capacity, SlotArray(capacity))
            for session, slot in zip(entering, array.add([*entering.values()]), strict=True):
                session.slot = slot


class RowSpan(NamedTuple):
    """A request in a slot: its first row in a forward, its number of rows, their first position."""

    first: int
    width: int
    position: int


class SlotRows:
    """The rows of a forward whose requests have slots in one array.

    They form a table [n, W]: a request's rows for each slot. Where a request has fewer than W, its
    last row stands in all other places too, and is written and read again.

    Args:
        array: with n slots in use.
        members: of each slot, by index.

    Attributes:
        table: [n, W], the places of the rows in the forward.
    """

    def __init__(self, array: SlotArray, members: Sequence[RowSpan]) -> None:
        first, width, position = np.array(members, np.int32).T[:, :, None]
        places = np.minimum(np.arange(width.max(), dtype=np.int32), width - 1)
        self._array, self.table = array, first + places
        rows, start = self.table.reshape(-1), int(self.table[0, 0])
        span = slice(start, start + len(rows))
        # Rows side by side are read in place.
        side_by_side = np.array_equal(rows, np.arange(span.start, span.stop))
        self._rows = span if side_by_side else mx.array(rows)
        self._positions, self._end = position + places, int((position + width).max())
        self._places: dict[int, mx.array] = {}
        self._masks: dict[int | None, mx.array] = {}

    def rows_of(self, x: mx.array) -> mx.array:
        """These rows [n, H, W, D] of a forward's rows [1, H, R, D]."""
        return mx.unflatten(x.squeeze(0)[:, self._rows], 1, self.table.shape).swapaxes(0, 1)

    def update(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write a forward's keys and values [1, H, R, D]; all of each slot [n, H, L, D]."""
        self._array.write(layer, self._places_of, self.rows_of(keys), self.rows_of(values))
        return self._array.read(layer, len(self.table), self._end)

    def _places_of(self, heads: int) -> mx.array:
        """Where an array of so many heads has these rows, [n, H, W]."""
        if heads not in self._places:  # the same for every layer
            slots = np.arange(len(self.table) * heads).reshape(-1, heads, 1) * self._array.capacity
            self._places[heads] = mx.array((slots + self._positions[:, None]).astype(np.uint32))
        return self._places[heads]

    def mask(self, window: int | None = None) -> mx.array:
        """Which keys each row sees: [n, 1, W, L] bool."""
        if window not in self._masks:  # the same for every layer
            own, keys = mx.array(self._positions[:, None, :, None]), mx.arange(self._end)
            seen = keys <= own
            self._masks[window] = seen if window is None else seen & (keys > own - window)
        return self._masks[window]
