"""x w^T for the few rows of a verify: of one matrix, of several, and gated.

Stock kernels change with the number of rows, and use 32-row tiles for 16 rows.
`metal/verify_matmul.metal` has tiles of 16 rows and one order of sums for any number of rows. The
gated unit silu(x gate^T) (x up^T) is one pass. Queries, keys and values share a launch
(`metal/verify_qkv.metal`): alone, the matrices of keys and values have so few columns that their K
is split and merged, six launches a layer instead of one or two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product, zip_longest
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import KernelError
from .selfcheck import KernelCheck, Noise, Proofs
from .source import KernelFactory, Launch, dtype_name, in_device_memory, metal_source
from .weights import (
    AffineWeights,
    Weights,
    check_product,
    declaration,
    dequantized,
    form,
    input_names,
    inputs,
    kind,
    name_of,
    result_dtype,
    rows_in,
    traits,
)

TILE_ROWS, TILE_COLUMNS, THREADS = 16, 32, 128  # as in metal/matmul_tile.h

COUNTS = (2, 3, 4)  # of matrices that share a launch
COLUMNS = 8  # that a check compares: at the beginning, in the middle and at the end of a matrix
_LETTERS = "abcd"

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
_CALL_SEVERAL = """
    threadgroup float scratch[dflash::kScratch];
    dflash::verify_qkv<T, {split}>(
        x, a, b, c, d, {outputs}, x_shape[0], {columns}, scratch, threadgroup_position_in_grid,
        threadgroups_per_grid, thread_index_in_threadgroup, simdgroup_index_in_threadgroup);
