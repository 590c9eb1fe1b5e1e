"""The rows of many requests side by side, and what a model finds where it expects one's cache.

What belongs to each request alone (a mask, keys and values) travels through the model as `Parts`.
They can only be handed on, and positions have more axes than anything that they could be computed
with: a model that does more with them fails while its forward is built, and does not go wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx

from .internals import mask_of
from .segment import Segment

AXES = 9  # of positions, for `by_position`


class Parts:
    """One thing of each request, in their order."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self.parts = tuple(parts)


class Stride(NamedTuple):
    """Steps that some chains take side by side, all as many.

    Attributes:
        requests: theirs, those with most rows first.
        rows: which rows these are, of each request.
        places: the same, [requests, steps].
    """

    requests: list[int]
    rows: list[list[int]]
    places: mx.array


class Rows:
    """The rows of a forward: those of two or more requests, one request after the other.

    Attributes:
        segments: the requests' parts.
        widths: how many rows each has.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.widths = [len(segment.proposal) for segment in segments]
        self._cuts = list(accumulate(self.widths))[:-1]
        self._windows: dict[int, mx.array] = {}

    def __len__(self) -> int:
        return sum(self.widths)

    @property
    def tokens(self) -> mx.array:
        """The rows' token ids [R]."""
        return mx.concatenate([segment.ids.astype(mx.int32) for segment in self.segments])

    @cached_property
    def positions(self) -> mx.array:
        """Where each row stands in its request's text, by depth in a tree: [R] int32."""
        of = ((segment.position, segment.proposal.depths) for segment in self.segments)
        return mx.array([start + depth for start, depths in of for depth in depths], mx.int32)

    def windows(self, size: int) -> mx.array:
        """The last `size` rows of each row's text, itself the last, [R, size] int32.

        Rows are numbered with `size` - 1 older ones of each request before its own.
        """
        if size not in self._windows:  # every layer asks for the same
            found, before = [], 0
            for segment, width in zip(self.segments, self.widths, strict=True):
                if segment.tree is not None:
                    window = segment.tree.windows(size, size - 1)
                else:
                    window = mx.arange(width)[:, None] + mx.arange(size)
                found.append(before + window.astype(mx.int32))
                before += size - 1 + width
            self._windows[size] = mx.concatenate(found)
        return self._windows[size]

    @cached_property
    def strides(self) -> list[Stride]:
        """The chains' rows in the order in which all of them advance at once."""
        chains = [at for at, segment in enumerate(self.segments) if segment.tree is None]
        chains.sort(key=lambda at: -self.widths[at])
        firsts, strides, begin = [0, *self._cuts], [], 0
        while chains:
            end = self.widths[chains[-1]]
            rows = [[firsts[at] + row for row in range(begin, end)] for at in chains]
            strides.append(Stride(list(chains), rows, mx.array(rows)))
            chains, begin = [at for at in chains if self.widths[at] > end], end
        return strides

    @cached_property
    def strided(self) -> mx.array:
        """[R], where each row is if those of `strides` come first, and the trees' rows follow."""
        order = [row for stride in self.strides for chain in stride.rows for row in chain]
        rest = sorted(set(range(len(self))).difference(order))
        places = {row: place for place, row in enumerate([*order, *rest])}
        return mx.array([places[row] for row in range(len(self))])

    def split(self, x: mx.array, axis: int = 1) -> list[mx.array]:
        """Each request's part of x, whose axis has R rows."""
        if x.shape[axis] != len(self):
            raise ValueError(f"{x.shape} does not have {len(self)} rows on axis {axis}.")
        return list(mx.split(x, self._cuts, axis=axis))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Have the caches read the trees among the proposals in the forward run inside."""
        with ExitStack() as stack:
            for segment in self.segments:
                if segment.reader is not None:
                    stack.enter_context(segment.reader.reading(segment.proposal))
            yield


class Caches:
    """In place of a layer's cache: those of all requests, to be used one by one."""

    def __init__(self, rows: Rows, parts: Iterable[Any]) -> None:
        self.rows, self.parts = rows, tuple(parts)

    def make_mask(self, N: int, **settings: Any) -> Parts:
        """The masks that the caches make for their own rows; N is R."""
        pairs = zip(self.parts, self.rows.widths, strict=True)
        return Parts(mask_of(cache, rows, **settings) for cache, rows in pairs)

    def __getitem__(self, index: int) -> Any:
        """Of layers that have a list of caches, those at a place in it; of arrays, `keys`."""
        parts = [cache[index] for cache in self.parts]
        return self.keys if isinstance(parts[0], mx.array) else type(self)(self.rows, parts)

    # In a pipeline, mlx-lm's models have their last cache wait for what they send, as a prefill
    # computes only caches. A forward of many requests computes logits, and those wait for it, too.

    @property
    def keys(self) -> mx.array:
        """Nothing to compute with."""
        return mx.zeros((0,) * AXES)

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        pass

    def __setitem__(self, index: int, array: mx.array) -> None:
        pass


class FlatCaches(Caches):
    """Of a layer that takes all rows together, but for what they attend to."""

    @property
    def offset(self) -> mx.array:
        """The rows' positions, for a rotation with `by_position` and nothing else."""
        return self.rows.positions.reshape(-1, *[1] * (AXES - 1))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        """Each cache takes its request's rows of keys and values [1, H, R, D]; what it holds."""
        new = zip(self.parts, self.rows.split(keys, 2), self.rows.split(values, 2), strict=True)
        held = [cache.update_and_fetch(*rows) for cache, *rows in new]
        return Parts(keys for keys, _ in held), Parts(values for _, values in held)


def pick(value: Any, index: int) -> Any:
    """What an argument is for one request. Raises `TypeError` for an array, of whomever it is."""
    if isinstance(value, Parts | Caches):
        return value.parts[index]
    if isinstance(value, mx.array):
        raise TypeError("An array that is not split goes where one request's is expected.")
    return value


def joined(outputs: Sequence[Any]) -> Any:
    """The outputs [1, n, D] of each request side by side; what else comes with them in `Parts`."""
    if not isinstance(outputs[0], tuple):
        return mx.concatenate(list(outputs), axis=1)
    rows, *others = zip(*outputs, strict=True)
    return (mx.concatenate(list(rows), axis=1), *map(Parts, others))
