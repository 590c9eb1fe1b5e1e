"""A few products of the same rows in one launch: queries, keys and values.

Alone, the matrices of keys and values have so few columns that their K is split and merged: six
launches a layer instead of one or two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product, zip_longest
from math import prod
from typing import Any

import mlx.core as mx

from ..errors import KernelError
from .source import KernelFactory, in_device_memory, metal_source
from .verify_matmul import (
    ENOUGH_TILES,
    THREADS,
    TILE_COLUMNS,
    TILE_ROWS,
    Prepared,
    form_headers,
    splits_of_k,
    verify_matmul_reference,
)
from .weights import (
    Weights,
    check_product,
    declaration,
    form,
    input_names,
    inputs,
    kind,
    result_dtype,
    rows_in,
    traits,
)

COUNTS = (2, 3, 4)  # of fused matrices
_LETTERS = "abcd"
_CALL = """
    threadgroup float scratch[dflash::kScratch];
    dflash::verify_qkv<T, {split}>(
        x, a, b, c, d, {outputs}, x_shape[0], {columns}, scratch, threadgroup_position_in_grid,
        threadgroups_per_grid, thread_index_in_threadgroup, simdgroup_index_in_threadgroup);
"""
_MERGE = """
    dflash::merge_qkv(sums, {outputs}, SPLITS, A, B, C, D, threads_per_grid.y,
        thread_position_in_grid.y, thread_position_in_grid.x);
"""


class VerifyQkv:
    """x w^T for a few matrices, row by row the same bits for every number of rows.

    The bits may differ from `VerifyMatmul`: K is split by the matrices' total size.

    Args:
        metal_kernel: the factory of the kernels.
        enough: as of `VerifyMatmul`.
    """

    def __init__(
        self, metal_kernel: KernelFactory = mx.fast.metal_kernel, enough: int = ENOUGH_TILES
    ) -> None:
        self._enough = enough
        headers, merging = form_headers("verify_qkv"), metal_source("merge_splits.metal")
        self._products = {
            (count, of, split): _product(metal_kernel, headers[of], count, of, split)
            for count, of, split in product(COUNTS, headers, (False, True))
        }
        self._merges = {
            count: metal_kernel(
                name=f"merge_qkv_{count}",
                input_names=["sums"],
                output_names=_outputs(count),
                source=_MERGE.format(outputs=_four(_outputs(count))),
                header=merging,
            )
            for count in COUNTS
        }
        self._launches: dict[Any, Prepared] = {}  # by the shapes and kinds of their inputs

    def __call__(self, x: mx.array, weights: Sequence[Weights]) -> list[mx.array]:
        """x [..., K] by two to four w [N, K] -> as many [..., N], in the dtype of x @ w.T.

        Any number of rows; the weights, alike in kind, are read once per 16 of them. Sums are
        float32. Raises `KernelError`.
        """
        key = x.shape, x.dtype, *map(kind, weights)
        prepared = self._launches.get(key)
        if prepared is None:
            prepared = self._launches[key] = self._prepare(x, weights)
        dtype, product, merge = prepared
        given = [rows_in(dtype, x)]
        for w in weights:
            given += inputs(w)
        results = product(inputs=given)
        return results if merge is None else merge(inputs=[in_device_memory(*results)])

    def _prepare(self, x: mx.array, weights: Sequence[Weights]) -> Prepared:
        check(x, weights)
        dtype, count = result_dtype(x, *weights), len(weights)
        rows, depth, columns = prod(x.shape[:-1]), x.shape[-1], [w.shape[0] for w in weights]
        tiles = sum(-(-n // TILE_COLUMNS) for n in columns)
        splits = splits_of_k(tiles * TILE_COLUMNS, depth, enough=self._enough)
        shapes = [(*x.shape[:-1], n) for n in columns]
        product = partial(
            self._products[count, form(dtype, *weights), splits > 1],
            template=[("T", dtype), *traits(weights[0]).items()],
            grid=(tiles * THREADS, splits, -(-rows // TILE_ROWS)),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(splits, rows, sum(columns))] if splits > 1 else shapes,
            output_dtypes=[mx.float32] if splits > 1 else [dtype] * count,
        )
        if splits == 1:
            return dtype, product, None
        merge = partial(
            self._merges[count],
            template=[("SPLITS", splits), *zip_longest("ABCD", columns, fillvalue=0)],
            grid=(sum(columns), rows, 1),
            threadgroup=(256, 1, 1),
            output_shapes=shapes,
            output_dtypes=[dtype] * count,
        )
        return dtype, product, merge


def _product(
    metal_kernel: KernelFactory, header: str, count: int, of: str, split: bool
) -> Callable[..., list[mx.array]]:
    """The kernel for `count` matrices; the last one fills the missing arguments."""
    names = [f"w_{letter}" for letter in _LETTERS[:count]]
    declared = [
        declaration(variable, names[min(i, count - 1)], of) for i, variable in enumerate(_LETTERS)
    ]
    columns = [f"{name}_shape[0]" for name in names] + ["0"] * (len(_LETTERS) - count)
    outputs = ["sums"] if split else _outputs(count)
    call = _CALL.format(
        split=str(split).lower(), outputs=_four(outputs), columns=", ".join(columns)
    )
    return metal_kernel(
        name=f"verify_qkv_{count}_{of}{'_split' * split}",
        input_names=["x", *(n for name in names for n in input_names(name, of))],
        output_names=outputs,
        source="".join(declared) + call,
        header=header,
    )


def _outputs(count: int) -> list[str]:
    return [f"y_{letter}" for letter in _LETTERS[:count]]


def _four(names: list[str]) -> str:
    """Four result arguments; the last name fills the missing ones."""
    return ", ".join(names + names[-1:] * (len(_LETTERS) - len(names)))


def verify_qkv_reference(x: mx.array, weights: Sequence[Weights]) -> list[mx.array]:
    """What `VerifyQkv` computes, in plain MLX."""
    check(x, weights)
    dtype = result_dtype(x, *weights)
    return [verify_matmul_reference(x, w).astype(dtype) for w in weights]


def check(x: mx.array, weights: Sequence[Weights]) -> None:
    """Raise `KernelError` for arguments that `VerifyQkv` does not take."""
    if len(weights) not in COUNTS:
        raise KernelError(f"2 to 4 matrices can be fused, not {len(weights)}.")
    for w in weights:
        check_product(x, "[N, K]", w)
    if any(traits(w) != traits(weights[0]) for w in weights):
        kinds = ", ".join(map(str, map(traits, weights)))
        raise KernelError(f"The fused matrices are of different kinds: {kinds}.")
