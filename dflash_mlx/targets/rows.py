"""The rows of one forward: of one request or of many, to verify or of a prompt.

One request's rows run on its own caches, as mlx-lm's models run on theirs. The rows of many lie in
one sequence, each request's after another's; or, if all have as many and slots in one array
(`kv_slots`), on the batch axis. Only attention and recurrence part them, so weights are read once.

What belongs to one request (a mask, keys and values) travels through the model as `PerRequest`. A
model can hand such an object on but not compute with it, and the positions of many requests have
more axes than any other array. So a model that does more with them fails while its forward is
built.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from ..errors import SettingsError
from .internals import mask_of
from .kv_slots import KVSlots, SlotArray, SlotRows
from .span import Span

Verified = tuple[mx.array, mx.array]  # logits [R, V], taps [1, R, K*D]

AXES = 9  # of many requests' positions, so that only the ropes of `intercept` can use them


@dataclass(frozen=True)
class SharedForward:
    """What several requests share in a forward of a model.

    Attributes:
        slot_layers: the caches that requests have in slots, by number: plain keys and values.
        stacks: whether these are all caches, so that requests may be on the batch axis.
        reads_prompts: whether the ends of prompts can be read together: as they are read alone,
            bit for bit.
    """

    slot_layers: tuple[int, ...]
    stacks: bool
    reads_prompts: bool


class Rows:
    """The R rows of a forward.

    Args:
        spans: the rows of each request.
        tokens: [R] tokens of the target's choosing, in place of those of the spans.
        is_prompt: whether they are tokens of prompts, which are all kept.
        slots: where several requests have their keys and values; None for their own caches.

    Attributes:
        spans, is_prompt, slots: as given.
        is_stacked: whether several requests lie on the batch axis, as `arrange` decides.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        tokens: mx.array | None = None,
        is_prompt: bool = False,
        slots: KVSlots | None = None,
    ) -> None:
        self.spans = spans
        self.is_prompt = is_prompt
        self.slots = slots
        self.is_stacked = False
        self._slot_layers: tuple[int, ...] = ()
        self._tokens = tokens
        self._count = 0
        for span in spans:
            span.first = self._count
            self._count += len(span)
        self._windows: dict[int, mx.array] = {}

    def __len__(self) -> int:
        return self._count

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The layers that the requests' drafters read, the same for all of them."""
        return self.spans[0].session.tap_layers

    def check_sessions(self) -> None:
        """Raise `SettingsError` for requests that cannot be in one forward, or not yet."""
        sessions = [span.session for span in self.spans]
        if len(set(sessions)) < len(sessions):
            raise SettingsError(
                "A session is in a forward twice: give it one span with all its rows."
            )
        for session in sessions:
            if session.tap_layers != self.tap_layers:
                raise SettingsError(
                    f"Sessions that tap layers {self.tap_layers} and {session.tap_layers} cannot "
                    "share a forward: read them one after another."
                )
            if not session.intact:
                raise SettingsError(
                    "The last forward of a session failed or was not committed. Before it reads "
                    "more, commit the rows that you want to keep, or start a new session."
                )

    @property
    def is_shared(self) -> bool:
        """Whether the rows are those of several requests."""
        return len(self.spans) > 1

    @property
    def tree(self) -> Span | None:
        """The only request's draft tree; None for a chain, and for several requests."""
        span = self.spans[0]
        return None if self.is_shared or span.is_chain else span

    @property
    def starts_early(self) -> bool:
        """Whether the device may start with the first layers while Python builds the others.

        A plain step's token that is still on the device comes from a step that runs: this one may
        not start, because it would copy keys and values that the other one still reads.
        """
        if self.is_prompt or self._tokens is not None:
            return False
        first = self.spans[0].proposal
        return self.is_shared or len(first) > 1 or not isinstance(first.tokens, mx.array)

    def part(self, first: int, end: int) -> Rows:
        """The rows of the requests from number `first` to `end`, for a forward of their own."""
        spans = self.spans[first:end]
        tokens = self._tokens
        if tokens is not None:
            tokens = tokens[spans[0].first : spans[-1].end]
        # Copies, which have other numbers in their forward than here.
        return Rows([copy(span) for span in spans], tokens, self.is_prompt, self.slots)

    def tokens(self, vocab_size: int) -> mx.array:
        """The rows' token ids [R], clipped to the vocabulary as in `Proposal.array`."""
        if self._tokens is not None:
            return self._tokens
        if not self.is_shared:
            return self.spans[0].proposal.array(vocab_size)
        arrays = [
            tokens if isinstance(tokens, mx.array) else mx.array(list(tokens), mx.int32)
            for tokens in (span.proposal.tokens for span in self.spans)
        ]
        ids = mx.concatenate(arrays).astype(mx.uint32)
        return mx.minimum(ids, vocab_size - 1)

    def last(self, x: mx.array) -> mx.array:
        """Each request's last row, [1, n, D] or [n, 1, D], of x in the forward's `shape`.

        x may consist of these rows already.
        """
        if not self.is_shared or self.is_stacked:
            return x[:, -1:]
        return x if x.shape[1] == len(self.spans) else x[:, self._ends]

    @cached_property
    def _ends(self) -> mx.array:
        """The number of each request's last row, [n] int32."""
        return mx.array([span.end - 1 for span in self.spans], mx.int32)

    # What follows is asked of several requests' rows only.

    def arrange(self, sharing: SharedForward | None) -> None:
        """Move requests into slots or out of them, and decide how the rows lie in the forward.

        Args:
            sharing: what several requests share.
        """
        for span in self.spans:
            if not self.is_shared or self.slots is None or not span.is_chain:
                span.session.leave_slot()
        if self.is_shared:
            assert sharing is not None
            self._slot_layers = sharing.slot_layers
            if self.slots is not None:
                self.slots.arrange(self.spans)
            self.is_stacked = sharing.stacks and self._fills_slots()

    def _fills_slots(self) -> bool:
        """Whether the requests have as many rows and slots in one array, and are in their order."""
        width = len(self.spans[0])
        slots = [span.session.slot for span in self.spans]
        return all(
            slot is not None
            and slot.array is slots[0].array
            and slot.index == number
            and len(span) == width
            for number, (span, slot) in enumerate(zip(self.spans, slots, strict=True))
        )

    def caches(self) -> list[Any]:
        """The caches that the model gets: the only request's own, or stand-ins for those of all."""
        if not self.is_shared:
            return self.spans[0].session.cache
        places = {number: place for place, number in enumerate(self._slot_layers)}  # in a slot
        caches = zip(*(span.session.cache for span in self.spans), strict=True)
        return [SharedCache(self, parts, places.get(number)) for number, parts in enumerate(caches)]

    @cached_property
    def slot_rows(self) -> list[SlotRows]:
        """The rows of requests with slots, by array."""
        spans_by_array: dict[SlotArray, list[Span]] = {}
        for span in self.spans:
            if span.session.slot is not None:
                spans_by_array.setdefault(span.session.slot.array, []).append(span)
        return [SlotRows(array, spans, self.is_stacked) for array, spans in spans_by_array.items()]

    @cached_property
    def without_slots(self) -> list[int]:
        """The numbers of the requests that have no slot."""
        return [number for number, span in enumerate(self.spans) if span.session.slot is None]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the rows in the model: [1, R], or [n, W] where the requests are on the batch axis."""
        if self.is_stacked:
            return len(self.spans), len(self.spans[0])
        return 1, len(self)

    @cached_property
    def offset(self) -> mx.array:
        """The position of each row in its request's text; if stacked, of each request's first row.

        In a tree, it depends on the row's depth. The numbers lie along the first of `AXES` axes, so
        that only the ropes of `intercept` can use them.
        """
        if self.is_stacked:
            positions = [span.position for span in self.spans]
        else:
            positions = [
                span.position + depth for span in self.spans for depth in span.proposal.depths
            ]
        return mx.array(positions, mx.int32).reshape(-1, *[1] * (AXES - 1))

    def windows(self, size: int) -> mx.array:
        """The last `size` rows of each row's text, the row itself last, [R, size] int32.

        Before its own rows each request has `size` - 1 older ones.
        """
        if size not in self._windows:  # the same for every layer
            windows = []
            before = 0
            for span in self.spans:
                windows.append(before + span.windows(size, size - 1))
                before += size - 1 + len(span)
            self._windows[size] = mx.concatenate(windows)
        return self._windows[size]

    def split(self, x: mx.array, axis: int = 1) -> list[mx.array]:
        """Each request's part of x, whose axis has R rows."""
        if x.shape[axis] != len(self):
            raise ValueError(f"{x.shape} does not have {len(self)} rows on axis {axis}.")
        if not self.is_shared:
            return [x]
        starts = [span.first for span in self.spans[1:]]
        return list(mx.split(x, starts, axis=axis))

    def join(self, in_slots: Sequence[mx.array], others: Sequence[mx.array]) -> mx.array:
        """All rows [1, H, R, D] in order: those in slots [n, H, W, D], and others [1, H, N, D]."""
        if self.is_stacked:
            return in_slots[0]
        parts = [x.swapaxes(0, 1).flatten(1, 2)[None] for x in in_slots]
        parts += others
        x = mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]
        return x if self._order is None else x[:, :, self._order]

    @cached_property
    def _order(self) -> mx.array | None:
        """The place of each row in what `join` joins; None if they are in order."""
        rows = [row for slots in self.slot_rows for row in slots.rows]
        for number in self.without_slots:
            span = self.spans[number]
            rows += range(span.first, span.end)
        if rows == list(range(len(self))):
            return None
        places = {row: place for place, row in enumerate(rows)}
        return mx.array([places[row] for row in range(len(self))])


