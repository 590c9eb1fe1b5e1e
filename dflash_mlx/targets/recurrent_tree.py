"""Reading a draft tree through a Gated DeltaNet layer: every node goes on from its parent.

The convolution looks along a node's ancestors, and past the root into the inputs that the cache
holds. The recurrence takes all nodes of a depth in one batch, each from its parent's state, so a
tree costs as many steps as it is deep and holds the states of two depths at a time. The cache is
left as it was: the tape, which gets what entered the recurrence, replays the kept path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from .internals import (
    Qwen3NextGatedDeltaNet,
    compute_g,
    gated_delta_update,
    normalize_qk,
    sharding_group,
)
from .tree import Tree

if TYPE_CHECKING:
    from ..kernels.modules import Kernels


def mix(
    mixer: Any, x: mx.array, cache: Any, tree: Tree, kernels: Kernels | None = None
) -> tuple[mx.array, mx.array, mx.array]:
    """What a Gated DeltaNet makes of a tree's rows.

    Args:
        mixer: the layer's `GatedDeltaNet` or `Qwen3NextGatedDeltaNet`.
        x: the rows [1, N, D].
        cache: convolution inputs [1, kernel - 1, C] and the state before the tree, or None each.
        tree: their shape.
        kernels: what the recurrence runs on; None for mlx-lm's own.

    Returns:
        Its output [1, N, D], and for the tape the convolution's inputs [1, kernel - 1 + N, C] and
        outputs [1, N, C].
    """
    past = mixer.conv_kernel_size - 1
    mixed, z, b, a = project(mixer, x)
    inputs = mx.concatenate([held_inputs(mixer, cache, x.dtype), mixed], axis=1)
    convolved = convolve(mixer, inputs, tree.windows(past + 1, past))
    rows = (*heads(mixer, convolved), a, b)
    out = mixer.norm(recur(mixer, rows, cache[1], tree, kernels), z)
    return leave(mixer, out), inputs, convolved


def held_inputs(mixer: Any, cache: Any, dtype: mx.Dtype) -> mx.array:
    """The convolution's inputs [1, kernel - 1, C] before the next row."""
    if cache[0] is not None:
        return cache[0]
    return mx.zeros((1, mixer.conv_kernel_size - 1, mixer.conv_dim), dtype)


def convolve(mixer: Any, inputs: mx.array, windows: mx.array) -> mx.array:
    """The convolution's outputs [1, N, C]; `windows` [N, kernel] are each row's inputs' places."""
    return mixer.conv1d(inputs[0][windows]).swapaxes(0, 1)


def heads(mixer: Any, convolved: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Queries and keys [1, N, Hk, Dk] and values [1, N, Hv, Dv] of the convolution's outputs."""
    split = mx.split(nn.silu(convolved), [mixer.key_dim, 2 * mixer.key_dim], axis=-1)
    sizes = mixer.head_k_dim, mixer.head_k_dim, mixer.head_v_dim
    q, k, v = (
        part.reshape(*part.shape[:2], -1, size) for part, size in zip(split, sizes, strict=True)
    )
    return (*normalize_qk(q, k, inv_scale=mixer.head_k_dim**-0.5, eps=1e-6), v)


def project(mixer: Any, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Queries, keys and values side by side [1, N, C]; z [1, N, Hv, Dv]; b and a [1, N, Hv]."""
    if isinstance(mixer, Qwen3NextGatedDeltaNet):
        q, k, v, z, b, a = mixer.fix_query_key_value_ordering(
            mixer.in_proj_qkvz(x), mixer.in_proj_ba(x)
        )
        return mx.concatenate([q.flatten(2), k.flatten(2), v.flatten(2)], axis=-1), z, b, a
    z = mixer.in_proj_z(x).reshape(*x.shape[:2], mixer.num_v_heads, mixer.head_v_dim)
    return mixer.in_proj_qkv(x), z, mixer.in_proj_b(x), mixer.in_proj_a(x)


def leave(mixer: Any, normed: mx.array) -> mx.array:
    """A mixer's output [1, N, D] of its heads' [1, N, Hv, Dv], other machines' among them."""
    out: mx.array = mixer.out_proj(normed.flatten(2))
    group = sharding_group(mixer)
    return out if group is None else mx.distributed.all_sum(out, group=group)


def delta_gates(mixer: Any, a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
    """Decay and beta, as our kernels take them, of what a mixer projects for its gates."""
    return compute_g(mixer.A_log, a, mixer.dt_bias), mx.sigmoid(b)


def first_state(values: mx.array, keys: mx.array) -> mx.array:
    """The state [1, Hv, Dv, Dk] before the first row of values [.., Hv, Dv], keys [.., Hk, Dk]."""
    return mx.zeros((1, *values.shape[-2:], keys.shape[-1]))


def recur(
    mixer: Any,
    rows: Sequence[mx.array],
    state: mx.array | None,
    tree: Tree,
    kernels: Kernels | None,
) -> mx.array:
    """The recurrence's output [1, N, Hv, Dv] of a tree's q, k, v, a, b, each [1, N, ...]."""
    if kernels is not None:
        q, k, v, a, b = rows
        state = first_state(v, k) if state is None else state
        return kernels.delta(q, k, v, *delta_gates(mixer, a, b), state, tree.parents)[0]
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
