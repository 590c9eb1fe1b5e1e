"""Gated DeltaNet layers in a verify: chains, trees and many requests, and their rollback.

A layer's cache holds the last inputs of a short convolution and one state matrix per head,
which every row overwrites. Keeping a state per row would be expensive. A verify records the inputs
of the recurrence instead, a few kilobytes a row, and the commit replays the recurrence over the
kept rows from the old state. It runs no projection, and its cost does not depend on the context.

In a chain the recurrence steps from row to row, as mlx-lm's own code does, bit for bit. In a tree
every node steps from its parent's state, all nodes of a depth at once; the convolution looks along
ancestors. Of many requests, chains of one length step together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from ..kernels.shapes import DeltaShape, dtype_of
from .internals import (
    ArraysCache,
    GatedDeltaNet,
    Qwen3NextGatedDeltaNet,
    compute_g,
    gated_delta_update,
    mixer_of,
    normalize_qk,
    sharding_group,
)
from .overrides import Overrides
from .tree import Tree

if TYPE_CHECKING:
    from ..kernels.modules import Kernels
    from .batched_rows import BatchedCache


class RecurrentRollback:
    """The recorded inputs of one Gated DeltaNet layer's recurrence, for one request.

    Args:
        cache: the layer's cache: convolution inputs [1, kernel - 1, C] and, in f32, the state
            [1, Hv, Dv, Dk].
        mixer: its `GatedDeltaNet` (Qwen3.5, 3.6) or `Qwen3NextGatedDeltaNet`.
        overrides: the verify's overrides, which the layer is added to.

    Attributes:
        kernels: the kernels that the recurrence runs on; None for mlx-lm's own.
    """

    def __init__(self, cache: ArraysCache, mixer: nn.Module, overrides: Overrides) -> None:
        self._cache, self._mixer = cache, mixer
        self._tree: Tree | None = None
        self._state: mx.array | None = None
        self._inputs: mx.array  # of the convolution, [1, kernel - 1 + S, C]
        self._convolved: mx.array  # its outputs, [1, S, C]
        self._gates: tuple[mx.array, mx.array]  # a and b, each [1, S, Hv]
        self.kernels: Kernels | None = None

        def call(mixer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            """The mixer's forward, x [1, S, D] -> [1, S, D], which records what enters it."""
            mixed, z, b, a = project(mixer, x)
            inputs = mx.concatenate([held_inputs(mixer, cache, x.dtype), mixed], axis=1)
            convolved = self._convolve(inputs)
            self.record(inputs, convolved, a, b)
            rows = (*split_heads(mixer, convolved), a, b)
            return output(mixer, recur(mixer, rows, cache, self._tree, self.kernels), z)

        overrides.replace(mixer, call)

    def begin(self, tree: Tree | None) -> None:
        """Hold on to the state that the next verify replaces."""
        self._tree, self._state = tree, self._cache[1]

    def record(self, inputs: mx.array, convolved: mx.array, a: mx.array, b: mx.array) -> None:
        """Record a forward's inputs, and move the cache's convolution inputs behind a chain.

        Args:
            inputs: the convolution's inputs [1, kernel - 1 + S, C].
            convolved: its outputs [1, S, C].
            a, b: the projections for decay and beta, [1, S, Hv].
        """
        self._inputs, self._convolved, self._gates = inputs, convolved, (a, b)
        if self._tree is None:
            self._cache[0] = mx.contiguous(inputs[:, 1 - self._mixer.conv_kernel_size :])

    def commit(self, kept: int, rejected: int) -> None:
        """Set the cache to its value after the first `kept` rows of the verify."""
        if not rejected:
            return
        mixer = self._mixer
        self._cache[0] = self._inputs[:, kept : kept + mixer.conv_kernel_size - 1]
        _, keys, values = split_heads(mixer, self._convolved[:, :kept])
        a, b = (gate[:, :kept] for gate in self._gates)
        self._cache[1] = self._replay(keys, values, a, b)

    def move(self, kept: Sequence[int]) -> None:
        """Put the recorded rows of a tree's path in front, as those of a chain."""
        path, past = mx.array(list(kept)), self._mixer.conv_kernel_size - 1
        new = self._inputs[:, past:][:, path]
        self._inputs = mx.concatenate([self._inputs[:, :past], new], axis=1)
        self._convolved = self._convolved[:, path]
        a, b = self._gates
        self._gates = a[:, path], b[:, path]

    def _convolve(self, inputs: mx.array) -> mx.array:
        """The convolution's outputs [1, S, C]; a tree's look along each row's ancestors."""
        if self._tree is None:
            return self._mixer.conv1d(inputs)
        past = self._mixer.conv_kernel_size - 1
        return convolve_windows(self._mixer, inputs, self._tree.windows(past + 1, past))

    def _replay(self, keys: mx.array, values: mx.array, a: mx.array, b: mx.array) -> mx.array:
        """The state after the rows of keys [1, n, Hk, Dk], values [1, n, Hv, Dv], gates [1, n, Hv].

        Bit for bit what mlx-lm computes for these rows.
        """
        mixer = self._mixer
        if self.kernels is not None:
            state = first_state(values, keys) if self._state is None else self._state
            rows = mx.arange(keys.shape[1])
            gates = delta_gates(mixer, a, b)
            return self.kernels.delta_replay(keys, values, *gates, state, rows, rows.size)
        if self._state is not None and mx.default_device() == mx.Device(mx.cpu):
            return _replay_steps(self._state, keys, values, *delta_gates(mixer, a, b))
        # One Metal kernel; the keys stand in for the queries, which shape the output alone.
        inputs = keys, keys, values, a, b, mixer.A_log, mixer.dt_bias
        return gated_delta_update(*inputs, self._state)[1]