class PerRequest:
    """One value per request, in their order.

    Attributes:
        rows: the forward's rows.
        parts: the values; None for the keys and values of requests in slots.
        in_slots: the values of `Rows.slot_rows`, for masks and for keys and values in slots.
    """

    def __init__(self, rows: Rows, parts: Iterable[Any], in_slots: Iterable[Any] = ()) -> None:
        self.rows = rows
        self.parts = tuple(parts)
        self.in_slots = tuple(in_slots)


class SharedCache:
    """Stands for the caches of all requests, in place of one layer's cache.

    Args:
        rows: the forward's rows.
        parts: the requests' caches.
        layer: its number among the layers whose keys and values may be in slots; None for another.
    """

    def __init__(self, rows: Rows, parts: Iterable[Any], layer: int | None = None) -> None:
        self.rows = rows
        self.parts = tuple(parts)
        self._layer: Any = layer
        self._slots = [] if layer is None else rows.slot_rows
        self._others = rows.without_slots if self._slots else range(len(self.parts))

    @property
    def offset(self) -> mx.array:
        """The positions of all rows, as in `Rows.offset`."""
        return self.rows.offset

    def make_mask(self, N: int, **settings: Any) -> PerRequest:
        """The mask of each request without a slot, and of the rows in each slot array; N is R."""
        masks: list[Any] = [None] * len(self.parts)
        for number in self._others:
            rows = len(self.rows.spans[number])
            masks[number] = mask_of(self.parts[number], rows, **settings)
        window = settings.get("window_size")
        return PerRequest(self.rows, masks, [slots.mask(window) for slots in self._slots])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PerRequest, PerRequest]:
        """Write keys and values [1, H, R, D] of each slot array at once, others per request."""
        all_keys: list[Any] = [None] * len(self.parts)
        all_values: list[Any] = [None] * len(self.parts)
        if self._others:
            new_keys = self.rows.split(keys, 2)
            new_values = self.rows.split(values, 2)
            for number in self._others:
                held = self.parts[number].update_and_fetch(new_keys[number], new_values[number])
                all_keys[number], all_values[number] = held
        in_slots: Any = [slots.update(self._layer, keys, values) for slots in self._slots]
        slot_keys = [held_keys for held_keys, _ in in_slots]
        slot_values = [held_values for _, held_values in in_slots]
        return (
            PerRequest(self.rows, all_keys, slot_keys),
            PerRequest(self.rows, all_values, slot_values),
        )

    def __getitem__(self, index: int) -> Any:
        """Sub-cache `index` of every request; where the parts are arrays, `keys` for all."""
        parts = [cache[index] for cache in self.parts]
        return self.keys if isinstance(parts[0], mx.array) else SharedCache(self.rows, parts)

    # In a pipeline, mlx-lm makes its last cache depend on what it sends. The forward of many
    # computes logits, which depend on that anyway, so these are ignored.

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
    """One request's cache in a forward of many, with the positions of this request's rows.

    Args:
        cache: the request's.
        offset: its part of `Rows.offset`.
    """

    def __init__(self, cache: Any, offset: mx.array) -> None:
        vars(self).update(_cache=cache, offset=offset)

    def __getattr__(self, name: str) -> Any:
        """Read any other attribute from the cache."""
        return getattr(self._cache, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._cache, name, value)
