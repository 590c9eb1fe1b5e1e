"""The rows of many requests in one forward, and the stand-ins for one request's cache.

What belongs to one request (a mask, keys and values) travels through the model as `PerRequest`. A
model can hand such an object on but not compute with it, and batched positions have more axes than
any other array. So a model that does more with them fails while its forward is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import mlx.core as mx

from .internals import mask_of
from .kv_slots import RowSpan, SlotArray, SlotRows
from .session import TargetSession
from .tree_attention import AXES


class PerRequest:
    """One value per request, in their order.

    Attributes:
        rows: the forward's rows.
        parts: the values; None for the keys and values of requests in slots.
        in_slots: the values of `BatchRows.slots`, for masks and for keys and values in slots.
    """

    def __init__(self, rows: BatchRows, parts: Iterable[Any], in_slots: Iterable[Any] = ()) -> None:
        self.rows, self.parts, self.in_slots = rows, tuple(parts), tuple(in_slots)


class BatchRows:
    """The R rows of a forward, one request's after another's.

    Args:
        requests: the requests' sessions, each with its proposal, and in its slot if it has one.
        tokens: see `BatchVerifier.verify`.
        stacks: whether the target can have requests on the batch axis.

    Attributes:
        requests: as given.
        widths: the number of rows of each.
        slots: the rows of requests with slots, by array.
        own: the other requests, by number.
        shape: of the forward's rows, [1, R]; or [n, W] if all have W rows and slots in one array,
            so that the forward's arrays are those that the attention reads.
    """

    def __init__(
        self,
        requests: Sequence[TargetSession],
        tokens: mx.array | None = None,
        stacks: bool = False,
    ) -> None:
        self.requests, self._tokens = requests, tokens
        self._proposals = [request.proposal for request in requests if request.proposal is not None]
        self.widths = [len(proposal) for proposal in self._proposals]
        *self._starts, self._rows = accumulate(self.widths, initial=0)
        self._windows: dict[int, mx.array] = {}
        members: dict[SlotArray, list[RowSpan]] = {}
        self.own = []
        for at, (request, slot) in enumerate((request, request.slot) for request in requests):
            if slot is None:
                self.own.append(at)
                continue
            member = RowSpan(slot.index, self._starts[at], self.widths[at], request.position)
            members.setdefault(slot.array, []).append(member)
        # As many rows of each, in the order of their slots.
        width = self.widths[0]
        stacked = stacks and not self.own and len(members) == 1
        stacked = stacked and all(
            (span.slot, span.first, span.width) == (at, at * width, width)
            for at, span in enumerate(next(iter(members.values())))
        )
        self.slots = [SlotRows(array, found, stacked) for array, found in members.items()]
        self.shape = (len(requests), width) if stacked else (1, self._rows)

    def __len__(self) -> int:
        return self._rows

    def tokens(self, vocab_size: int) -> mx.array:
        """The rows' token ids [R], clipped to the vocabulary as in `Proposal.array`."""
        if self._tokens is not None:  # of the target's choosing
            return self._tokens
        given = [proposal.tokens for proposal in self._proposals]
        arrays = [
            each if isinstance(each, mx.array) else mx.array(list(each), mx.int32) for each in given
        ]
        ids = mx.concatenate(arrays).astype(mx.uint32)
        return mx.minimum(ids, vocab_size - 1)

    @cached_property
    def positions(self) -> mx.array:
        """Each row's position in its request's text, by depth in a tree: [R] int32.

        Stacked, the position of each request's first row: [n] int32.
        """
        if self.shape[0] > 1:
            return mx.array([request.position for request in self.requests], mx.int32)
        pairs = zip(self.requests, self._proposals, strict=True)
        positions = [one.position + depth for one, proposal in pairs for depth in proposal.depths]
        return mx.array(positions, mx.int32)

    @cached_property
    def offset(self) -> mx.array:
        """The positions, in a shape that only the ropes of `rotate_rows` can use."""
        return self.positions.reshape(-1, *[1] * (AXES - 1))

    def windows(self, size: int) -> mx.array:
        """The last `size` rows of each row's text, itself the last, [R, size] int32.

        Before its own rows each request has `size` - 1 older ones.
        """
        if size not in self._windows:  # the same for every layer
            found, before = [], 0
            for request, width in zip(self.requests, self.widths, strict=True):
                if request.tree is not None:
                    window = request.tree.windows(size, size - 1)
                else:
                    window = mx.arange(width)[:, None] + mx.arange(size)
                found.append(before + window.astype(mx.int32))
                before += size - 1 + width
            self._windows[size] = mx.concatenate(found)
        return self._windows[size]

    def split(self, x: mx.array, axis: int = 1) -> list[mx.array]:
        """Each request's part of x, whose axis has R rows."""
        if x.shape[axis] != len(self):
            raise ValueError(f"{x.shape} does not have {len(self)} rows on axis {axis}.")
        return list(mx.split(x, self._starts[1:], axis=axis))

    def join(self, in_slots: Sequence[mx.array], own: Sequence[mx.array]) -> mx.array:
        """All rows [1, H, R, D] in order: those in slots [n, H, W, D], and others [1, H, N, D]."""
        if self.shape[0] > 1:
            return in_slots[0]
        parts = [x.swapaxes(0, 1).flatten(1, 2)[None] for x in in_slots]
        x = mx.concatenate([*parts, *own], axis=2) if len(parts) + len(own) > 1 else parts[0]
        return x if self._order is None else x[:, :, self._order]

    @cached_property
    def _order(self) -> mx.array | None:
        """The place of each row in what `join` joins; None if they are in order."""
        rows = [row for slots in self.slots for row in slots.rows]
        rows += [self._starts[at] + row for at in self.own for row in range(self.widths[at])]
        if rows == [*range(len(self))]:
            return None
        places = {row: place for place, row in enumerate(rows)}
        return mx.array([places[row] for row in range(len(self))])


