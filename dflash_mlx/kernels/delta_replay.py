"""The gated delta rule over a draft: the verify of its rows, and the replay of the kept ones.

A recurrent layer's state is megabytes, its inputs are kilobytes a row. So a verify writes no state
per row; the commit runs the recurrence again over the kept rows. In a tree every node steps from
its parent's state. `metal/delta_replay.metal` explains why a row's bits depend on its path only.

The rule is that of Gated DeltaNet (arXiv 2412.06464), as in mlx-lm's `gated_delta_update`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..errors import KernelError
from .launch import Constant, Kernel, Launcher, dtype_name, in_device_memory
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
_REPLAY = _INPUTS + "dflash::replay(in, state, kept, count, next, head, d, part);\n"


class Tape(NamedTuple):
    """The recurrence's inputs in a draft's rows, and the state before the first.

    Attributes:
        keys: [1, N, Hk, Dk], normalized, N <= 64; Dk <= 256.
        values: [1, N, Hv, Dv] of the same dtype; Hv is a multiple of Hk.
        decay: [1, N, Hv] float32, what a state keeps of itself.
        beta: [1, N, Hv], how much of what is missing is added.
        state: [1, Hv, Dv, Dk] float32.
    """

    keys: mx.array
    values: mx.array
    decay: mx.array
    beta: mx.array
    state: mx.array


def _kernel(name: str, body: str, inputs: list[str], outputs: list[str]) -> Kernel:
    return Kernel(name, "delta_replay.metal", [*Tape._fields, *inputs], outputs, body)


_VERIFY_CHAIN = _kernel("delta_verify_chain", _CHAIN, ["queries", "rows"], ["out", "next"])
_VERIFY_TREE = _kernel("delta_verify_tree", _TREE, ["queries", "visits", "nodes"], ["out"])
_REPLAYS = _kernel("delta_replay", _REPLAY, ["kept", "count"], ["next"])


class DeltaRule(Launcher):
    """The kernels of the verify and of the replay."""

    def verify(
        self, queries: mx.array, tape: Tape, parents: Sequence[int] | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """The outputs of a draft's rows, and the state after a chain.

        Args:
            queries: as the keys.
            tape: the other inputs.
            parents: [N] each node's row, -1 for the root, parents first; None for a chain.

        Returns:
            The outputs [1, N, Hv, Dv] in the values' dtype, and the state [1, Hv, Dv, Dk] after the
            last row of a chain; a tree has none.

        Raises:
            KernelError: shapes or dtypes that do not fit, or that the kernel does not take.
        """
        nodes = range(tape.keys.shape[1])
        tree = None if parents is None else [(n - 1) // 2 if n else -1 for n in nodes]
        self._first_use(
            "a chain of" if parents is None else "a tree of",
            lambda tape, queries: self._verify(queries, tape, tree),
            lambda tape, queries: delta_verify_reference(queries, tape, tree),
            *(tape, queries, parents),
        )
        return self._verify(queries, tape, parents)

    def _verify(
        self, queries: mx.array, tape: Tape, parents: Sequence[int] | None
    ) -> tuple[mx.array, mx.array | None]:
        values, nodes = tape.values, mx.array(tape.keys.shape[1])
        given, out = in_device_memory(queries), (values.shape, values.dtype)
        if parents is None:
            outputs = [out, (tape.state.shape, mx.float32)]
            result, following = self._run(_VERIFY_CHAIN, tape, [given, nodes], outputs)
            return result, following
        order = visits(parents)
        waiting = in_device_memory(mx.array(order, mx.int32))
        slots = max(1, 1 + max(own for _, _, own in order))
        return self._run(_VERIFY_TREE, tape, [given, waiting, nodes], [out], slots)[0], None

    def replay(self, tape: Tape, kept: mx.array, count: mx.array | int) -> mx.array:
        """The state [1, Hv, Dv, Dk] float32 after the rows that were kept.

        Args:
            tape: the recurrence's inputs.
            kept: [n] integers, rows from the root down.
            count: how many of them to apply. It may be an array on the device, like `kept`: nothing
                waits for it.

        Raises:
            KernelError: as `verify`.
        """
        rows = mx.arange(tape.keys.shape[1])
        self._first_use(
            "the replay of",
            lambda tape, _: self._replay(tape, rows, rows.size),
            lambda tape, _: delta_replay_reference(tape, rows, rows.size),
            tape,
        )
        return self._replay(tape, kept, count)

    def _replay(self, tape: Tape, kept: mx.array, count: mx.array | int) -> mx.array:
        given = [in_device_memory(kept.astype(mx.int32)), mx.array(count, mx.int32)]
        return self._run(_REPLAYS, tape, given, [(tape.state.shape, mx.float32)])[0]

    def _run(
        self,
        kernel: Kernel,
        tape: Tape,
        inputs: list[mx.array],
        outputs: Sequence[tuple[Sequence[int], mx.Dtype]],
        slots: int = 0,
    ) -> list[mx.array]:
        """A launch, four state rows per SIMD-group."""
        keys, values, beta = tape.keys, tape.values, tape.beta
        form = kernel.name, slots, keys.shape, keys.dtype, values.shape, beta.dtype
        launch = self._known.get(form)
        if launch is None:
            (key_heads, key_dim), (heads, value_dim) = keys.shape[2:], values.shape[2:]
            constants: dict[str, Constant] = {"T": keys.dtype, "B": beta.dtype, "DK": key_dim}
            constants |= {"HK": key_heads, "HV": heads, "DV": value_dim}
            if slots:
                constants["SLOTS"] = slots
            grid = 32, -(-value_dim // _ROWS), heads  # MLX ends a threadgroup where the grid ends
            group = 32, 1 if slots else _SIMDGROUPS, 1
            launch = self._known[form] = self._launch(kernel, constants, grid, group, outputs)
        return launch([*map(in_device_memory, tape), *inputs])

    def _first_use(
        self,
        what: str,
        ours: Callable[..., Any],
        reference: Callable[..., Any],
        tape: Tape,
        queries: mx.array | None = None,
        parents: Sequence[int] | None = None,
    ) -> None:
        """Refuse what does not fit, and check a rule before its first use with such inputs."""
        given = tape if queries is None else (*tape, queries)
        key = what, None if parents is None else len(parents), *((x.shape, x.dtype) for x in given)
        if key not in self._known:
            check(tape, queries, parents)
            self._checked(key, lambda: True, lambda _: _check(what, ours, reference, tape))


def delta_verify_reference(
    queries: mx.array, tape: Tape, parents: Sequence[int] | None = None
) -> tuple[mx.array, mx.array | None]:
    """What `DeltaRule.verify` computes, in plain MLX."""
    check(tape, queries, parents)
    repeats = tape.values.shape[2] // tape.keys.shape[2]
    states: list[mx.array] = []
    outputs = []
    for row, parent in enumerate(range(-1, queries.shape[1] - 1) if parents is None else parents):
        states.append(_step(tape.state if parent < 0 else states[parent], tape, row))
        query = mx.repeat(queries[:, row].astype(mx.float32), repeats, axis=1)[..., None, :]
        outputs.append((states[-1] * query).sum(axis=-1))
    y = mx.stack(outputs, axis=1).astype(tape.values.dtype)
    return y, states[-1] if parents is None else None


def delta_replay_reference(tape: Tape, kept: mx.array, count: mx.array | int) -> mx.array:
    """What `DeltaRule.replay` computes, in plain MLX."""
    check(tape)
    state = tape.state
    for i in range(kept.shape[0]):
        state = mx.where(i < mx.array(count), _step(state, tape, kept[i]), state)
    return state


def _step(state: mx.array, tape: Tape, row: mx.array | int) -> mx.array:
    """The state [1, Hv, Dv, Dk] after a row."""
    key, value, decay, beta = (x[:, row] for x in tape[:4])
    key = mx.repeat(key.astype(mx.float32), value.shape[1] // key.shape[1], axis=1)[..., None, :]
    state = state * decay[..., None, None]
    missing = (value - (state * key).sum(axis=-1)) * beta[..., None]
    return state + key * missing[..., None]


def _check(
    what: str, ours: Callable[..., Any], reference: Callable[..., Any], like: Tape
) -> KernelCheck:
    """The check of a rule, of a tape and queries, with random ones of these shapes."""
    noise, gates = Noise(like.keys.dtype), like.decay.shape
    (_, rows, key_heads, key_dim), (heads, value_dim) = like.keys.shape, like.values.shape[2:]
    queries, keys = (noise(*like.keys.shape) * key_dim**-0.5 for _ in range(2))
    beta, state = noise.gates(*gates).astype(like.beta.dtype), noise(*like.state.shape)
    tape = Tape(keys, noise(*like.values.shape), noise.gates(*gates), beta, state)
    tape = tape._replace(state=state.astype(mx.float32))
    exact = Tape(*(x.astype(mx.float32) for x in tape))
    key = f"the delta rule of {heads}/{key_heads} heads of {value_dim}x{key_dim} in "
    key += f"{dtype_name(like.keys)} and {dtype_name(beta)}, {what} {rows} rows"

    def arrays(rule: Callable[..., Any], *given: Any) -> list[mx.array]:
        result = rule(*given)
        return [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]

    return KernelCheck(
        key,
        partial(arrays, ours, tape, queries),
        partial(arrays, reference, exact, queries.astype(mx.float32)),
    )


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
    tape: Tape, queries: mx.array | None = None, parents: Sequence[int] | None = None
) -> None:
    """Raise `KernelError` for inputs that break the rules of `Tape` and `DeltaRule.verify`."""
    keys, values, decay, beta, state = tape
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
            for name, x in zip(Tape._fields, tape, strict=True)
        )
        raise KernelError(f"The delta rule has no kernel for {shapes}.")
    if queries is not None and (queries.shape != keys.shape or queries.dtype != keys.dtype):
        raise KernelError(f"delta rule: queries {queries.shape} and keys {keys.shape} differ.")
    if parents is not None and len(parents) != keys.shape[1]:
        raise KernelError(f"delta rule: {len(parents)} parents for {keys.shape[1]} rows.")
