"""The gated delta rule over a draft.

A recurrent layer's state is megabytes, its inputs are kilobytes a row. So a verification writes no
state per row; the commit runs the recurrence again over the kept rows, a chain. In a tree every
node steps from its parent's state. `metal/delta_rule.metal` explains why a row's bits depend on its
path only.

The rule is that of Gated DeltaNet (arXiv 2412.06464), as in mlx-lm's `gated_delta_update`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..errors import KernelError
from .launcher import Calls, Constant, Kernel, Launch, Launcher, dtype_name, in_device_memory
from .selfcheck import KernelCheck, Noise
from .weights import FLOATS

MOST_NODES = 64
_ROWS = 4  # state rows of a SIMD-group
_SIMDGROUPS = 4  # of a threadgroup for a chain; one for a tree, whose waiting states take memory

_INPUTS = """
  const dflash::DeltaInputs<T, B, DK> in{keys, values, decay, beta, HK, HV, DV};
  const int lane = thread_index_in_simdgroup, part = lane % dflash::kRowLanes;
  const int head = thread_position_in_grid.z;
  const int d = thread_position_in_grid.y * dflash::kRowsOfSimdgroup + lane / dflash::kRowLanes;
  if (d >= DV) return;
"""
_CHAIN = _INPUTS + "dflash::verify_chain(in, queries, state, rows, out, next, head, d, part);\n"
_TREE = f"""
  threadgroup float slots[dflash::kRowsOfSimdgroup * SLOTS * DK];
  {_INPUTS}
  threadgroup float* own = slots + lane / dflash::kRowLanes * SLOTS * DK;
  dflash::verify_tree(in, queries, state, visits, nodes, out, own, head, d, part);