"""
_MERGE_SEVERAL = """
    dflash::merge_qkv(sums, {outputs}, SPLITS, A, B, C, D, threads_per_grid.y,
        thread_position_in_grid.y, thread_position_in_grid.x);
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
        proofs: the launches that are known to be right here.
    """

    def __init__(
        self,
        metal_kernel: KernelFactory = mx.fast.metal_kernel,
        enough: int = ENOUGH_TILES,
        proofs: Proofs | None = None,
    ) -> None:
        self._enough, self._proofs = enough, proofs or Proofs()
        headers, merging = form_headers("verify_matmul"), metal_source("merge_splits.metal")
        self._products = product_kernels(metal_kernel, "verify_matmul", [], _CALL, headers)
        headers = form_headers("verify_qkv")
        self._several = {
            (count, of, split): _product(metal_kernel, headers[of], count, of, split)
            for count, of, split in product(COUNTS, headers, (False, True))
        }
        self._merges = {
            count: metal_kernel(
                name="merge_splits" if count == 1 else f"merge_qkv_{count}",
                input_names=["sums"],
                output_names=["y"] if count == 1 else _outputs(count),
                source=_MERGE if count == 1 else _MERGE_SEVERAL.format(outputs=_four(count)),
                header=merging,
            )
            for count in (1, *COUNTS)
        }
        self._launches: dict[Any, Prepared] = {}  # by the shapes and kinds of their inputs

    def __call__(self, x: mx.array, w: Weights, up: Weights | None = None) -> mx.array:
        """x [..., K] by w [N, K] -> [..., N], in the dtype MLX gives x @ w.T.

        Any number of rows; w is read once per 16 of them. `up`, if given, is of w's shape and kind,
        and w is then the gate. Sums are float32. Raises `KernelError`.
        """
        return self._multiply(x, (w,) if up is None else (w, up), up is not None)[0]

    def several(self, x: mx.array, weights: Sequence[Weights]) -> list[mx.array]:
        """x [..., K] by two to four w [N, K], alike in kind -> as many [..., N], in one launch.

        The bits may differ from those of one w: K is split by the matrices' total size. Raises
        `KernelError`.
        """
        check_several(x, weights)
        return self._multiply(x, weights, False)

    def _multiply(self, x: mx.array, weights: Sequence[Weights], gated: bool) -> list[mx.array]:
        key = gated, x.shape, x.dtype, *map(kind, weights)
        prepared = self._launches.get(key)
        if prepared is None:
            prepared = self._prepare(x, weights, gated)
            self._proofs.require(self._check(prepared, x, weights, gated))
            self._launches[key] = prepared
        return self._launch(prepared, x, weights)

    def _launch(
        self, prepared: Prepared, x: mx.array, weights: Sequence[Weights]
    ) -> list[mx.array]:
        dtype, product, merge = prepared
        given = [rows_in(dtype, x)]
        for w in weights:
            given += inputs(w)
        results = product(inputs=given)
        return results if merge is None else merge(inputs=[in_device_memory(*results)])

    def _check(
        self, prepared: Prepared, x: mx.array, weights: Sequence[Weights], gated: bool
    ) -> KernelCheck:
        """The check of a launch, with other rows of the same shape."""

        def reference(x: mx.array, *picked: Weights) -> list[mx.array]:
            if gated:
                return [verify_matmul_reference(x, *picked)]
            return [verify_matmul_reference(x, w) for w in picked]

        name = f"{' and '.join(map(name_of, weights))}{' as gate and up' * gated}"
        key = f"{prod(x.shape[:-1])} rows in {dtype_name(x)} by {name}"
        multiply = partial(self._launch, prepared, weights=weights)
        return product_check(key, multiply, reference, weights, Noise(x.dtype)(*x.shape))

    def _prepare(self, x: mx.array, weights: Sequence[Weights], gated: bool) -> Prepared:
        check_product(x, "[N, K]", *(weights if gated else weights[:1]))
        dtype, kinds = result_dtype(x, *weights), traits(weights[0])
        columns = [w.shape[0] for w in (weights[:1] if gated else weights)]
        rows, count, total = prod(x.shape[:-1]), len(columns), sum(columns)
        width = TILE_COLUMNS // (1 + gated)
        tiles = sum(-(-n // width) for n in columns)
        splits = splits_of_k(tiles * width, x.shape[-1], gated, self._enough)
        of, template = form(dtype, *weights), [("T", dtype), *kinds.items()]
        if count == 1:
            kernel = self._products[of, gated]
            template += [("GATE_UP", gated), ("SPLIT", splits > 1)]
        else:
            kernel = self._several[count, of, splits > 1]
        shapes, dtypes = [(*x.shape[:-1], n) for n in columns], [dtype] * count
        product = partial(
            kernel,
            template=template,
            grid=(tiles * THREADS, splits, -(-rows // TILE_ROWS)),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(splits, 1 + gated, rows, total)] if splits > 1 else shapes,
            output_dtypes=[mx.float32] if splits > 1 else dtypes,
        )
        if splits == 1:
            return dtype, product, None
        named = [("GATE_UP", gated)] if count == 1 else [*zip_longest("ABCD", columns, fillvalue=0)]
        merge = partial(
            self._merges[count],
            template=[("SPLITS", splits), *named],
            grid=(rows * total, 1, 1) if count == 1 else (total, rows, 1),
            threadgroup=(256, 1, 1),
            output_shapes=shapes,
            output_dtypes=dtypes,
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
    call = _CALL_SEVERAL.format(
        split=str(split).lower(),
        outputs=", ".join(["sums"] * 4) if split else _four(count),
        columns=", ".join(columns),
    )
    return metal_kernel(
        name=f"verify_qkv_{count}_{of}{'_split' * split}",
        input_names=["x", *(n for name in names for n in input_names(name, of))],
        output_names=["sums"] if split else _outputs(count),
        source="".join(declared) + call,
        header=header,
    )


def _outputs(count: int) -> list[str]:
    return [f"y_{letter}" for letter in _LETTERS[:count]]


def _four(count: int) -> str:
    """Four result arguments; the last name fills the missing ones."""
    names = _outputs(count)
    return ", ".join(names + names[-1:] * (len(_LETTERS) - count))


def check_several(x: mx.array, weights: Sequence[Weights]) -> None:
    """Raise `KernelError` for arguments that `VerifyMatmul.several` does not take."""
    if len(weights) not in COUNTS:
        raise KernelError(f"2 to 4 matrices can be fused, not {len(weights)}.")
    for w in weights:
        check_product(x, "[N, K]", w)
    if any(traits(w) != traits(weights[0]) for w in weights):
        kinds = ", ".join(map(str, map(traits, weights)))
        raise KernelError(f"The fused matrices are of different kinds: {kinds}.")


def product_check(
    key: str,
    multiply: Callable[..., list[mx.array]],
    reference: Callable[..., list[mx.array]],
    weights: Sequence[Weights],
    x: mx.array,
    *experts: mx.array,
) -> KernelCheck:
    """The check of products of x, and of the experts of its rows, by a few columns of each.

    Args:
        key: of the check.
        multiply, reference: take x, then experts; the reference then some rows of the weights.
        weights: [N, K], or [E, N, K] of experts.
    """
    columns = [_columns(w.shape[-2]) for w in weights]

    def ours() -> list[mx.array]:
        results = zip(multiply(x, *experts), columns, weights, strict=False)
        return [y[..., of] if y.shape[-1] == w.shape[-2] else y for y, of, w in results]

    def expected() -> list[mx.array]:
        picked = [dequantized(_picked(w, of)) for w, of in zip(weights, columns, strict=True)]
        return reference(x.astype(mx.float32), *experts, *picked)

    return KernelCheck(key, f"the product of {key}", ours, expected)


def _columns(count: int) -> mx.array:
    """The columns to compare: the reference of a whole matrix takes long."""
    starts = (0, count // 2, count - COLUMNS)
    return mx.array(
        sorted({at + i for at in starts for i in range(COLUMNS) if 0 <= at + i < count})
    )


def _picked(w: Weights, columns: mx.array) -> Weights:
    """Some columns of the result: rows of w [..., N, K]."""
    if isinstance(w, mx.array):
        return mx.take(w, columns, axis=-2)
    words, scales, biases = (mx.take(x, columns, axis=-2) for x in (w.words, w.scales, w.biases))
    return AffineWeights(words, scales, biases, w.bits, w.group_size)
