"""Products where they are easily wrong: held to one rounding, and at the ends of what they take."""

from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from kernel_check import (
    DTYPES,
    float64,
    kernel_factory,
    on_gpu_or_emulator,
    random_weights,
    same_bits,
    within_rounding,
)

from dflash_mlx.kernels.verify_matmul import VerifyMatmul, splits_of_k
from dflash_mlx.kernels.verify_qkv import VerifyQkv
from dflash_mlx.kernels.weights import AffineWeights, Weights, dequantized

pytestmark = on_gpu_or_emulator


@pytest.fixture(scope="module")
def matmul() -> VerifyMatmul:
    return VerifyMatmul(kernel_factory())


def products(x: mx.array, w: Weights) -> tuple[np.ndarray, np.ndarray]:
    """x w^T in float64, and the sum of what is added up, all of it positive."""
    rows, weights = float64(x), float64(w)
    if isinstance(w, AffineWeights):  # a code times scale, and a bias, may be larger than their sum
        scales, biases = (np.abs(float64(a)).repeat(w.group_size, -1) for a in (w.scales, w.biases))
        size = scales * (2**w.bits) + biases
    else:
        size = np.abs(weights)
    return rows @ weights.T, np.abs(rows) @ size.T


def check(matmul, x, w, up=None) -> mx.array:
    """The kernel's result, after holding it to one rounding."""
    y = matmul(x, w) if up is None else matmul(x, w, up)
    truth, magnitude = products(x, w)
    if up is not None:
        (gate, of_gate), (other, of_other) = (truth, magnitude), products(x, up)
        with np.errstate(over="ignore"):
            unit = gate / (1 + np.exp(-gate))
        truth = unit * other
        # An error of the gate grows by at most 1.1 in the unit; exp and the quotient err, too.
        magnitude = np.abs(unit) * of_other + (1.1 * of_gate + 4 * np.abs(unit)) * np.abs(other)
    assert y.dtype == mx.result_type(x, w.scales if isinstance(w, AffineWeights) else w)
    assert within_rounding(y, truth, magnitude), (x.shape, w.shape, y.dtype)
    return y


@pytest.mark.parametrize("dtype,stored", [*product(DTYPES, DTYPES)])
@pytest.mark.parametrize("bits,group", [(None, 0), (4, 32), (4, 128), (8, 64)])
def test_one_rounding_in_every_mix_of_dtypes(matmul, dtype, stored, bits, group):
    """What mixes is computed in float32, weights read as they are."""
    mx.random.seed(1)
    w = random_weights((33, 384), stored, bits, group)
    check(matmul, mx.random.normal((9, 384)).astype(dtype), w)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [1056, 1600, 2144, 2592])
def test_split_sums_are_rounded_once(matmul, dtype, depth):
    """Steps along K that no number of splits divides: some splits are longer than others.

    33 in 2, 50 in 3, 67 in 4 and 81 in 5 leave one to three over.
    """
    mx.random.seed(2)
    assert depth // 32 % splits_of_k(24, depth) > 0
    w, up = (random_weights((24, depth), dtype, 4, 32) for _ in range(2))
    x = mx.random.normal((3, depth)).astype(dtype)
    check(matmul, x, w)
    check(matmul, x, w, up)
    check(matmul, x, random_weights((24, depth + 3), dtype)[:, :depth])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_splits_add_up_to_is_not_rounded_before_it_is_used(matmul, dtype):
    """Of a gate, too: a term in each split, whose sums have more digits than the dtype."""
    mx.random.seed(4)
    x, pair, beside = mx.zeros((2, 1536), dtype), [], VerifyQkv(kernel_factory())
    for place in (0, 600, 1535):
        x[:, place] = 1.0
    for _ in range(2):
        w = mx.zeros((40, 1536), dtype)
        for place, size in ((0, 1.0), (600, 0.1), (1535, 0.01)):
            w[:, place] = (mx.random.uniform(1, 2, (40,)) * size).astype(dtype)
        pair.append(w)
    for weights in ([pair[0]], pair):
        check(matmul, x, *weights)
    for y, w in zip(beside(x, pair), pair, strict=True):
        assert within_rounding(y, *products(x, w))