class BatchedCache:
    """The caches of all requests in place of one layer's cache.

    Args:
        rows: the forward's rows.
        parts: the requests' caches.
        layer: its number among the layers whose keys and values may be in slots; None for another.
    """

    def __init__(self, rows: BatchRows, parts: Iterable[Any], layer: int | None = None) -> None:
        self.rows, self.parts = rows, tuple(parts)
        self._layer: Any = layer
        self._slots = [] if layer is None else rows.slots
        self._own = rows.own if self._slots else range(len(self.parts))

    @property
    def offset(self) -> mx.array:
        """See `BatchRows`."""
        return self.rows.offset

    def make_mask(self, N: int, **settings: Any) -> PerRequest:
        """The mask of each request without a slot, and of the rows in each slot array; N is R."""
        masks: list[Any] = [None] * len(self.parts)
        for at in self._own:
            masks[at] = mask_of(self.parts[at], self.rows.widths[at], **settings)
        window = settings.get("window_size")
        return PerRequest(self.rows, masks, [slots.mask(window) for slots in self._slots])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PerRequest, PerRequest]:
        """Write keys and values [1, H, R, D] of each slot array at once, others per request."""
        held: list[Any] = [(None, None)] * len(self.parts)
        in_slots: Any = [slots.update(self._layer, keys, values) for slots in self._slots]
        new = [self.rows.split(x, 2) for x in (keys, values)] if self._own else []
        for at in self._own:
            held[at] = self.parts[at].update_and_fetch(*(each[at] for each in new))
        own_keys, own_values = zip(*held, strict=True)
        in_keys, in_values = zip(*in_slots, strict=True) if in_slots else ((), ())
        rows = self.rows
        return PerRequest(rows, own_keys, in_keys), PerRequest(rows, own_values, in_values)

    def __getitem__(self, index: int) -> Any:
        """Sub-cache `index` of every request. For an array, the batch's `keys`."""
        parts = [cache[index] for cache in self.parts]
        return self.keys if isinstance(parts[0], mx.array) else type(self)(self.rows, parts)

    # In a pipeline, mlx-lm makes its last cache depend on what it sends. A batched forward computes
    # logits, which depend on that anyway, so these are ignored.

    @property
    def keys(self) -> mx.array:
        """An empty array."""
        return mx.zeros((0,) * AXES)

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        pass

    def __setitem__(self, index: int, array: mx.array) -> None:
        pass


class OneRequestCache:
    """One request's cache in a forward of many, whose rows turn by their own positions.

    Args:
        cache: the request's.
        offset: its part of `BatchRows.offset`.
    """

    def __init__(self, cache: Any, offset: mx.array) -> None:
        vars(self).update(_cache=cache, offset=offset)

    def __getattr__(self, name: str) -> Any:
        """The cache's own."""
        return getattr(self._cache, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._cache, name, value)
