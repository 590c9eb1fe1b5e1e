"""Recurrent layers in a verify: chains, trees and many requests, and their rollback.

A layer's cache holds the last inputs of a short convolution and, in most families, one state per
head, which every row overwrites. Keeping a state per row would be expensive. A verify records the
inputs of the recurrence instead, a few kilobytes a row, and the commit replays the recurrence over
the kept rows from the old state. It runs no projection, and its cost does not depend on the
context.

In a chain the recurrence steps from row to row, as mlx-lm's own code does, bit for bit. In a tree
every node steps from its parent's state, all nodes of a depth at once; the convolution looks along
ancestors. Of many requests, chains of one length step together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .internals import ArraysCache
from .overrides import Overrides
from .recurrences import Recurrence
from .tree import Tree

if TYPE_CHECKING:
    from .batched_rows import BatchedCache

Rows = tuple[mx.array, ...]  # the convolution's outputs [1, N, C], then the gates [1, N, ...]


class RecurrentRollback:
    """The recorded inputs of one layer's recurrence, for one request.

    Args:
        cache: the layer's cache: convolution inputs [1, window - 1, C], then the state if any.
        recurrence: the layer's.
        overrides: the verify's overrides, which the layer is added to.

    Attributes:
        recurrence: as given.
    """

    def __init__(self, cache: ArraysCache, recurrence: Recurrence, overrides: Overrides) -> None:
        self._cache, self.recurrence = cache, recurrence
        self._tree: Tree | None = None
        self._state: mx.array | None = None
        self._inputs: mx.array  # of the convolution, [1, window - 1 + S, C]
        self._rows: Rows

        def call(mixer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            """The mixer's forward, x [1, S, D] -> [1, S, D], which records what enters it."""
            projected = recurrence.project(x)
            held = held_inputs(recurrence, cache, x.dtype)
            inputs = mx.concatenate([held, projected.inputs], axis=1)
            rows = self._convolve(inputs), *projected.gates
            self.record(inputs, rows)
            out = recur(recurrence, rows, cache, self._tree)
            return recurrence.output(out, projected.beside)

        overrides.replace(recurrence.mixer, call)

    def begin(self, tree: Tree | None) -> None:
        """Hold on to the state that the next verify replaces."""
        self._tree = tree
        self._state = self._cache[1] if self.recurrence.has_state else None

    def record(self, inputs: mx.array, rows: Rows) -> None:
        """Record a forward's inputs, and move the cache's convolution inputs behind a chain.

        Args:
            inputs: the convolution's inputs [1, window - 1 + S, C].
            rows: its outputs [1, S, C] and the gates [1, S, ...].
        """
        self._inputs, self._rows = inputs, rows
        if self._tree is None:
            self._cache[0] = mx.contiguous(inputs[:, 1 - self.recurrence.window :])

    def commit(self, kept: int, rejected: int) -> None:
        """Set the cache to its value after the first `kept` rows of the verify."""
        if not rejected:
            return
        self._cache[0] = self._inputs[:, kept : kept + self.recurrence.window - 1]
        if self.recurrence.has_state:
            convolved, *gates = (rows[:, :kept] for rows in self._rows)
            self._cache[1] = self.recurrence.replay(convolved, gates, self._state)

    def move(self, kept: Sequence[int]) -> None:
        """Put the recorded rows of a tree's path in front, as those of a chain."""
        path, past = mx.array(list(kept)), self.recurrence.window - 1
        new = self._inputs[:, past:][:, path]
        self._inputs = mx.concatenate([self._inputs[:, :past], new], axis=1)
        self._rows = tuple(rows[:, path] for rows in self._rows)

    def _convolve(self, inputs: mx.array) -> mx.array:
        """The convolution's outputs [1, S, C]; a tree's look along each row's ancestors."""
        if self._tree is None:
            return self.recurrence.convolve(inputs)
        past = self.recurrence.window - 1
        return convolve_windows(self.recurrence, inputs, self._tree.windows(past + 1, past))


