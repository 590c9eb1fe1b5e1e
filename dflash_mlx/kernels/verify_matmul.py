"""x w^T for the few rows of a verification: of one matrix, of several, and gated.

Stock kernels change with the number of rows, and use 32-row tiles for 16 rows.
`metal/verify_matmul.metal` has tiles of 16 rows and one order of sums for any number of rows. The
gated unit silu(x gate^T) (x up^T) is one pass. Queries, keys and values share a launch: alone, the
matrices of keys and values have so few columns that their K is split and merged, six launches a
layer instead of one or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import KernelError
from .launcher import (
    FEWEST_ELEMENTS,
    Calls,
    Kernel,
    KernelFactory,
    Launch,
    Launcher,
    dtype_name,
    kernel_name,
)
from .selfcheck import KernelCheck, KernelChecks, Noise
from .weights import (
    Weights,
    check_products,
    dequantized,
    describe_weights,
    every_form,
    form,
    input_names,
    inputs,
    kind,
    matrix,
    result_dtype,
    take_columns,
    traits,
)

# as in metal/matmul_tile.h
TILE_ROWS = 16
TILE_COLUMNS = 32
THREADS = 128

COUNTS = (2, 3, 4)  # of matrices that share a launch
COLUMNS = 8  # that a check compares: at the beginning, in the middle and at the end of a matrix
_LETTERS = "abcd"

# K is split until there are this many tiles, a few per core, but no split is shorter than the last.
ENOUGH_TILES = 256
ENOUGH_TILES_LARGE = 512
_SHORTEST_SPLIT = 512

START = """threadgroup float scratch[dflash::kScratch];
const int K = x_shape[x_ndim - 1];
int rows = 1;
for (int i = 0; i < x_ndim - 1; i++) rows *= x_shape[i];
uint3 tile = threadgroup_position_in_grid;
"""
_FIRST = """auto w = {matrix};
auto to = {output};
int N = {name}_shape[0], first = 0, before = 0, next = dflash::tiles_of<{gated}>(N);
"""
_NEXT = """if (int(tile.x) >= next) {{
  first = next, before += N, w = {matrix}, to = {output}, N = {name}_shape[0];
  next += dflash::tiles_of<{gated}>(N);
}}
"""
_CALL = """tile.x -= first;
dflash::verify_matmul<T, {gated}, {split}>(x, w, {up}, {to}, rows, N, {stride}, scratch, tile,
    threadgroups_per_grid, thread_index_in_threadgroup, simdgroup_index_in_threadgroup);
"""
_SUM = """int column = thread_position_in_grid.x;
const size_t row = thread_position_in_grid.y, total = threads_per_grid.x;
const float sum = dflash::sum_of_splits<{gated}>(
    sums, sizes[0], threads_per_grid.y * total, row * total + column);
