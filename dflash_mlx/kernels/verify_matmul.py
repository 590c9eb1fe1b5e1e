"""x w^T for the few rows of a verify, and the gated unit silu(x gate^T) (x up^T) in one pass.

Stock kernels change with the number of rows, and use 32-row tiles for 16 rows.
`metal/verify_matmul.metal` has tiles of 16 rows and one order of sums for any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .source import KernelFactory, Launch, in_device_memory, metal_source
from .weights import (
    Weights,
    check_product,
    declaration,
    dequantized,
    form,
    input_names,
    inputs,
    kind,
    result_dtype,
    rows_in,
    traits,
)

TILE_ROWS, TILE_COLUMNS, THREADS = 16, 32, 128  # as in metal/matmul_tile.h

Prepared = tuple[mx.Dtype, Launch, Launch | None]  # of the product, and of the sums of its splits

# K is split until there are this many tiles, a few per core, but no split is shorter than the last.
ENOUGH_TILES, ENOUGH_TILES_LARGE = 256, 512
_SHORTEST_SPLIT = 512

_CALL = """
    threadgroup float scratch[dflash::kScratch];
    dflash::verify_matmul<T, GATE_UP, SPLIT>(
        x, left, right, y, x_shape[0], w_shape[0], w_shape[0], scratch,
        threadgroup_position_in_grid, threadgroups_per_grid, thread_index_in_threadgroup,
        simdgroup_index_in_threadgroup);
"""
_MERGE = """
    dflash::merge_splits<GATE_UP>(
        sums, y, SPLITS, threads_per_grid.x, thread_position_in_grid.x);
"""


def verify_matmul_reference(x: mx.array, w: Weights, up: Weights | None = None) -> mx.array:
    """What `VerifyMatmul` computes, in plain MLX: dequantized, multiplied in float32, rounded."""
    rows = x.astype(mx.float32)
    y = rows @ dequantized(w).T
    if up is not None:
        y = nn.silu(y) * (rows @ dequantized(up).T)
    return y.astype(result_dtype(x, w))


def splits_of_k(columns: int, depth: int, gate_up: bool = False, enough: int = ENOUGH_TILES) -> int:
    """The number of parts of the sums over K = `depth`, by the shape of w and the chip."""
    tiles = -(-columns // (TILE_COLUMNS // 2 if gate_up else TILE_COLUMNS))
    return max(1, min(enough // tiles, depth // _SHORTEST_SPLIT))


def form_headers(name: str) -> dict[str, str]:
    """The Metal sources of a product's kernels, by `weights.form`."""
    files = {"plain": name, "affine": name, "tensor": f"{name}_tensor"}
    return {of: metal_source(f"{file}.metal") for of, file in files.items()}


def product_kernels(
    metal_kernel: KernelFactory, name: str, inputs: list[str], call: str, headers: Mapping[str, str]
) -> dict[tuple[str, bool], Callable[..., list[mx.array]]]:
    """The kernels of a product, keyed by (`weights.form`, gate and up); `headers` has the forms.

    Their inputs are x, then `inputs`, then w and, with a gate, up. `call` is the Metal call; its
    weights are `left` and `right`. Without a gate, right is w and is not read.
    """
    kernels = {}
    for of, gate_up in product(headers, (False, True)):
        matrices = ["w", "up"] if gate_up else ["w"]
        declared = declaration("left", "w", of) + declaration("right", matrices[-1], of)
        kernels[of, gate_up] = metal_kernel(
            name=f"{name}_{of}{'_gate_up' * gate_up}",
            input_names=["x", *inputs, *(n for m in matrices for n in input_names(m, of))],
            output_names=["y"],
            source=declared + call,
            header=headers[of],
        )
    return kernels


class VerifyMatmul:
    """x w^T, or silu(x w^T) (x up^T), row by row the same bits for every number of rows.

    Args:
        metal_kernel: the factory of the kernels.
        enough: tiles to keep the chip busy; K is split until there are as many.
    """

    def __init__(
        self, metal_kernel: KernelFactory = mx.fast.metal_kernel, enough: int = ENOUGH_TILES
    ) -> None:
        self._enough = enough
        headers = form_headers("verify_matmul")
        self._products = product_kernels(metal_kernel, "verify_matmul", [], _CALL, headers)
        self._merge = metal_kernel(
            name="merge_splits",
            input_names=["sums"],
            output_names=["y"],
            source=_MERGE,
            header=metal_source("merge_splits.metal"),
        )
        self._launches: dict[Any, Prepared] = {}  # by the shapes and kinds of their inputs

    def __call__(self, x: mx.array, w: Weights, up: Weights | None = None) -> mx.array:
        """x [..., K] by w [N, K] -> [..., N], in the dtype MLX gives x @ w.T.

        Any number of rows; w is read once per 16 of them. `up`, if given, is of w's shape and kind,
        and w is then the gate. Sums are float32. Raises `KernelError`.
        """
        key = x.shape, x.dtype, kind(w), kind(up)
        prepared = self._launches.get(key)
        if prepared is None:
            prepared = self._launches[key] = self._prepare(x, w, up)
        dtype, product, merge = prepared
        given = [rows_in(dtype, x), *inputs(w), *(inputs(up) if up is not None else ())]
        (y,) = product(inputs=given)
        return y if merge is None else merge(inputs=[in_device_memory(y)])[0]

    def _prepare(self, x: mx.array, w: Weights, up: Weights | None) -> Prepared:
        weights = [w] if up is None else [w, up]
        check_product(x, "[N, K]", *weights)
        dtype, gate_up = result_dtype(x, *weights), up is not None
        rows, (columns, depth) = prod(x.shape[:-1]), w.shape
        splits = splits_of_k(columns, depth, gate_up, self._enough)
        tiles = -(-columns // (TILE_COLUMNS // len(weights)))
        outputs, shape = rows * columns, (*x.shape[:-1], columns)
        product = partial(
            self._products[form(dtype, *weights), gate_up],
            template=[
                *(("T", dtype), *traits(w).items()),
                *(("GATE_UP", gate_up), ("SPLIT", splits > 1)),
            ],
            grid=(tiles * THREADS, splits, -(-rows // TILE_ROWS)),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(splits, len(weights), rows, columns) if splits > 1 else shape],
            output_dtypes=[mx.float32 if splits > 1 else dtype],
        )
        if splits == 1:
            return dtype, product, None
        merge = partial(
            self._merge,
            template=[("GATE_UP", gate_up), ("SPLITS", splits)],
            grid=(outputs, 1, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[shape],
            output_dtypes=[dtype],
        )
        return dtype, product, merge