def batched_recurrence(index: int) -> Callable[..., mx.array]:
    """The call of a recurrent layer over many requests: x [1, R, D] -> [1, R, D].

    `index` is the place of its cache.
    """

    def call(mixer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """The mixer's forward over all requests' rows, recorded for each request."""
        caches: BatchedCache = cache
        batch = caches.rows
        rollbacks: list[RecurrentRollback] = [one.rollbacks[index] for one in batch.requests]
        recurrence = rollbacks[0].recurrence
        projected = recurrence.project(x)
        inputs = [
            mx.concatenate([held_inputs(recurrence, one, x.dtype), part], axis=1)
            for one, part in zip(caches.parts, batch.split(projected.inputs), strict=True)
        ]
        windows = batch.windows(recurrence.window)
        convolved = convolve_windows(recurrence, mx.concatenate(inputs, axis=1), windows)
        rows = list(zip(*map(batch.split, (convolved, *projected.gates)), strict=True))
        for rollback, entered, part in zip(rollbacks, inputs, rows, strict=True):
            rollback.record(entered, part)
        out = _recur_batched(recurrence, rows, caches)
        return recurrence.output(out, projected.beside)

    return call


def _recur_batched(recurrence: Recurrence, parts: Sequence[Rows], caches: BatchedCache) -> mx.array:
    """The recurrence's output [1, R, ...] of all requests' rows."""
    batch = caches.rows
    outputs: list[Any] = [None] * len(parts)
    chains: dict[int, list[int]] = {}  # requests by their number of rows
    for at, request in enumerate(batch.requests):
        if recurrence.has_state and recurrence.kernels is None and request.tree is None:
            chains.setdefault(batch.widths[at], []).append(at)
        else:
            outputs[at] = recur(recurrence, parts[at], caches.parts[at], request.tree)
    for together in chains.values():
        of_all = zip(*(parts[at] for at in together), strict=True)
        convolved, *gates = (mx.concatenate(list(each)) for each in of_all)
        held = [caches.parts[at][1] for at in together]
        first = [recurrence.first_state(convolved) if one is None else one for one in held]
        out, states = recurrence.step(convolved, gates, mx.concatenate(first))
        assert states is not None
        for place, at in enumerate(together):
            outputs[at] = out[place : place + 1]
            # Its own array: a slice would keep every request's state alive.
            caches.parts[at][1] = mx.contiguous(states[place : place + 1])
    return mx.concatenate(outputs, axis=1)


def recur(recurrence: Recurrence, rows: Rows, cache: Any, tree: Tree | None) -> mx.array:
    """The recurrence's output [1, N, ...] of one request's rows.

    A chain's state goes into the cache; a tree leaves the cache as it was.
    """
    convolved, *gates = rows
    state = cache[1] if recurrence.has_state else None
    if tree is not None and recurrence.has_state:
        out = recurrence.tree(convolved, gates, state, tree.parents)
        return _recur_tree(recurrence, rows, state, tree) if out is None else out
    out, state = recurrence.step(convolved, gates, state)
    if recurrence.has_state:
        cache[1] = state
    return out


def _recur_tree(recurrence: Recurrence, rows: Rows, state: mx.array | None, tree: Tree) -> mx.array:
    """The output [1, N, ...] of a tree's rows, depth by depth."""
    nodes = [part.swapaxes(0, 1) for part in rows]
    outputs, above = [], {-1: 0}  # a row's place among those of its depth
    for level in tree.levels:
        if state is not None:
            state = state[mx.array([above[tree.parents[row]] for row in level])]
        convolved, *gates = (part[mx.array(level)] for part in nodes)
        out, state = recurrence.step(convolved, gates, state)
        outputs.append(out)
        above = {row: place for place, row in enumerate(level)}
    order = mx.argsort(mx.array([row for level in tree.levels for row in level]))
    return mx.concatenate(outputs)[order].swapaxes(0, 1)


def held_inputs(recurrence: Recurrence, cache: Any, dtype: mx.Dtype) -> mx.array:
    """The convolution's inputs [1, window - 1, C] before the next row."""
    if cache[0] is not None:
        return cache[0]
    return mx.zeros((1, recurrence.window - 1, recurrence.channels), dtype)


def convolve_windows(recurrence: Recurrence, inputs: mx.array, windows: mx.array) -> mx.array:
    """The convolution's outputs [1, N, C]; `windows` [N, window] index each row's inputs."""
    return recurrence.convolve(inputs[0][windows]).swapaxes(0, 1)