"""
_STORE = """if (column >= 0 && column < sizes[{n}]) {output}[row * sizes[{n}] + column] = T(sum);
column -= sizes[{n}];
"""


def verify_matmul_reference(x: mx.array, w: Weights, up: Weights | None = None) -> mx.array:
    """What `VerifyMatmul` computes, in plain MLX: dequantized, multiplied in float32, rounded."""
    rows = x.astype(mx.float32)
    y = rows @ dequantized(w).T
    if up is not None:
        y = nn.silu(y) * (rows @ dequantized(up).T)
    return y.astype(result_dtype(x, w))


def splits_of_k(columns: int, depth: int, gate_up: bool = False, enough: int = ENOUGH_TILES) -> int:
    """Into how many parts the sums over K are split, by the shape of w and the chip.

    Args:
        columns, depth: N and K.
        gate_up: whether gate and up share each tile, half of its columns each.
        enough: tiles to keep the chip busy.
    """
    tiles = -(-columns // (TILE_COLUMNS // 2 if gate_up else TILE_COLUMNS))
    return max(1, min(enough // tiles, depth // _SHORTEST_SPLIT))


# Of a product: the dtype to which x is converted, the launch, and where K is split the launch that
# adds the splits, with their sizes.
Prepared = tuple[mx.Dtype | None, Launch, tuple[Launch, mx.array] | None]


class Product:
    """x [..., K] by fixed weights: by each of them, or gated by the first.

    Weights of the same kind share their launches.

    Args:
        kernels: makes the launches.
        weights: [N, K], or [E, N, K] for experts.
        gated: whether the first weight is the gate of the second.
    """

    def __init__(self, kernels: VerifyMatmul, weights: Sequence[Weights], gated: bool) -> None:
        self._kernels = kernels
        self.weights = weights
        self._gated = gated
        self._arrays = [array for w in weights for array in inputs(w)]
        self._known: dict[Any, Prepared] = {}

    @classmethod
    def of(cls, products: Sequence[Product], gated: bool) -> Product:
        """Products of the same x in one launch."""
        return cls(
            products[0]._kernels, [w for product in products for w in product.weights], gated
        )

    def __call__(self, x: mx.array, experts: mx.array | None = None) -> list[mx.array]:
        """The results [..., N], or [..., k, N] of the experts [..., k] of every row."""
        arrays = self._arrays
        key: Any = x.shape, x.dtype
        if experts is not None:
            key = (*key, experts.shape)
            arrays = arrays + self._kernels.routing(experts)
        prepared = self._known.get(key)
        if prepared is None:
            prepared = self._kernels.prepared(
                x, weights=self.weights, gated=self._gated, experts=experts
            )
            self._known[key] = prepared
        dtype, multiply, merge = prepared
        if dtype is not None:
            x = x.astype(dtype)
        results = multiply([x, *arrays])
        if merge is None:
            return results
        add, sizes = merge
        return add([*results, sizes])


class VerifyMatmul(Launcher):
    """x w^T, or silu(x w^T) (x up^T), row by row the same bits for every number of rows.

    The bits for several w may differ from those for one: K is split by their total size.

    Args:
        metal_kernel, checks: as in `Launcher`.
        enough: tiles to keep the chip busy; K is split until there are as many.
    """

    def __init__(
        self,
        metal_kernel: KernelFactory = mx.fast.metal_kernel,
        enough: int = ENOUGH_TILES,
        checks: KernelChecks | None = None,
    ) -> None:
        super().__init__(metal_kernel, checks)
        self._enough = enough

    def __call__(
        self, x: mx.array, *weights: Weights, gated: bool = False, experts: mx.array | None = None
    ) -> list[mx.array]:
        """x by each of some weights of one kind in one launch, or gated by the first.

        In the dtype MLX gives x @ w.T; sums are float32. Raises `KernelError`.

        Args:
            x: [..., K], any number of rows; of experts, a row for a token, or for a token and each
                of its experts.
            weights: [N, K], one to four; or [E, N, K], one. Read once per 16 rows.
            gated: two of one shape, of which the first is the gate: one result.
            experts: integers in [0, E), [..., k]: the experts of every token.
        """
        return Product(self, weights, gated)(x, experts)

    def instances(self, dtype: mx.Dtype, stored: mx.Dtype, tensor_units: bool) -> Calls:
        """Calls with a whole K, and with a K that is split."""
        for columns, depth in ((32, 256), (64, 1024)):
            for w in every_form(stored, tensor_units, columns, depth):
                x = mx.ones((9, depth), dtype)
                yield partial(self, x, w, w, gated=True)
                for count in (1, *COUNTS):
                    yield partial(self, x, *[w] * count)

    def prepared(
        self, x: mx.array, weights: Sequence[Weights], gated: bool, experts: mx.array | None
    ) -> Prepared:
        """The launches for x of this shape and weights of these kinds."""
        key = (gated, x.shape, x.dtype, *map(kind, weights))
        if experts is not None:
            key = (*key, experts.shape)
        prepare = partial(self._prepare, x, weights, gated, experts)
        return self._checked(key, prepare, partial(self._check, x, weights, gated, experts))

    def _check(
        self, x: mx.array, weights: Sequence[Weights], gated: bool, experts: Any
    ) -> KernelCheck:
        """The check of a launch with other rows of the same shape, by a few columns of each w."""
        noise = Noise(x.dtype)
        shape = x.shape
        key = f"{prod(shape[:-1])} rows in {dtype_name(x)} by "
        if experts is not None:  # each row gets experts of its own, as after a router
            *tokens, top_k = experts.shape
            key += f"{experts.size} of "
            has_row_per_expert = prod(shape[:-1]) == experts.size
            leading = experts.shape if has_row_per_expert else tokens
            shape = (*leading, shape[-1])
            scores = noise(*tokens, weights[0].shape[0])
            experts = mx.argsort(scores, axis=-1)[..., :top_k].astype(mx.uint32)
        key += f"{' and '.join(map(describe_weights, weights))}{' as gate and up' * gated}"
        rows = noise(*shape)
        columns = [_columns(w.shape[-2]) for w in weights]

        kernel = type(self)(self._metal_kernel, self._enough)  # which checks nothing

        def ours() -> list[mx.array]:
            results = kernel(rows, *weights, gated=gated, experts=experts)
            parts = zip(results, columns, weights, strict=False)  # a gated pair has one result
            # A result of a wrong shape stays as it is, so that the check reports the shape.
            return [y[..., kept] if y.shape[-1] == w.shape[-2] else y for y, kept, w in parts]

        def reference() -> list[mx.array]:
            pairs = zip(weights, columns, strict=True)
            compared = [dequantized(take_columns(w, kept)) for w, kept in pairs]
            return self._reference(
                rows.astype(mx.float32), weights=compared, gated=gated, experts=experts
            )

        return KernelCheck(key, ours, reference)

    def routing(self, experts: mx.array) -> list[mx.array]:
        """What the kernel reads of the experts of every row."""
        raise KernelError("This product has no experts.")

    def _reference(
        self, x: mx.array, weights: Sequence[Weights], gated: bool, experts: Any
    ) -> list[mx.array]:
        if gated:
            return [verify_matmul_reference(x, *weights)]
        return [verify_matmul_reference(x, w) for w in weights]

    def _prepare(
        self, x: mx.array, weights: Sequence[Weights], gated: bool, experts: Any
    ) -> Prepared:
        check_products(x, layout="[N, K]", weights=weights, gated=gated, most=COUNTS[-1])
        dtype = result_dtype(x, *weights)
        weight_constants = traits(weights[0])
        columns = [w.shape[0] for w in (weights[:1] if gated else weights)]
        rows = prod(x.shape[:-1])
        total = sum(columns)
        width = TILE_COLUMNS // (1 + gated)  # gate and up share a tile
        tiles = sum(-(-n // width) for n in columns)
        splits = splits_of_k(tiles * width, depth=x.shape[-1], gate_up=gated, enough=self._enough)
        split = splits > 1
        results = [((*x.shape[:-1], n), dtype) for n in columns]
        # MLX passes arrays under 8 elements in constant memory. The kernel reads no shape here, so
        # the sums are one flat array that is long enough.
        size = max(FEWEST_ELEMENTS, splits * (1 + gated) * rows * total)
        multiply = self._launch(
            _product(len(columns), form=form(dtype, *weights), gated=gated, split=split),
            constants={"T": dtype, **weight_constants},
            grid=(tiles * THREADS, splits, -(-rows // TILE_ROWS)),
            threadgroup=(THREADS, 1, 1),
            outputs=[((size,), mx.float32)] if split else results,
        )
        cast = None if x.dtype == dtype else dtype
        if not split:
            return cast, multiply, None
        merge = self._launch(
            _merge(len(columns), gated),
            constants={"T": dtype},
            grid=(total, rows, 1),
            threadgroup=(256, 1, 1),
            outputs=results,
        )
        return cast, multiply, (merge, mx.array([splits, *columns]))


def _product(count: int, form: str, gated: bool, split: bool) -> Kernel:
    """The kernel for so many matrices, or for a gate and its partner."""
    names = list(_LETTERS[:count])
    outputs = _outputs(count)
    flags = {"gated": _literal(gated), "split": _literal(split)}
    body = START
    for index, (name, output) in enumerate(zip(names, outputs, strict=True)):
        named = {
            "name": name,
            "matrix": matrix(name, form),
            "output": output if not split else "sums",
        }
        body += (_NEXT if index else _FIRST).format(**named, **flags)
    body += _CALL.format(
        up=matrix("up", form) if gated else "w",
        to="to + before" if split else "to",
        stride=" + ".join(f"{name}_shape[0]" for name in names) if split else "N",
        **flags,
    )
    all_names = [*names, "up"] if gated else names
    return Kernel(
        kernel_name("verify_matmul", form, _shared_name(count, gated), "split" if split else ""),
        file="verify_matmul_tensor.metal" if form == "tensor" else "verify_matmul.metal",
        inputs=["x", *(array for name in all_names for array in input_names(name, form))],
        outputs=["sums"] if split else outputs,
        body=body,
    )


def _merge(count: int, gated: bool) -> Kernel:
    """The kernel that adds the splits of `count` results."""
    body = _SUM.format(gated=_literal(gated))
    outputs = _outputs(count)
    for number, output in enumerate(outputs, start=1):
        body += _STORE.format(n=number, output=output)
    return Kernel(
        kernel_name("merge_splits", _shared_name(count, gated)),
        file="merge_splits.metal",
        inputs=["sums", "sizes"],
        outputs=outputs,
        body=body,
    )


def _shared_name(count: int, gated: bool) -> str:
    """The part of a kernel's name that says how many matrices share it, and how."""
    return kernel_name("gate_up" if gated else "", str(count) if count > 1 else "")


def _outputs(count: int) -> list[str]:
    return [f"y_{letter}" for letter in _LETTERS[:count]]


def _literal(flag: bool) -> str:
    return str(flag).lower()


def _columns(count: int) -> mx.array:
    """The columns to compare, because the reference of a whole matrix takes long."""
    columns: set[int] = set()
    for start in (0, count // 2, count - COLUMNS):
        columns.update(range(max(0, start), min(count, start + COLUMNS)))
    return mx.array(sorted(columns))
