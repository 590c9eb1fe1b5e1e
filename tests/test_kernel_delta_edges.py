"""The delta rule held to one rounding: deep and broad trees, ragged rows, decays near nothing."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernel_check import (
    DTYPES,
    float64,
    kernel_factory,
    on_gpu_or_emulator,
    same_bits,
    within_rounding,
)
from kernel_trees import random_parents

from dflash_mlx.kernels.delta_replay import (
    MOST_NODES,
    DeltaReplay,
    DeltaVerify,
)

pytestmark = on_gpu_or_emulator


@pytest.fixture(scope="module")
def verify() -> DeltaVerify:
    return DeltaVerify(kernel_factory())


@pytest.fixture(scope="module")
def replay() -> DeltaReplay:
    return DeltaReplay(kernel_factory())


def draft(
    dtype: mx.Dtype,
    rows: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    gates: mx.Dtype | None = None,
    decay: tuple[float, float] = (0.0, 1.0),
) -> list[Any]:
    """Random queries, keys, values, decay, beta and state. gates: beta's dtype."""
    mx.random.seed(rows + dims[0])
    directions = mx.random.normal((2, 1, rows, heads[0], dims[0]))
    queries, keys = (directions / mx.linalg.norm(directions, axis=-1, keepdims=True)).astype(dtype)
    values = mx.random.normal((1, rows, heads[1], dims[1])).astype(dtype)
    kept = mx.random.uniform(*decay, (1, rows, heads[1]))
    beta = mx.random.uniform(shape=(1, rows, heads[1])).astype(gates or dtype)
    return [queries, keys, values, kept, beta, mx.random.normal((1, heads[1], *dims[::-1]))]


def rule(arrays: list[Any], parents: list[int]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Outputs in float64 [1, N, Hv, Dv], how large what is added up for them is, and all states."""
    q, k, v, decay, beta, state = (float64(x)[0] for x in arrays)
    q, k = (np.repeat(x, v.shape[1] // k.shape[1], axis=1) for x in (q, k))
    states: list[np.ndarray] = []
    for row, parent in enumerate(parents):
        before = (state if parent < 0 else states[parent]) * decay[row, :, None, None]
        missing = v[row] - np.einsum("hvk,hk->hv", before, k[row])
        states.append(before + np.einsum("hv,hk->hvk", missing * beta[row, :, None], k[row]))
    outputs = np.stack([np.einsum("hvk,hk->hv", *of) for of in zip(states, q, strict=True)])
    size = np.stack(
        [np.einsum("hvk,hk->hv", np.abs(s), np.abs(r)) for s, r in zip(states, q, strict=True)]
    )
    return outputs[None], size[None] + 1, states


def check(verify, arrays: list[Any], parents: list[int] | None = None) -> mx.array:
    """The kernel's outputs, and a chain's state, after holding them to one rounding."""
    rows = arrays[1].shape[1]
    y, following = verify(*arrays, parents)
    truth, size, states = rule(arrays, parents or list(range(-1, rows - 1)))
    assert y.dtype == arrays[2].dtype and y.shape == arrays[2].shape
    assert within_rounding(y, truth, size), (y.dtype, truth.shape)
    if following is not None:
        assert within_rounding(following, states[-1][None], np.abs(states[-1][None]) + 1)
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gates", DTYPES)
@pytest.mark.parametrize("tree", [False, True])
def test_one_rounding_in_every_mix_of_dtypes(verify, dtype, gates, tree):
    parents = random_parents(9) if tree else None
    check(verify, draft(dtype, 9, (2, 4), (48, 6), gates), parents)


@pytest.mark.parametrize("heads", [(1, 8), (3, 12)])
def test_many_heads_of_values_for_one_of_keys(verify, replay, heads):
    arrays = draft(mx.float32, 5, heads, (32, 7))
    check(verify, arrays)
    check(verify, arrays, [-1, 0, 0, 1, 2])
    following = replay(*arrays[1:], mx.array([0, 1, 3]), 3)
    _, _, states = rule(arrays, [-1, 0, 0, 1, 2])
    assert within_rounding(following, states[3][None], np.abs(states[3][None]) + 1)


@pytest.mark.parametrize("key_dim", [1, 31, 32, 33, 100, 128, 255, 256])
def test_every_length_of_a_row(verify, replay, key_dim):
    """Whole and ragged shares of a lane; nothing is read past a row's end."""
    arrays = draft(mx.float32, 3, (1, 2), (key_dim, 5))
    check(verify, arrays)
    check(verify, arrays, [-1, 0, 0])
    _, _, states = rule(arrays, [-1, 0, 0])
    following = replay(*arrays[1:], mx.array([0, 2]), 2)
    assert within_rounding(following, states[2][None], np.abs(states[2][None]) + 1)


@pytest.mark.parametrize("value_dim", [1, 3, 4, 5, 17])
def test_every_number_of_state_rows(verify, value_dim):
    """A SIMD-group and a threadgroup in part."""
    arrays = draft(mx.float32, 2, (1, 2), (64, value_dim))
    check(verify, arrays)
    check(verify, arrays, [-1, 0])


@pytest.mark.parametrize("decay", [(0.0, 0.0), (1e-30, 1e-20), (1e-7, 1e-6), (1.0, 1.0)])
def test_decays_near_nothing_and_all(verify, decay):
    arrays = draft(mx.bfloat16, 12, (1, 2), (64, 4), decay=decay)
    check(verify, arrays)
    check(verify, arrays, random_parents(12))


def test_a_state_that_gains_nothing_keeps_what_is_tiny(verify, replay):
    """No beta: a state of 1 decays to 1e-36, and is read as that."""
    queries, keys, values, _, beta, _ = draft(mx.float32, 3, (1, 2), (64, 4))
    decay = mx.broadcast_to(mx.array([1e-12, 0.5, 1e-24])[None, :, None], (1, 3, 2))
    state = mx.ones((1, 2, 4, 64))
    rows = [queries, keys, values, decay, mx.zeros_like(beta), state]
    y, following = verify(*rows)
    kept = float64(decay)[0, :, 0].cumprod()
    sums = float64(queries).sum(-1)[0, :, 0] * kept
    assert np.allclose(float64(y)[0, :, 0, 0], sums, rtol=1e-4, atol=0)
    assert np.allclose(float64(following), kept[2], rtol=1e-6, atol=0)
    assert same_bits(verify(*rows, [-1, 0, 1])[0], y)
    assert same_bits(replay(*rows[1:], mx.arange(3), 3), following)


@pytest.mark.parametrize("shape", ["star", "comb", "chain"])
def test_trees_of_64_nodes(verify, shape):
    """All children of the root; a chain with a leaf at every node; a chain given as a tree."""
    parents = {
        "star": [-1] + [0] * 63,
        "comb": [-1] + [(node - 1) // 2 * 2 for node in range(1, 64)],
        "chain": list(range(-1, 63)),
    }[shape]
    arrays = draft(mx.float32, MOST_NODES, (1, 1), (32, 4))
    y = check(verify, arrays, parents)
    if shape == "chain":
        assert same_bits(verify(*arrays)[0], y)
