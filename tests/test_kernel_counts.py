"""The formulas of what a product does are what the emulator counts."""

import mlx.core as mx
import pytest
from kernel_check import Counted, random_weights
from metal_host import needs_compiler

from dflash_mlx.kernels.counts import product_counts
from dflash_mlx.kernels.shapes import Matrix
from dflash_mlx.kernels.verify_matmul import VerifyMatmul
from dflash_mlx.kernels.weights import AffineWeights

pytestmark = needs_compiler


def matrix_of(w) -> Matrix:
    """The shape of weights, as `matrices` finds it in a model."""
    columns, depth = w.shape
    if not isinstance(w, AffineWeights):
        return Matrix(columns, depth, w.nbytes, "float", 8 * w.itemsize)
    size = w.words.nbytes + w.scales.nbytes + w.biases.nbytes
    return Matrix(columns, depth, size, "affine", w.bits, w.group_size)


@pytest.mark.parametrize("rows", [1, 16, 17, 31])
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("shape", [(33, 192), (64, 1024)])
def test_counted_is_what_the_formulas_say(rows, bits, shape):
    """Ragged columns, half tiles, several tiles of rows, sums in splits."""
    factory, w = Counted(), random_weights(shape, mx.bfloat16, bits)
    VerifyMatmul(factory)(mx.ones((rows, shape[1]), mx.bfloat16), w)
    counted = factory.counters(f"verify_matmul_{'affine' if bits else 'plain'}")
    said = product_counts(matrix_of(w), rows)
    assert said is not None
    assert counted.barriers == said.barriers == 2 * said.threadgroups
    assert counted.multiply_accumulates == 512 * said.matrix_products
    assert counted.fmas == said.fmas and counted.exchanges == said.exchanges
    assert counted.buffers["y"].written == said.result_bytes
    tiles_of_rows, names = -(-rows // 16), ("w", "w_scales", "w_biases")
    read = sum(counted.buffers[name].distinct_read for name in names if name in counted.buffers)
    assert said.weight_bytes == tiles_of_rows * read


def test_registers_are_those_of_the_ladder():
    """16 totals, 16 sums, 8 pairs of x and their 4 sums, 8 words, 8 scales and biases."""
    affine, plain = (matrix_of(random_weights((64, 64), mx.float16, bits)) for bits in (4, None))
    assert product_counts(affine, 16).registers == 16 + 16 + 8 + 4 + 8 + 8
    assert product_counts(plain, 16).registers == 16 + 8 + 16
    wide = matrix_of(random_weights((64, 64), mx.float32))
    assert product_counts(wide, 16).registers == 16 + 16 + 32


def test_what_has_no_product_of_ours_is_not_counted():
    assert product_counts(Matrix(64, 64, 1, "mxfp4", 4, 32), 16) is None
    assert product_counts(Matrix(64, 64, 1, "affine", 4, 64, experts=8, top_k=2), 16) is None
