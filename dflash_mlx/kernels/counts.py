"""What a product of ours does on a GPU, by its shape: a change of a kernel is compared by these.

Formulas of `metal/verify_matmul.metal` and the files it includes. The tests hold them to what the
emulator counts, so they cannot stay behind the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from .choose import has_kernel
from .shapes import Matrix
from .verify_matmul import ENOUGH_TILES, TILE_COLUMNS, TILE_ROWS, splits_of_k

_PLAIN_STEP = 32  # along K, of weights that are not quantized


@dataclass(frozen=True)
class Counts:
    """What one product of x [M, K] by w [N, K] does, without the merging of split sums.

    Attributes:
        threadgroups: of 128 threads.
        barriers: in all threadgroups; none of them in the loop along K.
        weight_bytes: read of w, its scales and biases, each by as many tiles of rows as there are.
        result_bytes: written; float32 where K is split.
        matrix_products: of 8x8 by 8x8, 512 multiply-accumulates each.
        fmas: that the text asks for: of codes, scales and biases.
        exchanges: of values between the lanes of a SIMD-group.
        registers: of 32 bits, of a lane's arrays: sums, rows of x, weights on their way.
    """

    threadgroups: int
    barriers: int
    weight_bytes: int
    result_bytes: int
    matrix_products: int
    fmas: int
    exchanges: int
    registers: int


def product_counts(matrix: Matrix, rows: int, enough: int = ENOUGH_TILES) -> Counts | None:
    """Of so many rows of x, in float32 for weights in it and else in 16 bits.

    None for experts, whose rows are known on the device alone, and what has no kernel of ours.
    """
    if matrix.experts or not has_kernel(matrix):
        return None
    affine, step = matrix.kind == "affine", matrix.group_size or _PLAIN_STEP
    tiles, steps = -(-matrix.columns // TILE_COLUMNS), -(-matrix.depth // step)
    splits = splits_of_k(matrix.columns, matrix.depth, enough=enough)
    row_tiles = -(-rows // TILE_ROWS)
    # A last tile of up to 8 rows is half of one.
    eights = 2 * row_tiles - (0 < rows % TILE_ROWS <= TILE_ROWS // 2)
    products = eights * tiles * (TILE_COLUMNS // 8) * steps * (step // 8)
    codes = row_tiles * tiles * TILE_COLUMNS * steps * step
    scaled = steps * (16 * eights * tiles * TILE_COLUMNS + 4 * row_tiles * matrix.columns)
    wide = not affine and matrix.bits == 32
    sums, pieces = 16 * (1 + affine), 4 * (step * matrix.bits // 128 + 2 * affine)
    return Counts(
        threadgroups=tiles * splits * row_tiles,
        barriers=2 * tiles * splits * row_tiles,
        weight_bytes=row_tiles * matrix.size,
        result_bytes=rows * matrix.columns * (4 * splits if splits > 1 or wide else 2),
        matrix_products=products,
        fmas=codes + scaled if affine else 0,
        exchanges=3 * 2 * eights * tiles * steps if affine else 0,
        registers=sums + pieces + 8 * (1 + wide) + 4 * affine,
    )
