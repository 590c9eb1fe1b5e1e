"""The delta rule on the emulated device, held to one rounding of the rule written out in numpy."""

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

# dtype, rows, (key heads, value heads), (Dk, Dv), whether the draft is a tree
CASES = [
    (mx.float32, 1, (1, 1), (32, 8), False),
    (mx.float32, 16, (2, 4), (128, 6), False),
    (mx.float16, 9, (1, 3), (192, 16), False),
    (mx.bfloat16, 16, (2, 2), (64, 8), False),
    (mx.float32, 64, (1, 2), (32, 4), False),
    (mx.float32, 64, (1, 2), (128, 4), True),
    (mx.float16, 21, (2, 6), (48, 5), True),
    (mx.bfloat16, 8, (1, 1), (256, 8), True),
    # Many heads of values for one of keys; rows and state rows that lanes share raggedly.
    (mx.float32, 5, (1, 8), (1, 7), False),
    (mx.float32, 5, (3, 12), (31, 1), True),
    (mx.float32, 3, (1, 2), (33, 17), True),
    (mx.float32, 3, (1, 2), (100, 3), False),
    (mx.float32, 3, (1, 2), (255, 5), True),
]
IDS = [f"{str(case[0])[9:]}-{case[1]}rows-{case[3]}-tree{case[4]}" for case in CASES]


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
    """Random queries and a tape. gates: beta's dtype."""
    mx.random.seed(rows + dims[0])
    directions = mx.random.normal((2, 1, rows, heads[0], dims[0]))
    queries, keys = (directions / mx.linalg.norm(directions, axis=-1, keepdims=True)).astype(dtype)
    values = mx.random.normal((1, rows, heads[1], dims[1])).astype(dtype)
    kept = mx.random.uniform(*decay, (1, rows, heads[1]))
    beta = mx.random.uniform(shape=(1, rows, heads[1])).astype(gates or dtype)
    return queries, DeltaInputs(
        keys,
        values=values,
        decay=kept,
        beta=beta,
        state=mx.random.normal((1, heads[1], *dims[::-1])),
    )


def taken(tape: DeltaInputs, rows, state: mx.array | None = None) -> DeltaInputs:
    """Some rows of the inputs, after their own state or another one."""
    if isinstance(rows, mx.array):
        parts = (mx.take(x, rows, axis=1) for x in tape[:-1])
    else:
        parts = (x[:, rows] for x in tape[:-1])
    return DeltaInputs(*parts, tape.state if state is None else state)


