"""The delta rule on the emulated device, compared with the rule written out in numpy."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_check import (
    DTYPES,
    TOLERANCES,
    float64,
    kernel_factory,
    on_gpu_or_emulator,
    path,
    random_parents,
    relative_error,
    same_bits,
    within_rounding,
)
from mlx_lm.models.gated_delta import gated_delta_ops

from dflash_mlx.errors import KernelError
from dflash_mlx.kernels.delta_rule import (
    MOST_NODES,
    DeltaInputs,
    DeltaRule,
    delta_verify_reference,
    visits,
)

pytestmark = on_gpu_or_emulator

# Dtype, rows, (key heads, value heads), (Dk, Dv), and whether the draft is a tree.
CASES = [
    (mx.float32, 1, (1, 1), (32, 8), False),
    (mx.float32, 16, (2, 4), (128, 6), False),
    (mx.float16, 9, (1, 3), (192, 16), False),
    (mx.bfloat16, 16, (2, 2), (64, 8), False),
    (mx.float32, 64, (1, 2), (32, 4), False),
    (mx.float32, 64, (1, 2), (128, 4), True),
    (mx.float16, 21, (2, 6), (48, 5), True),
    (mx.bfloat16, 8, (1, 1), (256, 8), True),
    # Many value heads for a key head; sizes that 32 lanes cannot share evenly.
    (mx.float32, 5, (1, 8), (1, 7), False),
    (mx.float32, 5, (3, 12), (31, 1), True),
    (mx.float32, 3, (1, 2), (33, 17), True),
    (mx.float32, 3, (1, 2), (100, 3), False),
    (mx.float32, 3, (1, 2), (255, 5), True),
]
IDS = [
    f"{str(dtype).removeprefix('mlx.core.')}-{rows}rows-{dims}-tree{tree}"
    for dtype, rows, _, dims, tree in CASES
]


@pytest.fixture(scope="module")
def kernel() -> DeltaRule:
    return DeltaRule(kernel_factory())


def draft(
    dtype: mx.Dtype,
    rows: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    gates: mx.Dtype | None = None,
    decay: tuple[float, float] = (0.0, 1.0),
) -> tuple[mx.array, DeltaInputs]:
    """Random queries, and the rule's other inputs.

    heads: of keys and of values; dims: Dk and Dv; gates: beta's dtype; decay: its range.
    """
    mx.random.seed(rows + dims[0])
    directions = mx.random.normal((2, 1, rows, heads[0], dims[0]))
    queries, keys = (directions / mx.linalg.norm(directions, axis=-1, keepdims=True)).astype(dtype)
    values = mx.random.normal((1, rows, heads[1], dims[1])).astype(dtype)
    decays = mx.random.uniform(*decay, (1, rows, heads[1]))
    beta = mx.random.uniform(shape=(1, rows, heads[1])).astype(gates or dtype)
    return queries, DeltaInputs(
        keys,
        values=values,
        decay=decays,
        beta=beta,
        state=mx.random.normal((1, heads[1], dims[1], dims[0])),
    )


def select_rows(tape: DeltaInputs, rows, state: mx.array | None = None) -> DeltaInputs:
    """Some rows of the inputs: a slice or an array of indices. state: replaces the tape's."""
    arrays = tape[:-1]
    if isinstance(rows, mx.array):
        parts = [mx.take(array, rows, axis=1) for array in arrays]
    else:
        parts = [array[:, rows] for array in arrays]
    return DeltaInputs(*parts, tape.state if state is None else state)


