"""verify_matmul: one rounding of float64, the same bits for a row in every call, its work."""

import itertools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from kernel_check import (
    DTYPES,
    TOLERANCES,
    float64,
    kernel_factory,
    on_gpu_or_emulator,
    product,
    random_weights,
    relative_error,
    same_bits,
    within_rounding,
)

from dflash_mlx.errors import KernelError
from dflash_mlx.kernels.verify_matmul import VerifyMatmul, splits_of_k, verify_matmul_reference
from dflash_mlx.kernels.weights import AffineWeights, dequantized

pytestmark = on_gpu_or_emulator

SPLIT = (40, 1024)  # a shape whose K is split


@pytest.fixture(scope="module")
def matmul() -> VerifyMatmul:
    return VerifyMatmul(kernel_factory())


def check(matmul, x, *weights) -> mx.array:
    """The kernel's result, after holding it to one rounding, and the reference to float32."""
    y, (truth, magnitude) = matmul(x, *weights), product(x, *weights)
    of = getattr(weights[0], "scales", weights[0])
    assert y.dtype == mx.result_type(x, of) and y.shape == truth.shape
    assert within_rounding(y, truth, magnitude), (x.shape, weights[0].shape, y.dtype)
    reference = verify_matmul_reference(x.astype(mx.float32), *weights)
    assert relative_error(reference, mx.array(truth, mx.float32)) <= TOLERANCES[mx.float32]
    return y


@pytest.mark.parametrize("bits,group", [*itertools.product((4, 8), (32, 64, 128))])
def test_affine_weights(matmul, bits, group):
    """1 to 16 rows; N and K below a tile, ragged, whole tiles."""
    mx.random.seed(bits * group)
    shapes = itertools.cycle([(24, 1), (33, 3), (64, 4), (97, 2), (40, 7)])  # columns, groups
    for rows, (columns, groups) in zip(range(1, 17), shapes, strict=False):
        w = random_weights((columns, groups * group), mx.bfloat16, bits, group)
        check(matmul, mx.random.normal((rows, groups * group)).astype(mx.bfloat16), w)


@pytest.mark.parametrize("dtype,weights", [*itertools.product(DTYPES, DTYPES)])
def test_plain_weights(matmul, dtype, weights):
    """Also with K that is no multiple of anything, and with types that MLX would promote."""
    mx.random.seed(0)
    for rows, columns, depth in ((9, 1, 8), (16, 33, 105), (7, 64, 256), (12, 3, 303), (5, 9, 90)):
        w = random_weights((columns, depth), weights)
        check(matmul, mx.random.normal((rows, depth)).astype(dtype), w)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_gate_and_up(matmul, dtype, bits):
    mx.random.seed(1)
    for rows, shape in ((16, (33, 192)), (5, (16, 64)), (11, SPLIT)):
        gate, up = random_weights(shape, dtype, bits), random_weights(shape, dtype, bits)
        check(matmul, mx.random.normal((rows, shape[1])).astype(dtype), gate, up)


@pytest.mark.parametrize("dtype,stored", [*itertools.product(DTYPES, DTYPES)])
def test_affine_weights_in_every_mix_of_dtypes(matmul, dtype, stored):
    """What mixes is computed in float32, weights read as they are."""
    mx.random.seed(1)
    w = random_weights((33, 384), stored, 4, 32)
    check(matmul, mx.random.normal((9, 384)).astype(dtype), w)


@pytest.mark.parametrize("shape", [(128,), (1, 16, 128), (2, 3, 128), (1, 37, 128)])
def test_any_leading_dimensions(matmul, shape):
    """And more rows than a tile has."""
    mx.random.seed(4)
    check(matmul, mx.random.normal(shape), random_weights((40, 128), mx.float32, 8, 32))