def test_the_first_split_is_added_first(matmul):
    """And in it the first of four SIMD-groups: 1 is lost in 1e8 before that is taken away again."""
    x, beside = mx.ones((3, 1536)), VerifyQkv(kernel_factory())
    for places in ((0, 600, 1200), (0, 32, 64), (0, 128, 256)):
        w = mx.zeros((40, 1536))
        w[:, places[0]], w[:, places[1]], w[:, places[2]] = 1.0, 1e8, -1e8
        for y in (matmul(x, w), *beside(x, [w, w])):
            assert (y == 0).all().item(), places
        w[:, places[0]], w[:, places[2]] = -1e8, 1.0
        assert (matmul(x, w) == 1).all().item(), places


@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_at_every_place(matmul, bits):
    """The smallest and the largest, wherever they are in a word: x picks column after column."""
    group, depth = 32, 64
    words = mx.random.randint(0, 2**32, (40, depth * bits // 32), dtype=mx.uint32)
    words[0], words[1] = 0, 2**32 - 1
    scales = mx.random.uniform(0.5, 2, (40, depth // group))
    biases = mx.random.normal((40, depth // group))
    w = AffineWeights(words, scales, biases, bits, group)
    for first in range(0, depth, 16):
        one = mx.eye(depth)[first : first + 16]
        y = matmul(one, w)
        truth = float64(w).T[first : first + 16]
        assert np.abs(float64(y) - truth).max() <= 2e-6 * 2**bits * 2


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_multiplied_about_their_middle(matmul, bits):
    """So that sums stay small: weights about zero and whole numbers are multiplied exactly."""
    mx.random.seed(4)
    words = mx.random.randint(0, 2**32, (40, 64 * bits // 32), dtype=mx.uint32)
    scales = mx.random.uniform(0.5, 2, (40, 1))
    x = mx.random.randint(-9, 10, (5, 64)).astype(mx.float32)
    y = matmul(x, AffineWeights(words, scales, -(2 ** (bits - 1)) * scales, bits, 64))
    ones = AffineWeights(words, mx.ones((40, 1)), mx.full((40, 1), -(2.0 ** (bits - 1))), bits, 64)
    assert same_bits(y, (x @ dequantized(ones).T) * scales[:, 0])


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_far_from_zero(matmul, bits, dtype):
    """silu(100) is 100 and silu(-100) nothing, though exp(100) is more than float32 holds."""
    gates = mx.array([-1000.0, -100.0, -90.0, -20.0, -1.0, 0.0, 1.0, 20.0, 100.0, 1000.0])
    w = mx.zeros((10, 64))
    w[:, 0] = gates
    up = mx.zeros((10, 64))
    up[:, 1] = 3.0
    x = mx.zeros((2, 64), dtype)
    x[:, 0], x[:, 1] = 1.0, 2.0
    pair = [m.astype(dtype) for m in (w, up)]
    if bits:
        pair = [AffineWeights(*mx.quantize(m, 64, bits), bits, 64) for m in pair]
    y = float64(check(matmul, x, *pair))
    gate = float64(pair[0])[:, 0]
    assert np.isfinite(y).all()
    far = np.abs(gate) > 50
    assert np.allclose(y[:, far], np.where(gate > 0, 6 * gate, 0)[far], rtol=0.02, atol=1e-6)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_a_closed_gate_is_closed_whatever_it_keeps_back(matmul, dtype):
    """Also where gate times up is more than float32 holds."""
    x, gate, up = (mx.zeros((9, 32), dtype) for _ in range(3))
    x[:, 0], gate[:, 0], up[:, 0] = 1.0, -1e20, 1e20
    assert (matmul(x, gate, up) == 0).all().item()