def rule(
    queries: mx.array, tape: DeltaInputs, parents: list[int] | None = None
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Outputs in float64 [1, N, Hv, Dv], how large what is added up for them is, and all states."""
    q, k, v, decay, beta, state = (float64(x)[0] for x in (queries, *tape))
    q, k = (np.repeat(x, v.shape[1] // k.shape[1], axis=1) for x in (q, k))
    states: list[np.ndarray] = []
    for row, parent in enumerate(range(-1, len(v) - 1) if parents is None else parents):
        before = (state if parent < 0 else states[parent]) * decay[row, :, None, None]
        missing = v[row] - np.einsum("hvk,hk->hv", before, k[row])
        states.append(before + np.einsum("hv,hk->hvk", missing * beta[row, :, None], k[row]))
    pairs = [*zip(states, q, strict=True)]
    outputs = np.stack([np.einsum("hvk,hk->hv", *pair) for pair in pairs])
    size = np.stack([np.einsum("hvk,hk->hv", np.abs(s), np.abs(r)) for s, r in pairs])
    return outputs[None], size[None] + 1, states


def is_state(following: mx.array, state: np.ndarray) -> bool:
    """Whether a state [1, Hv, Dv, Dk] is the rule's [Hv, Dv, Dk], rounded once."""
    return within_rounding(following, state[None], np.abs(state[None]) + 1)


def check(
    kernel, queries: mx.array, tape: DeltaInputs, parents: list[int] | None = None
) -> mx.array:
    """The kernel's outputs, and a chain's state, after holding them to one rounding."""
    y, following = kernel.verify(queries, tape, parents)
    truth, size, states = rule(queries, tape, parents)
    assert y.dtype == tape.values.dtype and y.shape == tape.values.shape
    assert within_rounding(y, truth, size), (y.dtype, truth.shape)
    assert following is None if parents else is_state(following, states[-1])
    return y


@pytest.mark.parametrize(("dtype", "rows", "heads", "dims", "tree"), CASES, ids=IDS)
def test_kernel_and_reference_are_the_delta_rule(dtype, rows, heads, dims, tree, kernel):
    queries, tape = draft(dtype, rows=rows, heads=heads, dims=dims)
    parents = random_parents(rows) if tree else None
    check(kernel, queries=queries, tape=tape, parents=parents)
    outputs, _, states = rule(queries, tape, parents)
    exact = DeltaInputs(*(x.astype(mx.float32) for x in tape))
    actual, following = delta_verify_reference(queries.astype(mx.float32), exact, parents)
    assert relative_error(actual, mx.array(outputs, mx.float32)) < TOLERANCES[mx.float32]
    assert (following is None) == tree
    assert tree or is_state(following, states[-1])


def test_the_reference_is_the_rule_of_mlx_lm():
    queries, tape = draft(mx.float32, rows=5, heads=(2, 4), dims=(32, 8))
    ours = delta_verify_reference(queries, tape)
    theirs = gated_delta_ops(queries, *tape)
    assert all(relative_error(*pair) < 1e-6 for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_whatever_shares_the_call(dtype, kernel):
    queries, tape = draft(dtype, rows=16, heads=(2, 4), dims=(128, 6))
    outputs, following = kernel.verify(queries, tape)
    state = tape.state
    for row in range(16):
        single = slice(row, row + 1)
        first = slice(0, row + 1)
        y, _ = kernel.verify(queries[:, first], taken(tape, first))
        assert same_bits(y, outputs[:, first])
        alone, state = kernel.verify(queries[:, single], taken(tape, single, state))
        assert same_bits(alone, outputs[:, single])
    assert same_bits(state, following)


def test_a_node_of_a_tree_has_the_bits_of_its_path_alone(kernel):
    parents = random_parents(40, seed=1)
    (queries, tape) = draft(mx.bfloat16, rows=40, heads=(1, 2), dims=(64, 8))
    outputs, _ = kernel.verify(queries, tape, parents)
    for node in (0, 1, 13, 27, 39):
        rows = mx.array(path(parents, node))
        chain, _ = kernel.verify(mx.take(queries, rows, axis=1), taken(tape, rows))
        assert same_bits(chain[:, -1], outputs[:, node])


@given(st.lists(st.floats(0, 1, exclude_max=True), max_size=63))
@example([((node - 1) // 2 + 0.5) / node for node in range(1, 63)])  # needs most: two children each
@example(
    [((node - 1) // 2 * 2 + 0.5) / node for node in range(1, 64)]
)  # the longer child comes last
def test_a_visit_finds_its_parents_state(draws):
    """Whatever the tree: the slots are played through with nodes in the place of states."""
    parents = [-1, *(int(draw * node) for node, draw in enumerate(draws, start=1))]
    slots: dict[int, int] = {}
    current = -1
    seen = []
    for node, parent_slot, own_slot in visits(parents):
        assert parent_slot >= -1 and own_slot >= -1
        current = current if parent_slot < 0 else slots[parent_slot]
        assert current == parents[node]
        current = node
        seen.append(node)
        if own_slot >= 0:
            slots[own_slot] = node
    assert sorted(seen) == list(range(len(parents)))
    assert max(slots, default=0) < 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gates", DTYPES)
@pytest.mark.parametrize("tree", [False, True])
def test_one_rounding_in_every_mix_of_dtypes(kernel, dtype, gates, tree):
    check(
        kernel,
        *draft(dtype, rows=9, heads=(2, 4), dims=(48, 6), gates=gates),
        random_parents(9) if tree else None,
    )


@pytest.mark.parametrize("decay", [(0.0, 0.0), (1e-30, 1e-20), (1e-7, 1e-6), (1.0, 1.0)])
def test_decays_near_nothing_and_all(kernel, decay):
    given = draft(mx.bfloat16, rows=12, heads=(1, 2), dims=(64, 4), decay=decay)
    check(kernel, *given)
    check(kernel, *given, random_parents(12))


@pytest.mark.parametrize("shape", ["star", "comb", "chain"])
def test_trees_of_64_nodes(kernel, shape):
    """All children of the root; a chain with a leaf at every node; a chain given as a tree."""
    parents = {
        "star": [-1] + [0] * 63,
        "comb": [-1] + [(node - 1) // 2 * 2 for node in range(1, 64)],
        "chain": list(range(-1, 63)),
    }[shape]
    given = draft(mx.float32, rows=MOST_NODES, heads=(1, 1), dims=(32, 4))
    y = check(kernel, *given, parents)
    if shape == "chain":
        assert same_bits(kernel.verify(*given)[0], y)


def test_what_does_not_fit_is_refused(kernel):
    queries, tape = draft(mx.float16, rows=3, heads=(1, 2), dims=(32, 4))
    changes = [
        {"keys": tape.keys[:, :2]},
        {"values": tape.values[:, :, :1]},
        *(
            {name: getattr(tape, name).astype(changed)}
            for name, changed in (
                ("values", mx.float32),
                ("decay", mx.float16),
                ("state", mx.float16),
            )
        ),
    ]
    calls = [(queries, tape._replace(**change)) for change in changes]
    calls += [draft(mx.float16, 3, *changed) for changed in (((1, 2), (288, 4)), ((2, 3), (32, 4)))]
    calls += [(queries[:, :2], tape), (queries.astype(mx.float32), tape), (queries, tape, [-1, 0])]
    for verify in (kernel.verify, delta_verify_reference):
        verify(queries, tape, [-1, 0, 1])  # nor where it is that of an earlier call but for parents
        for call in calls:
            with pytest.raises(KernelError, match="delta rule has no kernel for queries"):
                verify(*call)
