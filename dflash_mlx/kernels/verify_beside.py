"""Three products of the same rows in one launch: queries, keys and values.

Alone, the matrices of keys and values have so few columns that their K is split and the sums are
merged by another launch: six launches a layer where one or two do.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import mlx.core as mx

from ..errors import KernelError
from .source import KernelFactory, in_device_memory, metal_source
from .verify_matmul import (
    ENOUGH_TILES,
    THREADS,
    TILE_COLUMNS,
    TILE_ROWS,
    splits_of_k,
    verify_matmul_reference,
)
from .weights import (
    AffineWeights,
    Weights,
    check_product,
    declaration,
    input_names,
    inputs,
    result_dtype,
    traits,
)

COUNT = 3
_NAMES = ("w", "w_b", "w_c")
_SHAPES = "x_shape[0], w_shape[0], w_b_shape[0], w_c_shape[0]"
_CALL = """
    threadgroup float scratch[dflash::kScratch];
    dflash::verify_beside<T, {split}>(
        x, a, b, c, {outputs}, {shapes}, scratch, threadgroup_position_in_grid,
        threadgroups_per_grid, thread_index_in_threadgroup, simdgroup_index_in_threadgroup);
"""
_MERGE = """
    dflash::merge_beside(sums, y_a, y_b, y_c, SPLITS, A, B, C, threads_per_grid.y,
        thread_position_in_grid.y, thread_position_in_grid.x);
"""


class VerifyBeside:
    """x w^T for three matrices, row by row the same bits for every number of rows.

    The bits need not be those of `VerifyMatmul`: K is split by what the three have together.

    Args:
        metal_kernel: the factory of the kernels.
        enough: as of `VerifyMatmul`.
    """

    def __init__(
        self, metal_kernel: KernelFactory = mx.fast.metal_kernel, enough: int = ENOUGH_TILES
    ) -> None:
        self._enough = enough
        header = metal_source("verify_beside.metal")
        self._products = {}
        for affine in (False, True):
            names = [n for matrix in _NAMES for n in input_names(matrix, affine)]
            declared = "".join(
                declaration(variable, matrix, affine)
                for variable, matrix in zip("abc", _NAMES, strict=True)
            )
            for split, outputs in ((False, ["y_a", "y_b", "y_c"]), (True, ["sums"])):
                passed = ", ".join(outputs * (COUNT // len(outputs)))
                call = _CALL.format(split=str(split).lower(), outputs=passed, shapes=_SHAPES)
                self._products[affine, split] = metal_kernel(
                    name=f"verify_beside_{'affine' if affine else 'plain'}{'_split' * split}",
                    input_names=["x", *names],
                    output_names=outputs,
                    source=declared + call,
                    header=header,
                )
        self._merge = metal_kernel(
            name="merge_beside",
            input_names=["sums"],
            output_names=["y_a", "y_b", "y_c"],
            source=_MERGE,
            header=metal_source("merge_splits.metal"),
        )

    def __call__(self, x: mx.array, weights: Sequence[Weights]) -> list[mx.array]:
        """x [..., K] by three w [N, K] -> three [..., N], in the dtype MLX gives x @ w.T.

        Any number of rows; the weights, alike in kind, are read once per 16 of them. Sums are
        float32. Raises `KernelError`.
        """
        check(x, weights)
        dtype = result_dtype(x, *weights)
        rows, depth, columns = prod(x.shape[:-1]), x.shape[-1], [w.shape[0] for w in weights]
        tiles = sum(-(-n // TILE_COLUMNS) for n in columns)
        splits = splits_of_k(tiles * TILE_COLUMNS, depth, enough=self._enough)
        shapes = [(rows, n) for n in columns]
        results = self._products[isinstance(weights[0], AffineWeights), splits > 1](
            inputs=[x.astype(dtype).reshape(rows, depth), *(a for w in weights for a in inputs(w))],
            template=[("T", dtype), *traits(weights[0]).items()],
            grid=(tiles * THREADS, splits, -(-rows // TILE_ROWS)),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(splits, rows, sum(columns))] if splits > 1 else shapes,
            output_dtypes=[mx.float32] if splits > 1 else [dtype] * COUNT,
        )
        if splits > 1:
            results = self._merge(
                inputs=[in_device_memory(*results)],
                template=[("SPLITS", splits), *zip("ABC", columns, strict=True)],
                grid=(sum(columns), rows, 1),
                threadgroup=(min(sum(columns), 256), 1, 1),
                output_shapes=shapes,
                output_dtypes=[dtype] * COUNT,
            )
        return [y.reshape(*x.shape[:-1], n) for y, n in zip(results, columns, strict=True)]


def verify_beside_reference(x: mx.array, weights: Sequence[Weights]) -> list[mx.array]:
    """What `VerifyBeside` computes, in plain MLX."""
    check(x, weights)
    dtype = result_dtype(x, *weights)
    return [verify_matmul_reference(x, w).astype(dtype) for w in weights]


def check(x: mx.array, weights: Sequence[Weights]) -> None:
    """Raise `KernelError` for arguments that `VerifyBeside` does not take."""
    if len(weights) != COUNT:
        raise KernelError(f"{COUNT} matrices are multiplied side by side, not {len(weights)}.")
    for w in weights:
        check_product(x, "[N, K]", w)
    if any(traits(w) != traits(weights[0]) for w in weights):
        kinds = ", ".join(map(str, map(traits, weights)))
        raise KernelError(f"The matrices side by side are of different kinds: {kinds}.")
