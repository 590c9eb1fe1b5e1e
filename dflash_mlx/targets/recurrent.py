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
import mlx.nn as nn

from .internals import ArraysCache
from .overrides import Overrides
from .recurrences import Recurrence, recurrence_of
from .tree import Tree

if TYPE_CHECKING:
    from ..kernels.modules import Kernels

Rows = tuple[mx.array, ...]  # the convolution's outputs [1, N, C], then the gates [1, N, ...]


def recurrent_rollback(cache: ArraysCache, layer: nn.Module) -> RecurrentRollback | None:
    """The rollback of a layer's cache; None for an unknown recurrence."""
    return None if recurrence_of(layer) is None else RecurrentRollback(cache)


class RecurrentRollback:
    """The recorded inputs of one layer's recurrence, for one request.

    Args:
        cache: the layer's cache: convolution inputs [1, window - 1, C], then the state if any.

    Attributes:
        cache: as given.
        tree: the tree that the current verify reads; None for a chain.
        rows: what entered the recurrence in the last verify.
    """

    def __init__(self, cache: ArraysCache) -> None:
        self.cache = cache
        self.tree: Tree | None = None
        self.rows: Rows
        self._recurrence: Recurrence
        self._state: mx.array | None = None
        self._inputs: mx.array  # of the convolution, [1, window - 1 + S, C]

    def begin(self, tree: Tree | None) -> None:
        """Prepare for a verify of this tree, or of a chain."""
        self.tree = tree

    def record(self, recurrence: Recurrence, inputs: mx.array, rows: Rows) -> None:
        """Record a forward's inputs, and move the cache's convolution inputs behind a chain.

        Args:
            recurrence: the layer's.
            inputs: the convolution's inputs [1, window - 1 + S, C].
            rows: its outputs [1, S, C] and the gates [1, S, ...].
        """
        self._recurrence, self._inputs, self.rows = recurrence, inputs, rows
        self._state = self.cache[1] if recurrence.has_state else None
        if self.tree is None:
            self.cache[0] = mx.contiguous(inputs[:, 1 - recurrence.window :])

    def commit(self, kept: int, rejected: int) -> None:
        """Set the cache to its value after the first `kept` rows of the verify."""
        recurrence = self._recurrence
        self.cache[0] = self._inputs[:, kept : kept + recurrence.window - 1]
        if recurrence.has_state:
            convolved, *gates = (rows[:, :kept] for rows in self.rows)
            self.cache[1] = recurrence.replay(convolved, gates, self._state)

    def move(self, kept: Sequence[int]) -> None:
        """Put the recorded rows of a tree's path in front, as those of a chain."""
        path, past = mx.array(list(kept)), self._recurrence.window - 1
        new = self._inputs[:, past:][:, path]
        self._inputs = mx.concatenate([self._inputs[:, :past], new], axis=1)
        self.rows = tuple(rows[:, path] for rows in self.rows)

    def recur(self) -> mx.array:
        """The recurrence's output [1, N, ...] of the recorded rows.

        A chain's state goes into the cache; a tree leaves the cache as it was.
        """
        recurrence, (convolved, *gates) = self._recurrence, self.rows
        tree = self.tree if recurrence.has_state else None
        if tree is not None and recurrence.kernels is None:
            return self._recur_by_depth(tree)
        parents = None if tree is None else tree.parents
        out, state = recurrence.step(convolved, gates, self._state, parents)
        if recurrence.has_state and tree is None:
            self.cache[1] = state
        return out

    def _recur_by_depth(self, tree: Tree) -> mx.array:
        """The output [1, N, ...] of a tree's rows; those of a depth step together."""
        state, nodes = self._state, [part.swapaxes(0, 1) for part in self.rows]
        outputs, above = [], {-1: 0}  # a row's place among those of its depth
        for level in tree.levels:
            if state is not None:
                state = state[mx.array([above[tree.parents[row]] for row in level])]
            convolved, *gates = (part[mx.array(level)] for part in nodes)
            out, state = self._recurrence.step(convolved, gates, state)
            outputs.append(out)
            above = {row: place for place, row in enumerate(level)}
        order = mx.argsort(mx.array([row for level in tree.levels for row in level]))
        return mx.concatenate(outputs)[order].swapaxes(0, 1)