"""


class DeltaInputs(NamedTuple):
    """The inputs of the recurrence for the rows of a draft, and the state before the first row.

    Attributes:
        keys: [1, N, Hk, Dk], normalized, with N <= 64 and Dk <= 256.
        values: [1, N, Hv, Dv] of the same dtype. Hv is a multiple of Hk.
        decay: [1, N, Hv] float32, the factor by which the state decays.
        beta: [1, N, Hv], the learning rate of the delta rule.
        state: [1, Hv, Dv, Dk] float32.
    """

    keys: mx.array
    values: mx.array
    decay: mx.array
    beta: mx.array
    state: mx.array


def _kernel(tree: bool) -> Kernel:
    inputs = [*DeltaInputs._fields, "queries"]
    if tree:
        return Kernel(
            "delta_verify_tree",
            file="delta_rule.metal",
            inputs=[*inputs, "visits", "nodes"],
            outputs=["out"],
            body=_TREE,
        )
    return Kernel(
        "delta_verify_chain",
        file="delta_rule.metal",
        inputs=[*inputs, "rows"],
        outputs=["out", "next"],
        body=_CHAIN,
    )


class DeltaRule(Launcher):
    """The rule over the rows of a draft."""

    def instances(self, dtype: mx.Dtype, stored: mx.Dtype, tensor_units: bool) -> Calls:
        """Calls with keys that lanes do and do not share evenly, and trees of every depth."""
        for dim, rows in ((128, 12), (64, 3), (256, 63), (100, 31), (1, 1)):
            gates = mx.ones((1, rows, 4))
            state = mx.zeros((1, 4, 30, dim))
            keys = mx.ones((1, rows, 2, dim), dtype)
            values = mx.ones((1, rows, 4, 30), dtype)
            inputs = DeltaInputs(
                keys, values=values, decay=gates, beta=gates.astype(stored), state=state
            )
            yield partial(self.verify, keys, inputs)
            yield partial(self.verify, keys, inputs, _binary(rows))

    def verify(
        self, queries: mx.array, inputs: DeltaInputs, parents: Sequence[int] | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """The outputs of a draft's rows, and the state after a chain.

        Args:
            queries: as the keys.
            inputs: the other inputs.
            parents: [N] each node's row, -1 for the root, parents first; None for a chain.

        Returns:
            The outputs [1, N, Hv, Dv] in the values' dtype, and the state [1, Hv, Dv, Dk] after the
            last row of a chain; a tree has none.

        Raises:
            KernelError: shapes or dtypes that do not fit, or that the kernel does not take.
        """
        order = [] if parents is None else visits(parents)
        slots = max((1 + slot for _, _, slot in order), default=0)
        shapes = [(x.shape, x.dtype) for x in (queries, *inputs)]
        key = (len(order), slots, *shapes)
        declared_slots = max(slots, 1) if order else 0  # Metal has no arrays of length 0
        prepare = partial(self._prepare, queries, inputs, parents, declared_slots)
        launch = self._checked(key, prepare, lambda: self._check(inputs, parents))
        arrays = [in_device_memory(array) for array in (*inputs, queries)]
        if order:
            arrays.append(in_device_memory(mx.array(order, mx.int32)))
        arrays.append(mx.array(inputs.keys.shape[1]))
        outputs = launch(arrays)
        return outputs[0], outputs[1] if parents is None else None

    def _prepare(
        self, queries: mx.array, inputs: DeltaInputs, parents: Sequence[int] | None, slots: int
    ) -> Launch:
        """A launch, four state rows per SIMD-group."""
        check(queries, inputs, parents)
        key_heads, key_dim = inputs.keys.shape[2:]
        heads, value_dim = inputs.values.shape[2:]
        constants: dict[str, Constant] = {"T": queries.dtype, "B": inputs.beta.dtype, "DK": key_dim}
        constants |= {"HK": key_heads, "HV": heads, "DV": value_dim}
        outputs = [(inputs.values.shape, queries.dtype)]
        if parents is None:
            outputs.append((inputs.state.shape, mx.float32))
        else:
            constants["SLOTS"] = slots
        grid = (32, -(-value_dim // _ROWS), heads)  # MLX ends a threadgroup where the grid ends
        group = (32, _SIMDGROUPS if parents is None else 1, 1)
        return self._launch(
            _kernel(parents is not None),
            constants=constants,
            grid=grid,
            threadgroup=group,
            outputs=outputs,
        )

    def _check(self, like: DeltaInputs, parents: Sequence[int] | None) -> KernelCheck:
        """The check of a rule with random inputs of these shapes."""
        noise = Noise(like.keys.dtype)
        gates = like.decay.shape
        _, rows, key_heads, key_dim = like.keys.shape
        heads, value_dim = like.values.shape[2:]
        queries, keys = (noise(*like.keys.shape) * key_dim**-0.5 for _ in range(2))
        beta = noise.gates(*gates).astype(like.beta.dtype)
        state = noise(*like.state.shape)
        inputs = DeltaInputs(
            keys,
            values=noise(*like.values.shape),
            decay=noise.gates(*gates),
            beta=beta,
            state=state,
        )
        inputs = inputs._replace(state=state.astype(mx.float32))
        exact = DeltaInputs(*(x.astype(mx.float32) for x in inputs))
        key = f"the delta rule of {heads}/{key_heads} heads of {value_dim}x{key_dim} in "
        key += f"{dtype_name(keys)} and {dtype_name(beta)}, a "
        key += f"{'chain' if parents is None else 'tree'} of {rows} rows"
        tree = None if parents is None else _binary(rows)
        rule = DeltaRule(self._metal_kernel).verify  # which checks nothing

        def arrays(rule: Callable[..., Any], *arguments: Any) -> list[mx.array]:
            return [x for x in rule(*arguments, tree) if x is not None]

        return KernelCheck(
            key,
            partial(arrays, rule, queries, inputs),
            partial(arrays, delta_verify_reference, queries.astype(mx.float32), exact),
        )


def delta_verify_reference(
    queries: mx.array, inputs: DeltaInputs, parents: Sequence[int] | None = None
) -> tuple[mx.array, mx.array | None]:
    """What `DeltaRule.verify` computes, in plain MLX."""
    check(queries, inputs, parents)
    repeats = inputs.values.shape[2] // inputs.keys.shape[2]
    states: list[mx.array] = []
    outputs = []
    chain = range(-1, queries.shape[1] - 1)
    for row, parent in enumerate(chain if parents is None else parents):
        states.append(_step(inputs.state if parent < 0 else states[parent], inputs, row))
        query = mx.repeat(queries[:, row].astype(mx.float32), repeats, axis=1)[..., None, :]
        outputs.append((states[-1] * query).sum(axis=-1))
    y = mx.stack(outputs, axis=1).astype(inputs.values.dtype)
    return y, states[-1] if parents is None else None


def _step(state: mx.array, inputs: DeltaInputs, row: mx.array | int) -> mx.array:
    """The state [1, Hv, Dv, Dk] after a row."""
    key, value, decay, beta = (x[:, row] for x in inputs[:4])
    key = mx.repeat(key.astype(mx.float32), value.shape[1] // key.shape[1], axis=1)[..., None, :]
    state = state * decay[..., None, None]
    missing = (value - (state * key).sum(axis=-1)) * beta[..., None]
    return state + key * missing[..., None]


def _binary(nodes: int) -> list[int]:
    """The parents of a binary tree, row by row."""
    return [(node - 1) // 2 if node else -1 for node in range(nodes)]


def visits(parents: Sequence[int]) -> list[list[int]]:
    """The order in which to visit a tree, and the slots for the states of its branching nodes.

    A parent comes first, then its subtrees, the one that needs most slots last: by then the
    parent's slot is free. A tree that needs k slots has at least 2^(k+1) - 1 nodes (Sethi and
    Ullman's register allocation).

    Args:
        parents: [N] each node's row, -1 for the root, parents first.

    Returns:
        [N, 3]: a node, the slot with its parent's state (-1: its parent is the node before), and
        the slot to leave its own state in (-1: none).
    """
    children: list[list[int]] = [[] for _ in parents]
    needs = [0] * len(parents)
    for node in reversed(range(len(parents))):
        children[node].sort(key=needs.__getitem__)
        below = [needs[child] for child in children[node]]
        if len(below) == 1:
            needs[node] = below[0]
        elif below:  # the parent's slot is taken during all subtrees but the last
            needs[node] = max(below[-1], below[-2] + 1)
        if node:
            children[parents[node]].append(node)
    order = []
    waiting = [(0, -1, 0)]  # nodes to visit: each with its parent's slot and the first free slot
    while waiting:
        node, slot, free = waiting.pop()
        several = len(children[node]) > 1
        order.append([node, slot, free if several else -1])
        for i, child in reversed(list(enumerate(children[node]))):
            # The first follows its parent directly; the last needs nothing kept for another.
            last = i == len(children[node]) - 1
            waiting.append((child, free if i else -1, free if last else free + 1))
    return order


def check(queries: mx.array, inputs: DeltaInputs, parents: Sequence[int] | None = None) -> None:
    """Raise `KernelError` for shapes or dtypes that `DeltaRule.verify` does not take."""
    keys, values, decay, beta, state = inputs
    fits = keys.ndim == values.ndim == 4 and keys.shape[:2] == values.shape[:2]
    if fits:
        batch, rows, key_heads, key_dim = keys.shape
        heads, value_dim = values.shape[2:]
        fits = (
            batch == 1
            and 1 <= rows <= MOST_NODES
            and heads % key_heads == 0
            and key_dim <= 256
            and queries.shape == keys.shape
            and queries.dtype == keys.dtype == values.dtype
            and {keys.dtype, beta.dtype} <= set(FLOATS)
            and decay.shape == beta.shape == (1, rows, heads)
            and state.shape == (1, heads, value_dim, key_dim)
            and decay.dtype == state.dtype == mx.float32
            and (parents is None or len(parents) == rows)
        )
    if not fits:
        shapes = ", ".join(
            f"{name} {x.shape} in {dtype_name(x)}"
            for name, x in zip(("queries", *DeltaInputs._fields), (queries, *inputs), strict=True)
        )
        count = "" if parents is None else f" and {len(parents)} parents"
        raise KernelError(f"The delta rule has no kernel for {shapes}{count}.")
