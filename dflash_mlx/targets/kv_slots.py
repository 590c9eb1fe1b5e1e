"""Keys and values of many requests in common arrays, so that a batch attends in one operation.

Alone, a request has a `KVCache` per layer. In a batch its rows move into a *slot*: an index on the
batch axis of arrays [S, H, capacity, D], two per layer. A forward then writes the new rows of all
slots with one operation, and attends to all of them with one call, masked to each one's length.

Slots of one `SlotArray` have equal capacity, `STEP` times a power of two; a request that outgrows
its slot moves on to the next array. So a request takes at most twice its rows, whatever the others'
lengths. Rows are copied when a request enters, outgrows or leaves a slot, never per step. A slot's
rows end at its session's position, so rejected rows need not be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakSet

import mlx.core as mx

from ..memory import compute
from .caches import FullCache
from .span import Span

STEP = FullCache.step  # rows of the smallest slot
SPARE = 4  # an array grows by a quarter of its slots, so that most new requests copy no others


def capacity_for(rows: int) -> int:
    """The capacity of the slot of a request with so many rows: the next STEP * 2^n."""
    return STEP << (max(0, rows - 1) // STEP).bit_length()


@dataclass(eq=False)
class Slot:
    """A request's place in an array, held by its session.

    Attributes:
        array: the array.
        index: its number there.
        layers: the numbers of the request's caches whose keys and values are in the slot.
        caches: these caches.
    """

    array: SlotArray
    index: int
    layers: Sequence[int]
    caches: Sequence[FullCache]

    def copy_back(self, rows: int) -> None:
        """Copy the first rows into the caches."""
        for layer, cache in enumerate(self.caches):
            cache.keys, cache.values = self.array.copied(layer, self.index, rows)
            cache.offset = rows
        # A lazy copy would hold the arrays, which could then not be written in place.
        compute([(cache.keys, cache.values) for cache in self.caches], wait=False)


class SlotArray:
    """Slots of equal capacity.

    Attributes:
        capacity: rows of a slot.
        sessions: the `TargetSession`s that have a slot, which ends with its session.
        used: how many slots are in use, or were before requests left.
        layers: per layer the keys and values of all slots, each [S * H * capacity, D]: one axis, so
            that one index says where a row goes. None while no slot is in use.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sessions: WeakSet[Any] = WeakSet()
        self.used = 0
        self.layers: list[list[mx.array]] = []
        self._sizes: list[list[int]] = []  # rows of a slot's keys and of its values: H * capacity

    def add(self, entering: Mapping[Any, Sequence[FullCache]], numbers: Sequence[int]) -> None:
        """Move the rows of these caches into new slots, behind those in use without gaps."""
        first = self.used
        requests = list(entering.values())
        if not self.layers:
            pairs = [(cache.keys, cache.values) for cache in requests[0]]
            self._sizes = [[x.shape[1] * self.capacity for x in pair] for pair in pairs]
            self.layers = [[mx.zeros((0, x.shape[3]), x.dtype) for x in pair] for pair in pairs]
        lengths = [session.position for session in entering]
        for layer in range(len(self.layers)):
            caches = [request_caches[layer] for request_caches in requests]
            self._append(layer, 0, [cache.keys for cache in caches], lengths)
            self._append(layer, 1, [cache.values for cache in caches], lengths)
            for cache in caches:
                cache.keys = None
                cache.values = None
        for index, (session, held_caches) in enumerate(entering.items(), start=first):
            session.slot = Slot(array=self, index=index, layers=numbers, caches=held_caches)
        self.sessions.update(entering)
        self.used += len(entering)

    def remove(self, session: Any) -> None:
        """Free a request's slot."""
        self.sessions.discard(session)
        if not self.sessions:
            self.layers = []

    def _append(
        self, layer: int, place: int, rows: Sequence[mx.array], lengths: Sequence[int]
    ) -> None:
        """Write rows of a layer's keys (place 0) or values (1) behind the slots in use."""
        held = self.layers[layer][place]
        size = self._sizes[layer][place]
        start = self.used * size
        if start + len(rows) * size > len(held):
            spare = (self.used + len(rows)) // SPARE
            new = self._padded(rows, lengths, spare)
            self.layers[layer][place] = mx.concatenate([held[:start], new]) if start else new
        else:
            new = self._padded(rows, lengths)
            held[start : start + len(new)] = new

    def _padded(self, rows: Sequence[mx.array], lengths: Sequence[int], spare: int = 0) -> mx.array:
        """The first rows of arrays [1, H, L, D] as slots [n * H * capacity, D], then spare ones."""
        _, heads, _, size = rows[0].shape
        x = mx.zeros((len(rows) + spare, heads, self.capacity, size), rows[0].dtype)
        for index, (held, length) in enumerate(zip(rows, lengths, strict=True)):
            x[index : index + 1, :, :length] = held[:, :, :length]
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
        for place, rows in enumerate((keys, values)):
            heads = self._sizes[layer][place] // self.capacity
            self.layers[layer][place][places(heads)] = rows

    def copied(self, layer: int, index: int, rows: int) -> list[mx.array]:
        """A slot's keys and values [1, H, L, D], with room for more than so many rows."""
        room = min(self.capacity, STEP * (1 + rows // STEP))
        pair = self.read(layer, index + 1, self.capacity)
        return [mx.take(x, mx.array([index]), axis=0)[:, :, :room] for x in pair]

    def close_gaps(self) -> None:
        """Move the last slots into free ones, and shrink arrays of which most is free."""
        count = len(self.sessions)
        self.used = count
        slots = [session.slot for session in self.sessions if session.slot is not None]
        gaps = set(range(count)) - {slot.index for slot in slots}
        moved: list[tuple[mx.array, int, mx.array]] = []
        for slot in [slot for slot in slots if slot.index >= count]:
            source = slot.index
            slot.index = gaps.pop()
            for pair, sizes in zip(self.layers, self._sizes, strict=True):
                for x, size in zip(pair, sizes, strict=True):
                    rows = mx.arange(source * size, (source + 1) * size)
                    moved.append((x, slot.index * size, x[rows]))
        compute([rows for *_, rows in moved])  # else x is copied, as it is still being read
        for x, first, rows in moved:
            x[first : first + len(rows)] = rows
        # All arrays have the same number of slots, so one tells whether most of them are free.
        if self.layers and 2 * count * self._sizes[0][0] < len(self.layers[0][0]):
            self.layers = [
                [x[mx.arange(count * size)] for x, size in zip(pair, sizes, strict=True)]
                for pair, sizes in zip(self.layers, self._sizes, strict=True)
            ]
        if not count:
            self.layers = []


class KVSlots:
    """The slot arrays of a batch.

    Args:
        layers: the caches that move into slots, by number: plain keys and values.

    Attributes:
        layers: as given.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = layers
        self._arrays: dict[int, SlotArray] = {}

    def arrange(self, spans: Sequence[Span]) -> None:
        """Move the requests that share the next forward into slots, and all others out of theirs.

        Requests that cannot have a slot keep their own caches: new ones without any rows, those
        with quantized keys, and those whose drafts were trees. If other requests have all slots,
        these all keep their own caches too: this is their first step, while a step of the others
        is running.
        """
        arrays = self._arrays.values()
        sessions = [span.session for span in spans]
        needed = [capacity_for(span.position + len(span)) for span in spans]
        in_slots = [
            session.slot is not None and session.slot.array.capacity >= capacity
            for session, capacity in zip(sessions, needed, strict=True)
        ]
        if all(in_slots) and sum(array.used for array in arrays) == len(sessions):
            return  # the usual case: the same requests as in the last step
        staying = {session for session in sessions if session.slot is not None}
        if not staying and any(array.sessions for array in arrays):
            return
        with_slots = [session for array in arrays for session in array.sessions]
        for session in with_slots:
            if session not in staying:
                session.leave_slot()
        joining: dict[int, dict[Any, Sequence[FullCache]]] = {}
        for span, capacity, stays in zip(spans, needed, in_slots, strict=True):
            session = span.session
            if not stays:
                session.leave_slot()
                caches = session.slot_caches(self.layers) if span.is_chain else ()
                if caches:
                    joining.setdefault(capacity, {})[session] = caches
        for array in arrays:
            array.close_gaps()
        for capacity, entering in joining.items():
            array = self._arrays.setdefault(capacity, SlotArray(capacity))
            array.add(entering, self.layers)


class SlotRows:
    """The rows of a forward whose requests have slots in one array.

    They form a table [n, W]: a request's rows for each slot. Where a request has fewer than W, its
    last row stands in all other places too, and is written and read again.

    Args:
        array: with n slots in use.
        spans: the rows of each request that has a slot in it.
        stacked: whether the forward has the table's shape already, instead of [1, R].
    """

    def __init__(self, array: SlotArray, spans: Sequence[Span], stacked: bool) -> None:
        self._array = array
        self._stacked = stacked
        self._spans = sorted(spans, key=lambda span: span.session.slot.index)
        self._width = max(len(span) for span in spans)
        self._end = max(span.position + len(span) for span in spans)
        positions = self._table([span.position for span in self._spans])
        self._positions = mx.array(positions, mx.int32)
        self._indices: dict[int, mx.array] = {}
        self._masks: dict[int | None, mx.array] = {}

    def _table(self, starts: Sequence[int]) -> list[list[int]]:
        """Numbers that rise by one from row to row, from the first row's of each slot, [n, W]."""
        return [
            [start + min(row, len(span) - 1) for row in range(self._width)]
            for start, span in zip(starts, self._spans, strict=True)
        ]

    @cached_property
    def rows(self) -> list[int]:
        """The places of the table's rows in the forward, slot by slot."""
        table = self._table([span.first for span in self._spans])
        return [row for slot in table for row in slot]

    @cached_property
    def _index(self) -> slice | mx.array:
        """The table's rows as an index. Rows side by side are read in place."""
        first = self.rows[0]
        end = first + len(self.rows)
        side_by_side = self.rows == list(range(first, end))
        return slice(first, end) if side_by_side else mx.array(self.rows)

    def take(self, x: mx.array) -> mx.array:
        """These rows [n, H, W, D] of a forward's rows [1, H, R, D]."""
        if self._stacked:
            return x
        return mx.unflatten(x.squeeze(0)[:, self._index], 1, self._positions.shape).swapaxes(0, 1)

    def update(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write new keys and values [1, H, R, D] and return all of each slot's [n, H, L, D]."""
        self._array.write(layer, self._row_indices, self.take(keys), self.take(values))
        return self._array.read(layer, len(self._positions), self._end)

    def _row_indices(self, heads: int) -> mx.array:
        """Where an array of so many heads has these rows, [n, H, W]."""
        if heads not in self._indices:  # the same for every layer
            starts = mx.arange(len(self._positions) * heads) * self._array.capacity
            self._indices[heads] = starts.reshape(-1, heads, 1) + self._positions[:, None]
        return self._indices[heads]

    def mask(self, window: int | None = None) -> mx.array:
        """Which keys each row sees: [n, 1, W, L] bool."""
        if window not in self._masks:  # the same for every layer
            positions = self._positions[:, None, :, None]
            keys = mx.arange(self._end)
            seen = keys <= positions
            if window is not None:
                seen = seen & (keys > positions - window)
            self._masks[window] = seen
        return self._masks[window]
