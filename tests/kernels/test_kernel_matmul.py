"""verify_matmul: one rounding of float64, the same bits for a row in every call, its work."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from kernel_check import (
    DTYPES,
    TOLERANCES,
    check_products,
    check_rows,
    float64,
    kernel_factory,
    on_gpu_or_emulator,
    random_weights,
    relative_error,
    same_bits,
)

from dflash_mlx.errors import KernelError
from dflash_mlx.kernels.fused import FusedProjections
from dflash_mlx.kernels.verify_matmul import VerifyMatmul, splits_of_k, verify_matmul_reference
from dflash_mlx.kernels.weights import AffineWeights, dequantized

pytestmark = on_gpu_or_emulator

SPLIT = (40, 1024)  # a shape whose K is split
# Columns and K of what shares a launch: whole tiles, ragged ones, and so few that K is split.
SEVERAL = [
    ((64, 32, 32), 256),
    ((40, 1, 33), 192),
    ((72, 9, 24), 1024),
    ((33, 64), 64),
    ((96, 40, 3, 2), 1024),
]


@pytest.fixture(scope="module")
def matmul() -> VerifyMatmul:
    return VerifyMatmul(kernel_factory())


@pytest.mark.parametrize("bits,group", [*itertools.product((4, 8), (32, 64, 128))])
def test_affine_weights(matmul, bits, group):
    """1 to 16 rows; N and K below a tile, ragged, whole tiles."""
    mx.random.seed(bits * group)
    shapes = itertools.cycle([(24, 1), (33, 3), (64, 4), (97, 2), (40, 7)])  # columns, groups
    for rows, (columns, groups) in zip(range(1, 17), shapes, strict=False):
        w = random_weights((columns, groups * group), dtype=mx.bfloat16, bits=bits, group=group)
        check_products(matmul, mx.random.normal((rows, groups * group)).astype(mx.bfloat16), w)


@pytest.mark.parametrize("dtype,stored", [*itertools.product(DTYPES, DTYPES)])
def test_every_mix_of_dtypes(matmul, dtype, stored):
    """What mixes is computed in float32, weights as they are; K of plain ones is any number."""
    mx.random.seed(0)
    for rows, columns, depth in ((9, 1, 8), (16, 33, 105), (7, 64, 256), (12, 3, 303), (5, 9, 90)):
        w = random_weights((columns, depth), stored)
        check_products(matmul, mx.random.normal((rows, depth)).astype(dtype), w)
    w = random_weights((33, 384), dtype=stored, bits=4, group=32)
    check_products(matmul, mx.random.normal((9, 384)).astype(dtype), w)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_gate_and_up(matmul, dtype, bits):
    mx.random.seed(1)
    for rows, shape in ((16, (33, 192)), (5, (16, 64)), (11, SPLIT)):
        pair = [random_weights(shape, dtype, bits) for _ in range(2)]
        check_products(matmul, mx.random.normal((rows, shape[1])).astype(dtype), *pair, gated=True)


@pytest.mark.parametrize(
    ("number", "dtype", "bits"),
    [(index, *kind) for index, kind in enumerate(itertools.product(DTYPES, (None, 4, 8)))],
)
def test_several_matrices(matmul, number, dtype, bits):
    """In two shapes, so that every dtype meets every shape; also of rows in another dtype."""
    mx.random.seed(1)
    for rows, (columns, depth) in ((16, SEVERAL[number % 5]), (37, SEVERAL[(number + 2) % 5])):
        weights = [random_weights((n, depth), dtype, bits) for n in columns]
        x = mx.random.normal((1, rows, depth)).astype(dtype)
        check_products(matmul, x, *weights)
    check_products(matmul, x.astype(mx.float32), *weights)


@pytest.mark.parametrize("shape", [(128,), (1, 16, 128), (2, 3, 128), (1, 37, 128)])
def test_any_leading_dimensions(matmul, shape):
    """And more rows than a tile has."""
    mx.random.seed(4)
    check_products(
        matmul,
        mx.random.normal(shape),
        random_weights((40, 128), dtype=mx.float32, bits=8, group=32),
    )


KINDS = {
    "4-bit": (mx.bfloat16, 4, (33,), 192, False),
    "8-bit": (mx.float16, 8, (33,), 192, False),
    "plain": (mx.float32, None, (40,), 77, False),
    "gate and up": (mx.bfloat16, 4, (20, 20), 192, True),
    "one column": (mx.float16, 4, (1,), 256, False),
    "split": (mx.bfloat16, 4, (40,), 1024, False),
    "split gate and up": (mx.float16, 4, (40, 40), 1024, True),
    **{f"{len(sizes)} of {k}": (mx.bfloat16, 4, sizes, k, False) for sizes, k in SEVERAL},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_every_call(matmul, kind):
    """Whatever their number, their place and the other rows."""
    dtype, bits, columns, depth, gated = KINDS[kind]
    mx.random.seed(5)
    weights = [random_weights((n, depth), dtype, bits) for n in columns]
    x = mx.random.normal((29, depth)).astype(dtype)
    counts = (8, 17, 29) if len(columns) > 2 else (*range(2, 18), 29)
    check_rows(lambda rows: matmul(x[rows], *weights, gated=gated), 29, counts)


def test_a_bad_row_spoils_no_other(matmul):
    mx.random.seed(6)
    w = random_weights((33, 128), mx.float32, 4)
    x = mx.random.normal((16, 128))
    [y] = matmul(x, w)
    x[3] = mx.inf
    x[7] = mx.nan
    [spoilt] = matmul(x, w)
    good = mx.array([i for i in range(16) if i not in (3, 7)])
    assert same_bits(spoilt[good], y[good])
    assert not mx.isfinite(spoilt[mx.array([3, 7])]).any().item()


@pytest.mark.parametrize("bits", [4, 8])
def test_the_reference_reads_the_weights_as_they_are_packed(bits):
    """By hand: words are taken apart, the lowest bits first."""
    mx.random.seed(7)
    w = random_weights((5, 96), dtype=mx.float32, bits=bits, group=32)
    x = mx.random.normal((3, 96))
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    q = (np.array(w.words)[..., None] >> shifts & (2**bits - 1)).reshape(5, 3, 32)
    values = np.array(w.scales)[..., None] * q + np.array(w.biases)[..., None]
    truth = np.array(x, np.float64) @ values.reshape(5, 96).T
    assert np.allclose(np.array(verify_matmul_reference(x, w)), truth, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [1056, 1600, 2144, 2592])
def test_split_sums_are_rounded_once(matmul, dtype, depth):
    """Splits of unlike lengths: 33 steps in 2, 50 in 3, 67 in 4 and 81 in 5 leave some over."""
    mx.random.seed(2)
    assert depth // 32 % splits_of_k(24, depth) > 0
    w, up = (random_weights((24, depth), dtype=dtype, bits=4, group=32) for _ in range(2))
    x = mx.random.normal((3, depth)).astype(dtype)
    check_products(matmul, x, w)
    check_products(matmul, x, w, up, gated=True)
    check_products(matmul, x, random_weights((24, depth + 3), dtype)[:, :depth])


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_sums_in_all(matmul, dtype):
    """MLX declares so few elements as `constant`."""
    x = mx.random.normal((1, 1024)).astype(dtype)
    check_products(matmul, x, random_weights((1, 1024), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_small_bias_is_not_lost_beside_the_middle_of_the_codes(matmul, dtype, bits):
    """Codes are multiplied as signed numbers, which moves their middle into the bias."""
    words = mx.zeros((24, 64 * bits // 32), mx.uint32)
    w = AffineWeights(
        words,
        scales=mx.ones((24, 1), dtype),
        biases=mx.full((24, 1), 2.0**-12, dtype),
        bits=bits,
        group_size=64,
    )
    assert (matmul(mx.ones((3, 64), dtype), w)[0] == 2.0**-6).all().item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "splits"), [(2592, 5), (3600, 7)])
def test_no_split_is_rounded_before_it_is_added(matmul, dtype, depth, splits):
    """A later split sums to 1 + 2**-12, the first to -1: rounding either would lose the 2**-12."""
    assert splits_of_k(24, depth) == splits_of_k(3 * 24, depth) == splits
    for split in range(1, splits):
        x = mx.ones((2, depth), dtype)
        w = mx.zeros((24, depth), dtype)
        start = (depth // 32 * split // splits + 1) * 32
        w[:, 0] = -1.0
        w[:, start] = 1.0
        w[:, start + 1] = 2.0**-12
        for y in (*matmul(x, w), *matmul(x, w, w, w)):
            assert (y == 2.0**-12).all().item(), split
        summand = mx.where(mx.arange(depth) == 0, 1.0, mx.zeros_like(w))
        for pair, unit in (((w, summand), 2.0**-13), ((summand, w), 0.731 * 2.0**-12)):
            [y] = matmul(x, *pair, gated=True)
            assert mx.allclose(y, mx.array(unit, dtype), rtol=0.01, atol=0), split


def test_the_first_split_is_added_first(matmul):
    """And in it the first of four SIMD-groups: 1 is lost in 1e8 before that is taken away again."""
    x = mx.ones((3, 1536))
    for places in ((0, 600, 1200), (0, 32, 64), (0, 128, 256)):
        w = mx.zeros((40, 1536))
        w[:, places[0]] = 1.0
        w[:, places[1]] = 1e8
        w[:, places[2]] = -1e8
        for y in (*matmul(x, w), *matmul(x, w, w)):
            assert (y == 0).all().item(), places
        w[:, places[0]] = -1e8
        w[:, places[2]] = 1.0
        assert (matmul(x, w)[0] == 1).all().item(), places


@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_at_every_place(matmul, bits):
    """The smallest and the largest, wherever they are in a word: x picks column after column."""
    group = 32
    depth = 64
    words = mx.random.randint(0, 2**32, (40, depth * bits // 32), dtype=mx.uint32)
    words[0] = 0
    words[1] = 2**32 - 1
    scales = mx.random.uniform(0.5, 2, (40, depth // group))
    biases = mx.random.normal((40, depth // group))
    w = AffineWeights(words, scales=scales, biases=biases, bits=bits, group_size=group)
    for first in range(0, depth, 16):
        [y] = matmul(mx.eye(depth)[first : first + 16], w)
        assert np.abs(float64(y) - float64(w).T[first : first + 16]).max() <= 4e-6 * 2**bits


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_multiplied_about_their_middle(matmul, bits):
    """So that sums stay small: weights about zero and whole numbers are multiplied exactly."""
    mx.random.seed(4)
    words = mx.random.randint(0, 2**32, (40, 64 * bits // 32), dtype=mx.uint32)
    scales = mx.random.uniform(0.5, 2, (40, 1))
    x = mx.random.randint(-9, 10, (5, 64)).astype(mx.float32)
    [y] = matmul(
        x,
        AffineWeights(
            words, scales=scales, biases=-(2 ** (bits - 1)) * scales, bits=bits, group_size=64
        ),
    )
    ones = AffineWeights(
        words,
        scales=mx.ones((40, 1)),
        biases=mx.full((40, 1), -(2.0 ** (bits - 1))),
        bits=bits,
        group_size=64,
    )
    assert same_bits(y, (x @ dequantized(ones).T) * scales[:, 0])


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_far_from_zero(matmul, bits, dtype):
    """silu(100) is 100 and silu(-100) nothing, though exp(100) is more than float32 holds."""
    gates = mx.array([-1000.0, -100.0, -90.0, -20.0, -1.0, 0.0, 1.0, 20.0, 100.0, 1000.0])
    w = mx.zeros((10, 64))
    up = mx.zeros((10, 64))
    x = mx.zeros((2, 64), dtype)
    w[:, 0] = gates
    up[:, 1] = 3.0
    x[:, 0] = 1.0
    x[:, 1] = 2.0
    pair = [m.astype(dtype) for m in (w, up)]
    if bits:
        pair = [AffineWeights(*mx.quantize(m, 64, bits), bits, 64) for m in pair]
    y = float64(check_products(matmul, x, *pair, gated=True)[0])
    gate = float64(pair[0])[:, 0]
    assert np.isfinite(y).all()
    far = np.abs(gate) > 50
    assert np.allclose(y[:, far], np.where(gate > 0, 6 * gate, 0)[far], rtol=0.02, atol=1e-6)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_a_closed_gate_is_closed_whatever_it_keeps_back(matmul, dtype):
    """Also where gate times up is more than float32 holds."""
    x, gate, up = (mx.zeros((9, 32), dtype) for _ in range(3))
    x[:, 0] = 1.0
    gate[:, 0] = -1e20
    up[:, 0] = 1e20
    assert (matmul(x, gate, up, gated=True)[0] == 0).all().item()


def test_what_does_not_fit_is_refused(matmul):
    x = mx.ones((2, 128))
    w = random_weights((16, 128), mx.float32, 4)
    eight, short = (random_weights((16, n), mx.float32, b) for n, b in ((128, 8), (64, 4)))
    for message, given, gated in (
        ("x has 64 columns, the weights have 128", (mx.ones((2, 64)), w), False),
        ("not int32", (mx.ones((2, 128), mx.int32), w), False),
        ("fewer than 8 elements", (mx.ones((1, 4)), mx.ones((16, 4))), False),
        ("are \\[N, K\\]", (x, mx.ones((3, 16, 128))), False),
        ("are of one kind", (x, w, eight), True),
        ("are of one kind", (x, w, eight, w), False),
        ("the weights have 64", (x, w, w, short), False),
        ("Gate and up differ", (x, w, random_weights((8, 128), mx.float32, 4)), True),
        ("1 matrices do not share", (x, w), True),
        ("5 matrices do not share", (x, w, w, w, w, w), False),
    ):
        with pytest.raises(KernelError, match=message):
            matmul(*given, gated=gated)


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


def test_the_first_layer_that_is_asked_multiplies_for_all(matmul):
    """In whatever order they are; another array is multiplied anew, and nothing is kept."""
    layers = [nn.Linear(128, n, bias=False) for n in (64, 32, 8)]
    calls = []

    def counted(x):
        calls.append(x)
        return matmul(x, *(layer.weight for layer in layers))

    fused = FusedProjections(counted)
    first, second = mx.random.normal((2, 5, 128))
    for order, x in (((1, 0, 2), first), ((0, 1, 2), second)):
        for place in order:
            expected = verify_matmul_reference(x, layers[place].weight)
            assert relative_error(fused(place, x), expected) <= TOLERANCES[mx.float32]
    assert len(calls) == 2 and calls[0] is first and calls[1] is second
    assert fused._waiting == (None, {})
    fused(0, first)
    assert relative_error(fused(1, second), layers[1](second)) <= TOLERANCES[mx.float32]


def test_threads_do_not_share_results():
    """A drafter's forwards are not locked: another thread asks between two layers of one."""
    layers = [nn.Linear(8, n, bias=False) for n in (8, 4, 4)]
    fused = FusedProjections(lambda x: [x @ layer.weight.T for layer in layers])
    first, second = (mx.random.normal((2, 8)) for _ in range(2))
    mx.eval(first, second, [layer.parameters() for layer in layers])

    def is_right(x, places=(0, 1, 2)):
        return [mx.allclose(fused(place, x), layers[place](x)).item() for place in places]

    assert is_right(first, [0])[0]
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(is_right, second).result() == [True] * 3
    assert all(is_right(first, [1, 2, 0]))
