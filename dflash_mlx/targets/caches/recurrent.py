"""The state of a recurrent layer, and how rejected rows leave it.

The cache holds the last inputs of a short convolution and, in most families, one state per head,
which every row overwrites. Keeping a state per row would be expensive. A verification records the
inputs of the recurrence instead, a few kilobytes a row, and the commit replays the recurrence over
the kept rows from the old state. It runs no projection, and its cost does not depend on the
context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..internals import ArraysCache
from ..recurrences import Recurrence
from ..span import Span
from .base import Arrays, Contents

Rows = tuple[mx.array, ...]  # the convolution's outputs [1, N, C], then the gates [1, N, ...]


class RecurrentCache(ArraysCache):
    """A convolution's inputs [1, window - 1, C], then the state if there is one.

    In a chain the recurrence steps from row to row, as mlx-lm's own code does, bit for bit. In a
    tree every node steps from its parent's state, all nodes of a depth at once.

    Attributes:
        cache: these arrays, None at first.
        tree: what the running verification reads; None for a chain.
        recorded: what entered the recurrence in the last verification.
    """

    can_trim = False
    rolls_back = True
    reads_trees = True
    cache: list[Any]
    tree: Span | None = None
    recorded: Rows = ()
    _recurrence: Recurrence
    _inputs: Any = None  # of the convolution, [1, window - 1 + N, C]
    _before: mx.array | None = None  # the state before the verification

    def begin(self, tree: Span) -> None:
        """Prepare for a verification whose rows are a tree."""
        self.tree = tree

    def inputs(self, recurrence: Recurrence, dtype: mx.Dtype) -> mx.array:
        """The convolution's inputs [1, window - 1, C] before the next row."""
        first = self.cache[0]
        if first is not None:
            return first
        return mx.zeros((1, recurrence.window - 1, recurrence.channels), dtype)

    def record(self, recurrence: Recurrence, inputs: mx.array, rows: Rows) -> None:
        """Record a verification's inputs, and move the convolution's inputs behind a chain.

        Args:
            recurrence: the layer's.
            inputs: the convolution's inputs [1, window - 1 + N, C].
            rows: its outputs [1, N, C] and the gates [1, N, ...].
        """
        self._recurrence = recurrence
        self._inputs = inputs
        self.recorded = rows
        self._before = self.cache[1] if recurrence.has_state else None
        if self.tree is None:
            self.cache[0] = mx.contiguous(inputs[:, 1 - recurrence.window :])

    def recur(self) -> mx.array:
        """The recurrence's output [1, N, ...] of the recorded rows.

        A chain's state goes into the cache; a tree leaves the cache as it was.
        """
        recurrence = self._recurrence
        tree = self.tree if recurrence.has_state else None
        if tree is not None and recurrence.kernels is None:
            return self._recur_by_depth(tree)
        convolved, *gates = self.recorded
        parents = None if tree is None else tree.parents
        out, state = recurrence.step(convolved, gates, self._before, parents)
        if recurrence.has_state and tree is None:
            self.cache[1] = state
        return out

    def _recur_by_depth(self, tree: Span) -> mx.array:
        """The output [1, N, ...] of a tree's rows; those of a depth step together."""
        state = self._before
        nodes = [part.swapaxes(0, 1) for part in self.recorded]
        outputs = []
        above = {-1: 0}  # the place of each row among those of the level above; -1 is before row 0
        for level in tree.levels:
            if state is not None:
                state = state[mx.array([above[tree.parents[row]] for row in level])]
            convolved, *gates = (part[mx.array(level)] for part in nodes)
            out, state = self._recurrence.step(convolved, gates, state)
            outputs.append(out)
            above = {row: place for place, row in enumerate(level)}
        by_level = [row for level in tree.levels for row in level]
        places = mx.argsort(mx.array(by_level))  # of each row in the outputs
        return mx.concatenate(outputs)[places].swapaxes(0, 1)

    def commit(self, kept: Sequence[int], rows: int) -> None:
        """Keep these rows: replay the recurrence over them from the state before."""
        recurrence = self._recurrence
        older = recurrence.window - 1
        inputs = self._inputs
        recorded = self.recorded
        if kept[-1] >= len(kept):  # a path of the tree, as a chain
            path = mx.array(list(kept))
            inputs = mx.concatenate([inputs[:, :older], inputs[:, older:][:, path]], axis=1)
            recorded = tuple(part[:, path] for part in recorded)
        self.cache[0] = inputs[:, len(kept) : len(kept) + older]
        if recurrence.has_state:
            convolved, *gates = (part[:, : len(kept)] for part in recorded)
            self.cache[1] = recurrence.replay(convolved, gates, self._before)
        self.tree = None

    def release(self) -> None:
        """Hold nothing of the last verification, which is committed, but the state after it."""
        self.recorded = ()
        self._inputs = None
        self._before = None

    def trim(self, rows: int) -> None:
        """Refuse: a recurrent state cannot be trimmed."""
        raise NotImplementedError

    def checkpoint(self) -> list[mx.array | None]:
        """Hold the state by reference."""
        return list(self.cache)

    def rewind(self, saved: list[mx.array | None], rows: int) -> None:
        """Go back to a checkpoint."""
        self.cache = list(saved)

    def contents(self) -> Contents:
        """What a traced step reads: the convolution's inputs, and the state if there is one."""
        return self.cache

    @property
    def recorded_step(self) -> Contents:
        """What a traced step has made: the contents, and what a commit needs."""
        return list(self.cache), self._inputs, self.recorded

    def take(self, made: Contents, recurrence: Recurrence) -> None:
        """Hold what a traced step has made, the `recorded_step` of a layer's recurrence."""
        self._recurrence = recurrence
        self._before = self.cache[1] if recurrence.has_state else None
        self.cache, self._inputs, self.recorded = made

    def arrays(self) -> list[Any]:
        """List the arrays that the cache consists of."""
        return [self.cache]

    def export_rows(self, start: int, end: int) -> Arrays:
        """Return nothing: it keeps no rows."""
        return {}

    def export_state(self) -> Arrays:
        """Name the arrays of the state."""
        return {str(number): x for number, x in enumerate(self.cache) if x is not None}

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Fill the empty cache with these arrays."""
        for name, x in state.items():
            self.cache[int(name)] = x[...]