def batched_recurrence(index: int) -> Callable[..., mx.array]:
    """The call of a layer's Gated DeltaNet over many requests: x [1, R, D] -> [1, R, D]."""

    def call(mixer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """The mixer's forward over all requests' rows, recorded for each request."""
        caches: BatchedCache = cache
        batch = caches.rows
        mixed, z, b, a = project(mixer, x)
        inputs = [
            mx.concatenate([held_inputs(mixer, one, x.dtype), part], axis=1)
            for one, part in zip(caches.parts, batch.split(mixed), strict=True)
        ]
        windows = batch.windows(mixer.conv_kernel_size)
        convolved = convolve_windows(mixer, mx.concatenate(inputs, axis=1), windows)
        recorded = zip(inputs, *map(batch.split, (convolved, a, b)), strict=True)
        rollbacks: list[Any] = [request.rollbacks[index] for request in batch.requests]
        for rollback, entered in zip(rollbacks, recorded, strict=True):
            rollback.record(*entered)
        rows = *split_heads(mixer, convolved), a, b
        out = _recur_batched(mixer, rows, caches, rollbacks[0].kernels)
        return output(mixer, out, z)

    return call


def _recur_batched(
    mixer: Any, rows: Sequence[mx.array], caches: BatchedCache, kernels: Kernels | None
) -> mx.array:
    """The recurrence's output [1, R, Hv, Dv] of all requests' q, k, v, a, b, each [1, R, ...]."""
    batch = caches.rows
    parts = list(zip(*map(batch.split, rows), strict=True))
    outputs: list[Any] = [None] * len(parts)
    chains: dict[int, list[int]] = {}  # requests by their number of rows
    for at, request in enumerate(batch.requests):
        if kernels is None and request.tree is None:
            chains.setdefault(batch.widths[at], []).append(at)
        else:
            outputs[at] = recur(mixer, parts[at], caches.parts[at], request.tree, kernels)
    for together in chains.values():
        of_all = zip(*(parts[at] for at in together), strict=True)
        q, k, v, a, b = (mx.concatenate(list(each)) for each in of_all)
        held = [caches.parts[at][1] for at in together]
        state = mx.concatenate([first_state(v, k) if one is None else one for one in held])
        out, state = gated_delta_update(q, k, v, a, b, mixer.A_log, mixer.dt_bias, state)
        for place, at in enumerate(together):
            outputs[at] = out[place : place + 1]
            # Its own array: a slice would keep every request's state alive.
            caches.parts[at][1] = mx.contiguous(state[place : place + 1])
    return mx.concatenate(outputs, axis=1)


def recur(
    mixer: Any, rows: Sequence[mx.array], cache: Any, tree: Tree | None, kernels: Kernels | None
) -> mx.array:
    """The recurrence's output [1, N, Hv, Dv] of one request's q, k, v, a, b, each [1, N, ...].

    A chain's state goes into the cache; a tree leaves the cache as it was.
    """
    q, k, v, a, b = rows
    state = cache[1]
    if kernels is not None:
        state = first_state(v, k) if state is None else state
        parents = None if tree is None else tree.parents
        out, state = kernels.delta(q, k, v, *delta_gates(mixer, a, b), state, parents)
    elif tree is not None:
        return _recur_tree(mixer, rows, state, tree)
    else:
        out, state = gated_delta_update(q, k, v, a, b, mixer.A_log, mixer.dt_bias, state)
    if tree is None:
        cache[1] = state
    return out


def _recur_tree(
    mixer: Any, rows: Sequence[mx.array], state: mx.array | None, tree: Tree
) -> mx.array:
    """The output [1, N, Hv, Dv] of a tree's rows, depth by depth."""
    rows = [part.swapaxes(0, 1) for part in rows]
    outputs, above = [], {-1: 0}  # a row's place among those of its depth
    for level in tree.levels:
        nodes = mx.array(level)
        if state is not None:
            state = state[mx.array([above[tree.parents[row]] for row in level])]
        step = (part[nodes] for part in rows)
        out, state = gated_delta_update(*step, mixer.A_log, mixer.dt_bias, state)
        outputs.append(out)
        above = {row: place for place, row in enumerate(level)}
    order = mx.argsort(mx.array([row for level in tree.levels for row in level]))
    return mx.concatenate(outputs)[order].swapaxes(0, 1)


@mx.compile
def _replay_steps(
    state: mx.array, keys: mx.array, values: mx.array, decay: mx.array, beta: mx.array
) -> mx.array:
    """The delta rule without its output, compiled, one step per row: half of mlx-lm's own time.

    In each row the state [1, Hv, Dv, Dk] decays. The part of the value [Dv] that it does not
    return for the key [Dk] yet is added to it, weighted by beta.
    """
    rows = keys.shape[1]
    keys = mx.repeat(keys, values.shape[2] // keys.shape[2], axis=2)[..., None, :]
    steps = [keys, values[..., None], decay[..., None, None], beta[..., None, None]]
    for key, value, kept, weight in zip(*(mx.split(x, rows, axis=1) for x in steps), strict=True):
        state = state * kept[:, 0]
        recalled = (state * key[:, 0]).sum(axis=-1, keepdims=True)
        state = state + key[:, 0] * ((value[:, 0] - recalled) * weight[:, 0])
    return state


# The parts of mlx-lm's layer, in its order of operations


def project(mixer: Any, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Queries, keys and values side by side [1, N, C]; z [1, N, Hv, Dv]; b and a [1, N, Hv]."""
    if isinstance(mixer, Qwen3NextGatedDeltaNet):
        q, k, v, z, b, a = mixer.fix_query_key_value_ordering(
            mixer.in_proj_qkvz(x), mixer.in_proj_ba(x)
        )
        return mx.concatenate([q.flatten(2), k.flatten(2), v.flatten(2)], axis=-1), z, b, a
    z = mixer.in_proj_z(x).reshape(*x.shape[:2], mixer.num_v_heads, mixer.head_v_dim)
    return mixer.in_proj_qkv(x), z, mixer.in_proj_b(x), mixer.in_proj_a(x)


def held_inputs(mixer: Any, cache: Any, dtype: mx.Dtype) -> mx.array:
    """The convolution's inputs [1, kernel - 1, C] before the next row."""
    if cache[0] is not None:
        return cache[0]
    return mx.zeros((1, mixer.conv_kernel_size - 1, mixer.conv_dim), dtype)


def convolve_windows(mixer: Any, inputs: mx.array, windows: mx.array) -> mx.array:
    """The convolution's outputs [1, N, C]; `windows` [N, kernel] index each row's inputs."""
    return mixer.conv1d(inputs[0][windows]).swapaxes(0, 1)


def split_heads(mixer: Any, convolved: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Queries and keys [1, N, Hk, Dk] and values [1, N, Hv, Dv] of the convolution's outputs."""
    split = mx.split(nn.silu(convolved), [mixer.key_dim, 2 * mixer.key_dim], axis=-1)
    sizes = mixer.head_k_dim, mixer.head_k_dim, mixer.head_v_dim
    q, k, v = (
        part.reshape(*part.shape[:2], -1, size) for part, size in zip(split, sizes, strict=True)
    )
    return (*normalize_qk(q, k, inv_scale=mixer.head_k_dim**-0.5, eps=1e-6), v)


def delta_gates(mixer: Any, a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
    """Decay and beta [1, N, Hv] of the projections a and b."""
    return compute_g(mixer.A_log, a, mixer.dt_bias), mx.sigmoid(b)


def first_state(values: mx.array, keys: mx.array) -> mx.array:
    """The state [1, Hv, Dv, Dk] before the first row of values [.., Hv, Dv], keys [.., Hk, Dk]."""
    return mx.zeros((1, *values.shape[-2:], keys.shape[-1]))


def output(mixer: Any, out: mx.array, z: mx.array) -> mx.array:
    """The layer's output [1, N, D] of the heads' [1, N, Hv, Dv], summed over sharded heads."""
    result: mx.array = mixer.out_proj(mixer.norm(out, z).flatten(2))
    group = sharding_group(mixer)
    return result if group is None else mx.distributed.all_sum(result, group=group)


def is_gated_delta(layer: nn.Module) -> bool:
    """Whether `RecurrentRollback` knows a decoder layer's recurrence."""
    return type(mixer_of(layer)) in (GatedDeltaNet, Qwen3NextGatedDeltaNet)


def delta_shape(layer: nn.Module) -> DeltaShape | None:
    """The shape of a layer's recurrence; None for a layer without one."""
    if not is_gated_delta(layer):
        return None
    mixer = mixer_of(layer)
    heads = mixer.num_k_heads, mixer.num_v_heads
    return DeltaShape(*heads, mixer.head_k_dim, mixer.head_v_dim, dtype_of(mixer.out_proj))
