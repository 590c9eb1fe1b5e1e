"""verify_matmul: its float32 reference, the same bits for a row in every call, its work."""

from itertools import cycle, product

import mlx.core as mx
import numpy as np
import pytest
from kernel_check import (
    DTYPES,
    TOLERANCES,
    kernel_factory,
    on_gpu_or_emulator,
    random_weights,
    relative_error,
    same_bits,
)

from dflash_mlx.errors import KernelError
from dflash_mlx.kernels.verify_matmul import VerifyMatmul, splits_of_k, verify_matmul_reference
from dflash_mlx.kernels.weights import AffineWeights

pytestmark = on_gpu_or_emulator

SPLIT = (40, 1024)  # a shape whose K is split


@pytest.fixture(scope="module")
def matmul() -> VerifyMatmul:
    return VerifyMatmul(kernel_factory())


def check(matmul, x, *weights):
    """The kernel's result, after comparing it with the reference."""
    y, truth = matmul(x, *weights), verify_matmul_reference(x.astype(mx.float32), *weights)
    assert y.shape == (*x.shape[:-1], weights[0].shape[0])
    error = relative_error(y, truth)
    assert error <= TOLERANCES[y.dtype], (x.shape, weights[0].shape, error)
    return y


@pytest.mark.parametrize("dtype", [mx.bfloat16])
@pytest.mark.parametrize("bits,group", [*product((4, 8), (32, 64, 128))])
def test_affine_weights(matmul, dtype, bits, group):
    """1 to 16 rows; N and K below a tile, ragged, whole tiles."""
    mx.random.seed(bits * group)
    shapes = cycle([(24, 1), (33, 3), (64, 4), (97, 2), (40, 7)])  # columns, groups
    for rows, (columns, groups) in zip(range(1, 17), shapes, strict=False):
        w = random_weights((columns, groups * group), dtype, bits, group)
        y = check(matmul, mx.random.normal((rows, groups * group)).astype(dtype), w)
        assert y.dtype == dtype


@pytest.mark.parametrize("columns", [1, 2, 5])
def test_few_columns(matmul, columns):
    """The gate of a shared expert has one."""
    mx.random.seed(columns)
    w = random_weights((columns, 256), mx.float16, 4)
    check(matmul, mx.random.normal((16, 256)).astype(mx.float16), w)


@pytest.mark.parametrize("dtype,weights", [*product(DTYPES, DTYPES)])
def test_plain_weights(matmul, dtype, weights):
    """Also with K that is no multiple of anything, and with types that MLX would promote."""
    mx.random.seed(0)
    for rows, columns, depth in ((9, 1, 8), (16, 33, 105), (7, 64, 256), (12, 3, 300), (5, 9, 90)):
        w = random_weights((columns, depth), weights)
        y = check(matmul, mx.random.normal((rows, depth)).astype(dtype), w)
        assert y.dtype == mx.result_type(mx.array(0, dtype), mx.array(0, weights))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_gate_and_up(matmul, dtype, bits):
    mx.random.seed(1)
    for rows, shape in ((16, (33, 192)), (5, (16, 64)), (11, SPLIT)):
        gate, up = random_weights(shape, dtype, bits), random_weights(shape, dtype, bits)
        check(matmul, mx.random.normal((rows, shape[1])).astype(dtype), gate, up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_split_sums(matmul, dtype):
    mx.random.seed(2)
    for columns, depth in (SPLIT, (1, 1536), (24, 2080)):
        assert splits_of_k(columns, depth) > 1
        w = random_weights((columns, depth), dtype, 4, 32)
        check(matmul, mx.random.normal((13, depth)).astype(dtype), w)
    # Two sums in all: MLX declares so few elements as `constant`.
    check(matmul, mx.random.normal((1, 1024)).astype(dtype), random_weights((1, 1024), dtype))


def test_float32_activations_on_half_precision_weights(matmul):
    """What an M1 wants, which has no bfloat16: the result is float32, as with MLX."""
    mx.random.seed(3)
    w = random_weights((40, 128), mx.bfloat16, 4)
    assert check(matmul, mx.random.normal((16, 128)), w).dtype == mx.float32


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
    fields = vars(random_weights((16, 128), mx.float32, 4))
    changed = {k: v(fields[k]) if callable(v) else v for k, v in changes.items()}
    with pytest.raises(KernelError, match=message):
        AffineWeights(**{**fields, **changed})
