"""The delta rule on the emulated device, against the rule written out in numpy."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_check import (
    TOLERANCES,
    kernel_factory,
    on_gpu_or_emulator,
    relative_error,
    same_bits,
)
from kernel_trees import path, random_parents
from mlx_lm.models.gated_delta import gated_delta_ops

from dflash_mlx.errors import KernelError
from dflash_mlx.kernels.delta_replay import (
    DeltaReplay,
    DeltaVerify,
    delta_replay_reference,
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
    (mx.float32, 64, (1, 2), (128, 4), True),
    (mx.float16, 21, (2, 6), (48, 5), True),
    (mx.bfloat16, 8, (1, 1), (256, 8), True),
]
IDS = [f"{str(case[0])[9:]}-{case[1]}rows-{case[3]}-tree{case[4]}" for case in CASES]


@pytest.fixture(scope="module")
def verify() -> DeltaVerify:
    return DeltaVerify(kernel_factory())


@pytest.fixture(scope="module")
def replay() -> DeltaReplay:
    return DeltaReplay(kernel_factory())


def draft(dtype: mx.Dtype, rows: int, heads: tuple[int, int], dims: tuple[int, int]) -> list[Any]:
    """Random queries, keys, values, decay, beta and state."""
    mx.random.seed(rows)
    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    directions = mx.random.normal((2, 1, rows, key_heads, key_dim))
    queries, keys = directions / mx.linalg.norm(directions, axis=-1, keepdims=True)
    values = mx.random.normal((1, rows, value_heads, value_dim))
    decay, beta = mx.random.uniform(shape=(2, 1, rows, value_heads))
    state = mx.random.normal((1, value_heads, value_dim, key_dim)) * 0.3
    queries, keys, values, beta = (x.astype(dtype) for x in (queries, keys, values, beta))
    return [queries, keys, values, mx.sqrt(decay), beta, state]


def delta_rule(arrays: list[Any], parents: list[int]) -> tuple[mx.array, list[mx.array]]:
    """Outputs [1, N, Hv, Dv] and every node's state [Hv, Dv, Dk], computed in float64."""
    q, k, v, decay, beta, state = (np.array(x.astype(mx.float32), float)[0] for x in arrays)
    repeats = v.shape[1] // k.shape[1]
    q, k = (np.repeat(x, repeats, axis=1) for x in (q, k))
    states: list[np.ndarray] = []
    for row, parent in enumerate(parents):
        before = (state if parent < 0 else states[parent]) * decay[row, :, None, None]
        missing = v[row] - np.einsum("hvk,hk->hv", before, k[row])
        gained = np.einsum("hv,hk->hvk", missing * beta[row, :, None], k[row])
        states.append(before + gained)
    outputs = [np.einsum("hvk,hk->hv", s, query) for s, query in zip(states, q, strict=True)]
    return mx.array(np.stack(outputs)[None], mx.float32), [mx.array(s, mx.float32) for s in states]


@pytest.mark.parametrize(("dtype", "rows", "heads", "dims", "tree"), CASES, ids=IDS)
def test_kernel_and_reference_are_the_delta_rule(dtype, rows, heads, dims, tree, verify, replay):
    arrays = draft(dtype, rows, heads, dims)
    parents = random_parents(rows) if tree else None
    expected, states = delta_rule(arrays, parents or list(range(-1, rows - 1)))
    exact = [x.astype(mx.float32) for x in arrays]
    for rule, args, tolerance in [
        (delta_verify_reference, exact, TOLERANCES[mx.float32]),
        (verify, arrays, TOLERANCES[dtype]),
    ]:
        outputs, following = rule(*args, parents)
        assert outputs.dtype == args[2].dtype
        assert relative_error(outputs, expected) < tolerance
        assert (following is None) == tree
        if following is not None:
            assert relative_error(following[0], states[-1]) < TOLERANCES[mx.float32]
    kept = path(parents, rows - 1) if parents else list(range(rows))
    for rule, args in [(delta_replay_reference, exact), (replay, arrays)]:
        for count in {1, len(kept) // 2, len(kept)} - {0}:
            following = rule(*args[1:], mx.array(kept), mx.array(count))
            wanted = states[kept[count - 1]]
            assert relative_error(following[0], wanted) < TOLERANCES[mx.float32]


def test_the_reference_is_the_rule_of_mlx_lm():
    queries, keys, values, decay, beta, state = draft(mx.float32, 5, (2, 4), (32, 8))
    outputs, following = delta_verify_reference(queries, keys, values, decay, beta, state)
    theirs = gated_delta_ops(queries, keys, values, decay, beta, state)
    assert relative_error(outputs, theirs[0]) < 1e-6
    assert relative_error(following, theirs[1]) < 1e-6


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_a_row_has_the_same_bits_whatever_shares_the_call_and_replayed(dtype, verify, replay):
    arrays = draft(dtype, 16, (2, 4), (128, 6))
    rows, state = arrays[:-1], arrays[-1]
    outputs, following = verify(*arrays)
    for row in range(16):
        first, _ = verify(*(x[:, : row + 1] for x in rows), arrays[-1])
        assert same_bits(first, outputs[:, : row + 1])
        alone, state = verify(*(x[:, row : row + 1] for x in rows), state)
        assert same_bits(alone, outputs[:, row : row + 1])
        kept = mx.arange(16)
        assert same_bits(replay(*arrays[1:], kept, row + 1), state)
    assert same_bits(state, following)


def test_a_node_of_a_tree_has_the_bits_of_its_path_alone(verify, replay):
    arrays, parents = draft(mx.bfloat16, 40, (1, 2), (64, 8)), random_parents(40, seed=1)
    outputs, _ = verify(*arrays, parents)
    for node in (0, 1, 13, 27, 39):
        rows = mx.array(path(parents, node))
        chain, state = verify(*(mx.take(x, rows, axis=1) for x in arrays[:-1]), arrays[-1])
        assert same_bits(chain[:, -1], outputs[:, node])
        padded = mx.pad(rows, (0, 3))  # what an accept walk on the device hands over
        assert same_bits(replay(*arrays[1:], padded, mx.array(rows.size)), state)


@given(st.lists(st.floats(0, 1, exclude_max=True), max_size=63))
@example([((node - 1) // 2 + 0.5) / node for node in range(1, 63)])  # needs most: two children each
def test_a_visit_finds_its_parents_state(draws):
    """Whatever the tree: the slots are played through with nodes in the place of states."""
    parents = [-1, *(int(draw * node) for node, draw in enumerate(draws, start=1))]
    slots: dict[int, int] = {}
    current, seen = -1, []
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


def test_what_does_not_fit_is_refused(verify, replay):
    queries, keys, values, decay, beta, state = draft(mx.float16, 3, (1, 2), (32, 4))
    kept = mx.arange(3)
    for tape in [
        (keys[:, :2], values, decay, beta, state),
        (keys, values[:, :, :1], decay, beta, state),
        (keys, values.astype(mx.float32), decay, beta, state),
        (keys, values, decay.astype(mx.float16), beta, state),
        (keys, values, decay, beta, state.astype(mx.float16)),
    ]:
        for rule in (replay, delta_replay_reference):
            with pytest.raises(KernelError, match="delta rule has no kernel"):
                rule(*tape, kept, 1)
    tape = (keys, values, decay, beta, state)
    for rule in (verify, delta_verify_reference):
        with pytest.raises(KernelError, match="queries .* and keys .* differ"):
            rule(queries[:, :2], *tape)
        with pytest.raises(KernelError, match="2 parents for 3 rows"):
            rule(queries, *tape, [-1, 0])