KINDS = {
    "4-bit": (mx.bfloat16, 4, (33, 192), 1),
    "8-bit": (mx.float16, 8, (33, 192), 1),
    "plain": (mx.float32, None, (40, 77), 1),
    "gate and up": (mx.bfloat16, 4, (20, 192), 2),
    "one column": (mx.float16, 4, (1, 256), 1),
    "split": (mx.bfloat16, 4, SPLIT, 1),
    "split gate and up": (mx.float16, 4, SPLIT, 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_every_call(matmul, kind):
    """Whatever their number, their place and the other rows."""
    dtype, bits, shape, count = KINDS[kind]
    mx.random.seed(5)
    weights = [random_weights(shape, dtype, bits) for _ in range(count)]
    x = mx.random.normal((16, shape[1])).astype(dtype)
    alone = mx.concatenate([matmul(x[i : i + 1], *weights) for i in range(16)])
    for rows in range(1, 17):
        assert same_bits(matmul(x[:rows], *weights), alone[:rows]), rows
        assert same_bits(matmul(x[-rows:], *weights), alone[-rows:]), rows
    assert same_bits(matmul(mx.concatenate([x[3:], x]), *weights)[13:], alone)


def test_a_bad_row_spoils_no_other(matmul):
    mx.random.seed(6)
    w, x = random_weights((33, 128), mx.float32, 4), mx.random.normal((16, 128))
    y = matmul(x, w)
    x[3] = mx.inf
    x[7] = mx.nan
    spoilt = matmul(x, w)
    good = mx.array([i for i in range(16) if i not in (3, 7)])
    assert same_bits(spoilt[good], y[good])
    assert not mx.isfinite(spoilt[mx.array([3, 7])]).any().item()


@pytest.mark.parametrize("bits", [4, 8])
def test_the_reference_reads_the_weights_as_they_are_packed(bits):
    """By hand: words are taken apart, the lowest bits first."""
    mx.random.seed(7)
    w, x = random_weights((5, 96), mx.float32, bits, 32), mx.random.normal((3, 96))
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    q = (np.array(w.words)[..., None] >> shifts & (2**bits - 1)).reshape(5, 3, 32)
    values = np.array(w.scales)[..., None] * q + np.array(w.biases)[..., None]
    truth = np.array(x, np.float64) @ values.reshape(5, 96).T
    assert np.allclose(np.array(verify_matmul_reference(x, w)), truth, atol=1e-5)


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


def test_two_sums_in_all(matmul):
    """MLX declares so few elements as `constant`."""
    for dtype in DTYPES:
        check(matmul, mx.random.normal((1, 1024)).astype(dtype), random_weights((1, 1024), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_small_bias_is_not_lost_beside_the_middle_of_the_codes(matmul, dtype, bits):
    """Codes are multiplied as signed numbers, which moves their middle into the bias."""
    words = mx.zeros((24, 64 * bits // 32), mx.uint32)
    w = AffineWeights(words, mx.ones((24, 1), dtype), mx.full((24, 1), 2.0**-12, dtype), bits, 64)
    assert (matmul(mx.ones((3, 64), dtype), w) == 2.0**-6).all().item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "splits"), [(2592, 5), (3600, 7)])
def test_no_split_is_rounded_before_it_is_added(matmul, dtype, depth, splits):
    """A later one has 1 and a little, and the first one takes the 1 away again."""
    beside = matmul.several
    assert splits_of_k(24, depth) == splits_of_k(3 * 24, depth) == splits
    for at in range(1, splits):
        x, w = mx.ones((2, depth), dtype), mx.zeros((24, depth), dtype)
        start = (depth // 32 * at // splits + 1) * 32
        w[:, 0], w[:, start], w[:, start + 1] = -1.0, 1.0, 2.0**-12
        for y in (matmul(x, w), *beside(x, [w, w, w])):
            assert (y == 2.0**-12).all().item(), at
        one = mx.where(mx.arange(depth) == 0, 1.0, mx.zeros_like(w))
        for pair, unit in (((w, one), 2.0**-13), ((one, w), 0.731 * 2.0**-12)):
            assert mx.allclose(matmul(x, *pair), mx.array(unit, dtype), rtol=0.01, atol=0), at


def test_the_first_split_is_added_first(matmul):
    """And in it the first of four SIMD-groups: 1 is lost in 1e8 before that is taken away again."""
    x, beside = mx.ones((3, 1536)), matmul.several
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


def test_what_does_not_fit_is_refused(matmul):
    w = random_weights((16, 128), mx.float32, 4)
    refused = {
        "x has 64 columns, the weights have 128": (mx.ones((2, 64)), w),
        "not int32": (mx.ones((2, 128), mx.int32), w),
        "Gate and up differ": (mx.ones((2, 128)), w, random_weights((16, 128), mx.float32, 8)),
        "fewer than 8 elements": (mx.ones((1, 4)), mx.ones((16, 4))),
        "are \\[N, K\\]": (mx.ones((2, 128)), mx.ones((3, 16, 128))),
    }
    for message, arguments in refused.items():
        with pytest.raises(KernelError, match=message):
            matmul(*arguments)


@pytest.mark.parametrize(
    "message,changes",
    {
        "4 or 8 bits": {"bits": 3},
        "groups of 32, 64 or 128": {"group_size": 16},
        "in float32 with scales": {"words": lambda words: words.astype(mx.float32)},
        "in int32 and biases": {"scales": lambda scales: scales.astype(mx.int32)},
        "in float16 have no kernel": {"biases": lambda biases: biases.astype(mx.float16)},
        "scales \\(16, 1\\)": {"scales": lambda scales: scales[:, :1]},
    }.items(),
)
def test_arrays_that_are_no_affine_weights_are_refused(message, changes):
    w = random_weights((16, 128), mx.float32, 4)
    changed = {k: v(getattr(w, k)) if callable(v) else v for k, v in changes.items()}
    with pytest.raises(KernelError, match=message):
        replace(w, **changed)
