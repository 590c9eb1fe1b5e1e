"""VerifyMatmul.several: a few products in one launch, against the product of each."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import pytest
from kernel_check import (
    DTYPES,
    TOLERANCES,
    kernel_factory,
    on_gpu_or_emulator,
    product,
    random_weights,
    relative_error,
    same_bits,
    within_rounding,
)

from dflash_mlx.errors import KernelError
from dflash_mlx.kernels.fused import FusedProjections
from dflash_mlx.kernels.verify_matmul import VerifyMatmul, verify_matmul_reference

pytestmark = on_gpu_or_emulator

# Columns and K: whole tiles, ragged ones, and so few that K is split.
SHAPES = [
    ((64, 32, 32), 256),
    ((40, 1, 33), 192),
    ((72, 9, 24), 1024),
    ((33, 64), 64),
    ((96, 40, 3, 2), 1024),
]
KINDS = [(at, *kind) for at, kind in enumerate(itertools.product(DTYPES, (None, 4, 8)))]


@pytest.fixture(scope="module")
def beside():
    return VerifyMatmul(kernel_factory()).several


@pytest.mark.parametrize(("at", "dtype", "bits"), KINDS)
def test_each_product_is_rounded_once(beside, at, dtype, bits):
    """In two shapes, so that every dtype meets every shape."""
    mx.random.seed(1)
    for rows, (columns, depth) in ((16, SHAPES[at % 5]), (37, SHAPES[(at + 2) % 5])):
        weights = [random_weights((n, depth), dtype, bits) for n in columns]
        x = mx.random.normal((1, rows, depth)).astype(dtype)
        for y, w in zip(beside(x, weights), weights, strict=True):
            truth, magnitude = product(x, w)
            assert y.shape == truth.shape and y.dtype == dtype
            assert within_rounding(y, truth, magnitude)


@pytest.mark.parametrize("columns,depth", SHAPES)
def test_a_row_has_the_same_bits_in_every_call(beside, columns, depth):
    mx.random.seed(2)
    weights = [random_weights((n, depth), mx.bfloat16, 4) for n in columns]
    x = mx.random.normal((37, depth)).astype(mx.bfloat16)
    together = beside(x, weights)
    for row in (0, 7, 8, 16, 36):
        alone = beside(x[row : row + 1], weights)
        assert all(same_bits(one, y[row : row + 1]) for one, y in zip(alone, together, strict=True))


def test_rows_of_one_shape_in_two_dtypes(beside):
    weights = [random_weights((n, 64), mx.bfloat16, 4) for n in (32, 8)]
    for dtype in (mx.bfloat16, mx.float32):
        x = mx.ones((17, 1, 64), dtype)
        for y, w in zip(beside(x, weights), weights, strict=True):
            assert y.dtype == dtype and within_rounding(y, *product(x, w))


def test_what_does_not_fit_is_refused(beside):
    x, w = mx.ones((2, 128)), random_weights((16, 128), mx.float32, 4)
    other = random_weights((16, 128), mx.float32, 8)
    for weights, words in [
        ([w], "2 to 4 matrices"),
        ([w, other, w], "different kinds"),
        ([w, w, random_weights((16, 64), mx.float32, 4)], "the weights have 64"),
    ]:
        with pytest.raises(KernelError, match=words):
            beside(x, weights)


def test_the_first_layer_that_is_asked_multiplies_for_all():
    """In whatever order they are; another array is multiplied anew, and nothing is kept."""
    kernel, calls = VerifyMatmul(kernel_factory()).several, []

    def counted(x, weights):
        calls.append(x)
        return kernel(x, weights)

    layers = [nn.Linear(128, n, bias=False) for n in (64, 32, 8)]
    beside = FusedProjections(counted, layers)
    one, other = mx.random.normal((2, 5, 128))
    for order, x in (((1, 0, 2), one), ((0, 1, 2), other)):
        for place in order:
            expected = verify_matmul_reference(x, layers[place].weight)
            assert relative_error(beside(layers[place], x), expected) <= TOLERANCES[mx.float32]
    assert len(calls) == 2 and calls[0] is one and calls[1] is other and beside._x is None
    beside(layers[0], one)
    assert relative_error(beside(layers[1], other), layers[1](other)) <= TOLERANCES[mx.float32]


def test_threads_do_not_share_results():
    """A drafter's forwards are not locked: another thread asks between two layers of one."""
    layers = [nn.Linear(8, n, bias=False) for n in (8, 4, 4)]
    fused = FusedProjections(lambda x, weights: [x @ w.T for w in weights], layers)
    one, other = (mx.random.normal((2, 8)) for _ in range(2))
    mx.eval(one, other, [layer.parameters() for layer in layers])

    def of(x):
        return [mx.allclose(fused(layer, x), layer(x)).item() for layer in layers]

    first = fused(layers[0], one)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(of, other).result() == [True] * 3
    ours = [first, *(fused(layer, one) for layer in layers[1:])]
    assert all(mx.allclose(y, layer(one)).item() for y, layer in zip(ours, layers, strict=True))
