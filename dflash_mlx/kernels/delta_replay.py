"""The gated delta rule over a draft: the verify of its rows, and the replay of the kept ones.

A recurrent layer's state is megabytes, its inputs are kilobytes a row. So a verify writes no state
per row; the commit runs the recurrence again over the kept rows. In a tree every node steps from
its parent's state. `metal/delta_replay.metal` explains why a row's bits depend on its path only.

The rule is that of Gated DeltaNet (arXiv 2412.06464), as in mlx-lm's `gated_delta_update`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ..errors import KernelError
from .selfcheck import KernelCheck, Noise, Proofs
from .source import KernelFactory, dtype_name, in_device_memory, metal_source
from .weights import FLOATS

MOST_NODES = 64
_ROWS = 4  # state rows of a SIMD-group
_SIMDGROUPS = 4  # of a threadgroup for a chain; one for a tree, whose waiting states take memory

_TAPE = ["keys", "values", "decay", "beta", "state"]
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
_REPLAY = _INPUTS + "dflash::replay(in, state, kept, count, next, head, d, part);\n"


class DeltaVerify:
    """The kernel of the verify.

    Args:
        metal_kernel: the factory of its kernels.
        proofs: the launches that are known to be right here.
    """

    def __init__(
        self,
        metal_kernel: KernelFactory = mx.fast.metal_kernel,
        proofs: Proofs | None = None,
    ) -> None:
        self._proofs, self._known = proofs or Proofs(), set[Any]()
        header = metal_source("delta_replay.metal")
        self._chain = metal_kernel(
            name="delta_verify_chain",
            input_names=[*_TAPE, "queries", "rows"],
            output_names=["out", "next"],
            source=_CHAIN,
            header=header,
        )
        self._tree = metal_kernel(
            name="delta_verify_tree",
            input_names=[*_TAPE, "queries", "visits", "nodes"],
            output_names=["out"],
            source=_TREE,
            header=header,
        )

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        decay: mx.array,
        beta: mx.array,
        state: mx.array,
        parents: Sequence[int] | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """The outputs of a draft's rows, and the state after a chain.

        Args:
            queries, keys: [1, N, Hk, Dk], normalized, N <= 64; Dk <= 256.
            values: [1, N, Hv, Dv] of the same dtype; Hv is a multiple of Hk.
            decay: [1, N, Hv] float32, what a state keeps of itself.
            beta: [1, N, Hv], how much of what is missing is added.
            state: [1, Hv, Dv, Dk] float32, before the first row.
            parents: [N] each node's row, -1 for the root, parents first; None for a chain.

        Returns:
            The outputs [1, N, Hv, Dv] in the values' dtype, and the state [1, Hv, Dv, Dk] after the
            last row of a chain; a tree has none.

        Raises:
            KernelError: shapes or dtypes that do not fit, or that the kernel does not take.
        """
        check(keys, values, decay, beta, state)
        check_verify(queries, keys, parents)
        form = parents is None, keys.shape, values.shape, keys.dtype, beta.dtype
        if form not in self._known:
            nodes = range(keys.shape[1])
            tree = None if parents is None else [(n - 1) // 2 if n else -1 for n in nodes]
            rules = (
                partial(self._verify, parents=tree),
                partial(delta_verify_reference, parents=tree),
            )
            what = "a chain of" if tree is None else "a tree of"
            self._proofs.require(_check(what, *rules, keys, values, beta, with_queries=True))
            self._known.add(form)
        return self._verify(queries, keys, values, decay, beta, state, parents=parents)

    def _verify(
        self, queries: mx.array, *given: mx.array, parents: Sequence[int] | None
    ) -> tuple[mx.array, mx.array | None]:
        keys, values, *_, state = given
        tape, launch = _launch(*given)
        tape.append(in_device_memory(queries))
        nodes = mx.array(keys.shape[1], mx.int32)
        if parents is None:
            out, following = self._chain(
                inputs=[*tape, nodes],
                output_shapes=[values.shape, state.shape],
                output_dtypes=[values.dtype, mx.float32],
                **launch,
            )
            return out, following
        order = visits(parents)
        slots = max(1, 1 + max(own for _, _, own in order))
        launch["template"].append(("SLOTS", slots))
        launch["threadgroup"] = (32, 1, 1)
        (out,) = self._tree(
            inputs=[*tape, in_device_memory(mx.array(order, mx.int32)), nodes],
            output_shapes=[values.shape],
            output_dtypes=[values.dtype],
            **launch,
        )
        return out, None


class DeltaReplay:
    """The kernel of the replay.

    Args:
        metal_kernel: the factory of its kernel.
        proofs: as of `DeltaVerify`.
    """

    def __init__(
        self,
        metal_kernel: KernelFactory = mx.fast.metal_kernel,
        proofs: Proofs | None = None,
    ) -> None:
        self._proofs, self._known = proofs or Proofs(), set[Any]()
        self._replay = metal_kernel(
            name="delta_replay",
            input_names=[*_TAPE, "kept", "count"],
            output_names=["next"],
            source=_REPLAY,
            header=metal_source("delta_replay.metal"),
        )

    def __call__(
        self,
        keys: mx.array,
        values: mx.array,
        decay: mx.array,
        beta: mx.array,
        state: mx.array,
        kept: mx.array,
        count: mx.array | int,
    ) -> mx.array:
        """The state after the rows that were kept.

        Args:
            keys, values, decay, beta, state: as in `DeltaVerify`.
            kept: [n] integers, rows from the root down.
            count: how many of them to apply. It may be an array on the device, like `kept`: nothing
                waits for it.

        Returns:
            [1, Hv, Dv, Dk] float32, the state after the `count` rows.

        Raises:
            KernelError: as `DeltaVerify`.
        """
        check(keys, values, decay, beta, state)
        form = keys.shape, values.shape, keys.dtype, beta.dtype
        if form not in self._known:
            rows = mx.arange(keys.shape[1])
            given: dict[str, Any] = {"kept": rows, "count": rows.size}
            rules = partial(self._next, **given), partial(delta_replay_reference, **given)
            self._proofs.require(_check("the replay of", *rules, keys, values, beta))
            self._known.add(form)
        return self._next(keys, values, decay, beta, state, kept=kept, count=count)

    def _next(self, *given: mx.array, kept: mx.array, count: mx.array | int) -> mx.array:
        tape, launch = _launch(*given)
        state = given[-1]
        kept, count = in_device_memory(kept.astype(mx.int32)), mx.array(count, mx.int32)
        (following,) = self._replay(
            inputs=[*tape, kept, count],
            output_shapes=[state.shape],
            output_dtypes=[mx.float32],
            **launch,
        )
        return following


def delta_verify_reference(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    decay: mx.array,
    beta: mx.array,
    state: mx.array,
    parents: Sequence[int] | None = None,
) -> tuple[mx.array, mx.array | None]:
    """What `DeltaVerify` computes, in plain MLX."""
    check(keys, values, decay, beta, state)
    check_verify(queries, keys, parents)
    repeats = values.shape[2] // keys.shape[2]
    states: list[mx.array] = []
    outputs = []
    for row, parent in enumerate(range(-1, keys.shape[1] - 1) if parents is None else parents):
        before = state if parent < 0 else states[parent]
        states.append(_step(before, keys[:, row], values[:, row], decay[:, row], beta[:, row]))
        query = mx.repeat(queries[:, row].astype(mx.float32), repeats, axis=1)[..., None, :]
        outputs.append((states[-1] * query).sum(axis=-1))
    return mx.stack(outputs, axis=1).astype(values.dtype), states[-1] if parents is None else None


def delta_replay_reference(
    keys: mx.array,
    values: mx.array,
    decay: mx.array,
    beta: mx.array,
    state: mx.array,
    kept: mx.array,
    count: mx.array | int,
) -> mx.array:
    """What `DeltaReplay` computes, in plain MLX."""
    check(keys, values, decay, beta, state)
    for i in range(kept.shape[0]):
        row = (mx.take(x, kept[i : i + 1], axis=1)[:, 0] for x in (keys, values, decay, beta))
        state = mx.where(i < mx.array(count), _step(state, *row), state)
    return state


def _check(
    what: str,
    ours: Callable[..., Any],
    reference: Callable[..., Any],
    keys: mx.array,
    values: mx.array,
    beta: mx.array,
    with_queries: bool = False,
) -> KernelCheck:
    """The check of a rule with random rows of these shapes."""
    noise, gates = Noise(keys.dtype), values.shape[:3]
    (_, rows, key_heads, key_dim), (heads, value_dim) = keys.shape, values.shape[2:]
    directions = [noise(*keys.shape) * key_dim**-0.5 for _ in range(1 + with_queries)]
    decay, strength = noise.gates(*gates), noise.gates(*gates).astype(beta.dtype)
    state = noise(1, heads, value_dim, key_dim).astype(mx.float32)
    given = [*directions, noise(*values.shape), decay, strength, state]
    key = f"the delta rule of {heads}/{key_heads} heads of {value_dim}x{key_dim} in "
    key += f"{dtype_name(keys)} and {dtype_name(beta)}, {what} {rows} rows"
    exact = [x.astype(mx.float32) for x in given]

    def arrays(rule: Callable[..., Any], given: list[mx.array]) -> list[mx.array]:
        result = rule(*given)
        return [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]

    return KernelCheck(
        key, f"{key},", partial(arrays, ours, given), partial(arrays, reference, exact)
    )


def _step(
    state: mx.array, key: mx.array, value: mx.array, decay: mx.array, beta: mx.array
) -> mx.array:
    """The state [1, Hv, Dv, Dk] after key [1, Hk, Dk], value [1, Hv, Dv] and gates [1, Hv]."""
    key = mx.repeat(key.astype(mx.float32), value.shape[1] // key.shape[1], axis=1)[..., None, :]
    state = state * decay[..., None, None]
    missing = (value - (state * key).sum(axis=-1)) * beta[..., None]
    return state + key * missing[..., None]


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
        needs[node] = max([below[-1], below[-2] + 1] if len(below) > 1 else below, default=0)
        if node:
            children[parents[node]].append(node)
    order, waiting = [], [(0, -1, 0)]  # a node, its parent's slot, the first slot that is free
    while waiting:
        node, slot, free = waiting.pop()
        several = len(children[node]) > 1
        order.append([node, slot, free if several else -1])
        for i, child in reversed(list(enumerate(children[node]))):
            # The first follows its parent directly; the last needs nothing kept for another.
            last = i == len(children[node]) - 1
            waiting.append((child, free if i else -1, free if last else free + 1))
    return order


def check(
    keys: mx.array, values: mx.array, decay: mx.array, beta: mx.array, state: mx.array
) -> None:
    """Raise `KernelError` for inputs that break the rules of `DeltaVerify`."""
    fits = keys.ndim == values.ndim == 4 and keys.shape[:2] == values.shape[:2]
    if fits:
        (batch, rows, key_heads, key_dim), (heads, value_dim) = keys.shape, values.shape[2:]
        fits = (
            batch == 1
            and 1 <= rows <= MOST_NODES
            and heads % key_heads == 0
            and key_dim <= 256
            and keys.dtype == values.dtype
            and {keys.dtype, beta.dtype} <= set(FLOATS)
            and decay.shape == beta.shape == (1, rows, heads)
            and state.shape == (1, heads, value_dim, key_dim)
            and decay.dtype == state.dtype == mx.float32
        )
    if not fits:
        shapes = ", ".join(
            f"{name} {x.shape} in {dtype_name(x)}"
            for name, x in zip(_TAPE, (keys, values, decay, beta, state), strict=True)
        )
        raise KernelError(f"The delta rule has no kernel for {shapes}.")


def check_verify(queries: mx.array, keys: mx.array, parents: Sequence[int] | None) -> None:
    """Raise `KernelError` for queries or a tree that do not fit the keys."""
    if queries.shape != keys.shape or queries.dtype != keys.dtype:
        raise KernelError(f"delta rule: queries {queries.shape} and keys {keys.shape} differ.")
    if parents is not None and len(parents) != keys.shape[1]:
        raise KernelError(f"delta rule: {len(parents)} parents for {keys.shape[1]} rows.")


def _launch(
    keys: mx.array, values: mx.array, decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[list[mx.array], dict]:
    """The inputs, and the launch arguments: four state rows per SIMD-group."""
    (key_heads, key_dim), (heads, value_dim) = keys.shape[2:], values.shape[2:]
    tape = [in_device_memory(x) for x in (keys, values, decay, beta, state)]
    template = [("T", keys.dtype), ("B", beta.dtype), ("DK", key_dim)]
    template += [("HK", key_heads), ("HV", heads), ("DV", value_dim)]
    simdgroups = -(-value_dim // _ROWS)
    return tape, {
        "template": template,
        "grid": (32, simdgroups, heads),
        "threadgroup": (32, _SIMDGROUPS, 1),  # MLX ends it where the grid ends
    }