def record_recurrence(
    layer: nn.Module,
    overrides: Overrides,
    rollbacks: Callable[[], Sequence[RecurrentRollback]],
    kernels: Kernels | None,
) -> None:
    """Have a recurrent layer read the rows of one request or many, and record them for each.

    Args:
        layer: the decoder layer; one with an unknown recurrence stays as it is.
        overrides: the verify's, which the layer is added to.
        rollbacks: returns those of the requests in the running forward.
        kernels: those that the recurrence runs on; None for mlx-lm's own.
    """
    if (recurrence := recurrence_of(layer)) is None:
        return
    recurrence.kernels = kernels

    def lone(x: mx.array) -> Sequence[mx.array]:
        return [x]

    def call(mixer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """The mixer's forward, x [1, R, D] -> [1, R, D]; `cache` is a `BatchedCache` of many."""
        requests, projected = rollbacks(), recurrence.project(x)
        split: Callable[[mx.array], Sequence[mx.array]] = lone
        windows, tree = None, requests[0].tree
        if len(requests) > 1:
            split, windows = cache.rows.split, cache.rows.windows(recurrence.window)
        elif tree is not None:
            windows = tree.windows(recurrence.window, recurrence.window - 1)
        inputs = [
            mx.concatenate([_held_inputs(recurrence, one.cache, x.dtype), part], axis=1)
            for one, part in zip(requests, split(projected.inputs), strict=True)
        ]
        entered = mx.concatenate(inputs, axis=1)
        if windows is None:
            convolved = recurrence.convolve(entered)
        else:  # the inputs [window, C] of each row
            convolved = recurrence.convolve(entered[0][windows]).swapaxes(0, 1)
        rows = zip(*map(split, (convolved, *projected.gates)), strict=True)
        for one, own, part in zip(requests, inputs, rows, strict=True):
            one.record(recurrence, own, part)
        return recurrence.output(_recur(recurrence, requests), projected.beside)

    overrides.replace(recurrence.mixer, call)


def _recur(recurrence: Recurrence, requests: Sequence[RecurrentRollback]) -> mx.array:
    """The recurrence's output [1, R, ...] of all requests' recorded rows."""
    if len(requests) == 1:
        return requests[0].recur()
    outputs: list[Any] = [None] * len(requests)
    chains: dict[tuple[int, bool], list[int]] = {}  # requests by their rows, and if they are new
    for at, request in enumerate(requests):
        if recurrence.has_state and recurrence.kernels is None and request.tree is None:
            key = request.rows[0].shape[1], request.cache[1] is None
            chains.setdefault(key, []).append(at)
        else:
            outputs[at] = request.recur()
    for (_, new), together in chains.items():
        of_all = zip(*(requests[at].rows for at in together), strict=True)
        convolved, *gates = (mx.concatenate(list(each)) for each in of_all)
        first = None if new else mx.concatenate([requests[at].cache[1] for at in together])
        out, states = recurrence.step(convolved, gates, first)
        assert states is not None
        for place, at in enumerate(together):
            outputs[at] = out[place : place + 1]
            # Its own array: a slice would keep every request's state alive.
            requests[at].cache[1] = mx.contiguous(states[place : place + 1])
    return mx.concatenate(outputs, axis=1)


def _held_inputs(recurrence: Recurrence, cache: Any, dtype: mx.Dtype) -> mx.array:
    """The convolution's inputs [1, window - 1, C] before the next row."""
    if cache[0] is not None:
        return cache[0]
    return mx.zeros((1, recurrence.window - 1, recurrence.channels), dtype)