def rule(
    queries: mx.array, tape: DeltaInputs, parents: list[int] | None = None
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Outputs in float64 [1, N, Hv, Dv], the magnitude of the terms summed for them, all states."""
    q, k, v, decay, beta, initial_state = (float64(x)[0] for x in (queries, *tape))
    values_per_key = v.shape[1] // k.shape[1]
    q = np.repeat(q, values_per_key, axis=1)
    k = np.repeat(k, values_per_key, axis=1)
    if parents is None:
        parents = list(range(-1, len(v) - 1))
    states: list[np.ndarray] = []
    for row, parent in enumerate(parents):
        previous = initial_state if parent < 0 else states[parent]
        decayed = previous * decay[row, :, None, None]
        error = v[row] - np.einsum("hvk,hk->hv", decayed, k[row])
        states.append(decayed + np.einsum("hv,hk->hvk", error * beta[row, :, None], k[row]))
    stacked = np.stack(states)
    outputs = np.einsum("nhvk,nhk->nhv", stacked, q)
    magnitude = np.einsum("nhvk,nhk->nhv", np.abs(stacked), np.abs(q))
    return outputs[None], magnitude[None] + 1, states  # + 1: also small states have errors


def is_state(following: mx.array, state: np.ndarray) -> bool:
    """Whether a state [1, Hv, Dv, Dk] is within one rounding of numpy's [Hv, Dv, Dk]."""
    return within_rounding(following, state[None], np.abs(state[None]) + 1)


def check(
    kernel, queries: mx.array, tape: DeltaInputs, parents: list[int] | None = None
) -> mx.array:
    """The kernel's outputs; asserts that they and a chain's state are numpy's, rounded once."""
    y, next_state = kernel.verify(queries, tape, parents)
    truth, magnitude, states = rule(queries, tape, parents)
    assert y.dtype == tape.values.dtype and y.shape == tape.values.shape
    assert within_rounding(y, truth, magnitude), (y.dtype, truth.shape)
    if parents:
        assert next_state is None
    else:
        assert is_state(next_state, states[-1])
    return y


@pytest.mark.parametrize(("dtype", "rows", "heads", "dims", "tree"), CASES, ids=IDS)
def test_kernel_and_reference_are_the_delta_rule(dtype, rows, heads, dims, tree, kernel):
    queries, tape = draft(dtype, rows=rows, heads=heads, dims=dims)
    parents = random_parents(rows) if tree else None
    check(kernel, queries=queries, tape=tape, parents=parents)
    outputs, _, states = rule(queries, tape, parents)
    float32_tape = DeltaInputs(*(array.astype(mx.float32) for array in tape))
    actual, next_state = delta_verify_reference(queries.astype(mx.float32), float32_tape, parents)
    assert relative_error(actual, mx.array(outputs, mx.float32)) < TOLERANCES[mx.float32]
    if tree:
        assert next_state is None
    else:
        assert is_state(next_state, states[-1])


def test_the_reference_gives_the_results_of_mlx_lm():
    queries, tape = draft(mx.float32, rows=5, heads=(2, 4), dims=(32, 8))
    ours = delta_verify_reference(queries, tape)
    theirs = gated_delta_ops(queries, *tape)
    assert all(relative_error(*pair) < 1e-6 for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_whatever_rows_share_the_call(dtype, kernel):
    """The first rows in one call, and each row in a separate call after the state before it."""
    queries, tape = draft(dtype, rows=16, heads=(2, 4), dims=(128, 6))
    outputs, next_state = kernel.verify(queries, tape)
    state = tape.state
    for row in range(16):
        first = slice(0, row + 1)
        y, _ = kernel.verify(queries[:, first], select_rows(tape, first))
        assert same_bits(y, outputs[:, first])
        single = slice(row, row + 1)
        alone, state = kernel.verify(queries[:, single], select_rows(tape, single, state))
        assert same_bits(alone, outputs[:, single])
    assert same_bits(state, next_state)


def test_a_node_of_a_tree_has_the_bits_of_its_path_alone(kernel):
    parents = random_parents(40, seed=1)
    queries, tape = draft(mx.bfloat16, rows=40, heads=(1, 2), dims=(64, 8))
    outputs, _ = kernel.verify(queries, tape, parents)
    for node in (0, 1, 13, 27, 39):
        rows = mx.array(path(parents, node))
        chain, _ = kernel.verify(mx.take(queries, rows, axis=1), select_rows(tape, rows))
        assert same_bits(chain[:, -1], outputs[:, node])


# A draw in [0, 1) picks the parent of each node: node n's is int(draw * n). The examples are a
# binary tree, which needs the most slots, and a tree whose longer branches come last.
BINARY_TREE = [((node - 1) // 2 + 0.5) / node for node in range(1, 63)]
LONGER_BRANCH_LAST = [((node - 1) // 2 * 2 + 0.5) / node for node in range(1, 64)]


@given(st.lists(st.floats(0, 1, exclude_max=True), max_size=63))
@example(BINARY_TREE)
@example(LONGER_BRANCH_LAST)
def test_a_visit_of_a_node_finds_its_parents_state(draws):
    """`visits` orders a tree's nodes and tells the slots in which states are saved and found.

    This follows its instructions with the numbers of nodes instead of states.
    """
    parents = [-1, *(int(draw * node) for node, draw in enumerate(draws, start=1))]
    slots: dict[int, int] = {}
    current = -1
    visited = []
    for node, parent_slot, saved_slot in visits(parents):
        assert parent_slot >= -1 and saved_slot >= -1
        if parent_slot >= 0:
            current = slots[parent_slot]
        assert current == parents[node]
        current = node
        visited.append(node)
        if saved_slot >= 0:
            slots[saved_slot] = node
    assert sorted(visited) == list(range(len(parents)))
    assert max(slots, default=0) < 5, "a tree of 64 nodes needs at most 5 slots"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gates", DTYPES)
@pytest.mark.parametrize("tree", [False, True])
def test_every_mix_of_dtypes_is_within_one_rounding(kernel, dtype, gates, tree):
    queries, tape = draft(dtype, rows=9, heads=(2, 4), dims=(48, 6), gates=gates)
    check(kernel, queries=queries, tape=tape, parents=random_parents(9) if tree else None)


@pytest.mark.parametrize("decay", [(0.0, 0.0), (1e-30, 1e-20), (1e-7, 1e-6), (1.0, 1.0)])
def test_decays_near_zero_and_one_are_within_one_rounding(kernel, decay):
    queries, tape = draft(mx.bfloat16, rows=12, heads=(1, 2), dims=(64, 4), decay=decay)
    check(kernel, queries, tape)
    check(kernel, queries, tape, random_parents(12))


@pytest.mark.parametrize("shape", ["star", "comb", "chain"])
def test_trees_of_64_nodes_are_within_one_rounding(kernel, shape):
    """All children of the root; a chain with a leaf at every node; a chain given as a tree."""
    parents = {
        "star": [-1] + [0] * 63,
        "comb": [-1] + [(node - 1) // 2 * 2 for node in range(1, 64)],
        "chain": list(range(-1, 63)),
    }[shape]
    queries, tape = draft(mx.float32, rows=MOST_NODES, heads=(1, 1), dims=(32, 4))
    y = check(kernel, queries, tape, parents)
    if shape == "chain":
        as_a_chain, _ = kernel.verify(queries, tape)
        assert same_bits(as_a_chain, y)


def test_shapes_and_dtypes_without_a_kernel_are_refused(kernel):
    """By the kernel and by the reference, also after a call that prepared a launch."""
    queries, tape = draft(mx.float16, rows=3, heads=(1, 2), dims=(32, 4))
    calls = [
        (queries, tape._replace(keys=tape.keys[:, :2])),
        (queries, tape._replace(values=tape.values[:, :, :1])),
        (queries, tape._replace(values=tape.values.astype(mx.float32))),
        (queries, tape._replace(decay=tape.decay.astype(mx.float16))),
        (queries, tape._replace(state=tape.state.astype(mx.float16))),
        draft(mx.float16, rows=3, heads=(1, 2), dims=(288, 4)),
        draft(mx.float16, rows=3, heads=(2, 3), dims=(32, 4)),
        (queries[:, :2], tape),
        (queries.astype(mx.float32), tape),
        (queries, tape, [-1, 0]),
    ]
    for verify in (kernel.verify, delta_verify_reference):
        verify(queries, tape, [-1, 0, 1])
        for call in calls:
            with pytest.raises(KernelError, match="delta rule has no kernel for queries"):
                verify(*call)
