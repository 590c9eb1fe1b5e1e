"""The rows of many requests in one forward, and the stand-ins for one request's cache.

What belongs to one request (a mask, keys and values) travels through the model as `PerRequest`. A
model can hand such an object on but not compute with it, and batched positions have more axes than
any other array. So a model that does more with them fails while its forward is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import mlx.core as mx

from ..proposal import Proposal
from .internals import mask_of
from .overrides import Entry
from .tree import Tree

AXES = 9  # of positions, so that nothing but `by_position` can use them


@dataclass(frozen=True)
class RequestRows:
    """One request's part of a batched forward.

    Attributes:
        proposal: its rows.
        ids: their tokens [N].
        position: of the first row.
        caches, rollbacks: one per layer, fewer where layers share them.
        entries: the classes of the model's modules in this request's own verify.
        tree: the proposal's tree; None for a chain.
        reader: the request's `TreeAttention`; None for a chain.
    """

    proposal: Proposal
    ids: mx.array
    position: int
    caches: Sequence[Any]
    rollbacks: Sequence[Any]
    entries: Sequence[Entry]
    tree: Tree | None
    reader: Any


class PerRequest:
    """One value per request, in their order."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self.parts = tuple(parts)


class BatchRows:
    """The R rows of a forward, one request's after another's.

    Attributes:
        requests: the requests' parts.
        widths: the number of rows of each.
    """

    def __init__(self, requests: Sequence[RequestRows]) -> None:
        self.requests = requests
        self.widths = [len(request.proposal) for request in requests]
        self._cuts = list(accumulate(self.widths))[:-1]
        self._windows: dict[int, mx.array] = {}

    def __len__(self) -> int:
        return sum(self.widths)

    @property
    def tokens(self) -> mx.array:
        """The rows' token ids [R]."""
        return mx.concatenate([request.ids.astype(mx.int32) for request in self.requests])

    @cached_property
    def positions(self) -> mx.array:
        """Each row's position in its request's text, by depth in a tree: [R] int32."""
        pairs = ((request.position, request.proposal.depths) for request in self.requests)
        return mx.array([start + depth for start, depths in pairs for depth in depths], mx.int32)

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
        return list(mx.split(x, self._cuts, axis=axis))

    @contextmanager
    def reading_trees(self) -> Iterator[None]:
        """Have the requests' caches read their trees in the forward inside."""
        with ExitStack() as stack:
            for request in self.requests:
                if request.tree is not None:
                    stack.enter_context(request.reader.reading(request.tree))
            yield


class BatchedCache:
    """The caches of all requests in place of one layer's cache."""

    def __init__(self, rows: BatchRows, parts: Iterable[Any]) -> None:
        self.rows, self.parts = rows, tuple(parts)

    def make_mask(self, N: int, **settings: Any) -> PerRequest:
        """The masks that the caches make for their own rows; N is R."""
        pairs = zip(self.parts, self.rows.widths, strict=True)
        return PerRequest(mask_of(cache, rows, **settings) for cache, rows in pairs)

    def __getitem__(self, index: int) -> Any:
        """The caches at an index of a layer with several; `keys` where arrays are there."""
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


class BatchedKVCache(BatchedCache):
    """Of an attention layer that computes all rows together, up to the attention itself."""

    @property
    def offset(self) -> mx.array:
        """The rows' positions, which only the `rope` that `batched` installs can use."""
        return self.rows.positions.reshape(-1, *[1] * (AXES - 1))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PerRequest, PerRequest]:
        """Give each cache its request's rows of keys and values [1, H, R, D]."""
        new = zip(self.parts, self.rows.split(keys, 2), self.rows.split(values, 2), strict=True)
        held = [cache.update_and_fetch(*rows) for cache, *rows in new]
        return PerRequest(keys for keys, _ in held), PerRequest(values for _, values in held)


def pick(value: Any, index: int) -> Any:
    """An argument's value for one request. Raises `TypeError` for an array of all requests."""
    if isinstance(value, PerRequest | BatchedCache):
        return value.parts[index]
    if isinstance(value, mx.array):
        raise TypeError("One request's value is expected, not an array of all requests.")
    return value


def join(outputs: Sequence[Any]) -> Any:
    """The outputs [1, n, D] of the requests side by side; further results as `PerRequest`."""
    if not isinstance(outputs[0], tuple):
        return mx.concatenate(list(outputs), axis=1)
    rows, *others = zip(*outputs, strict=True)
    return (mx.concatenate(list(rows), axis=1), *map(PerRequest, others))
