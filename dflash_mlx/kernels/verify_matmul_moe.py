"""The products of a mixture of experts for the few rows of a verify.

The stock gathered product runs row by row and reads an expert's weights once per row that uses it.
`metal/verify_matmul_moe.metal` reads them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import KernelError
from .selfcheck import KernelCheck, Noise, Proofs
from .source import KernelFactory, Launch, dtype_name, in_device_memory, metal_source
from .verify_matmul import THREADS, TILE_COLUMNS, product_check, product_kernels
from .weights import (
    AffineWeights,
    Weights,
    check_product,
    dequantized,
    form,
    inputs,
    kind,
    name_of,
    result_dtype,
    rows_in,
    traits,
)

_CALL = """
    threadgroup float scratch[dflash::kScratch];
    dflash::verify_matmul_moe<T, GATE_UP>(
        x, left, right, order, experts, y, x_shape[0], w_shape[1], threadgroups_per_grid.y, scratch,
        threadgroup_position_in_grid, thread_index_in_threadgroup, simdgroup_index_in_threadgroup);
"""


def verify_matmul_moe_reference(
    x: mx.array, w: Weights, experts: mx.array, up: Weights | None = None
) -> mx.array:
    """What `VerifyMatmulMoe` computes, in plain MLX and float32, from the experts in use."""
    _check_routing(x, experts)
    rows = x.astype(mx.float32)
    if x.ndim == experts.ndim:
        rows = rows[..., None, :]
    y = _routed(rows, w, experts)
    if up is not None:
        y = nn.silu(y) * _routed(rows, up, experts)
    return y.astype(result_dtype(x, w))


def _routed(rows: mx.array, w: Weights, experts: mx.array) -> mx.array:
    """Rows [..., 1 or k, K] times the weights of their experts [..., k] -> [..., k, N]."""
    if isinstance(w, AffineWeights):
        words, scales, biases = w.words[experts], w.scales[experts], w.biases[experts]
        chosen = dequantized(AffineWeights(words, scales, biases, w.bits, w.group_size))
    else:
        chosen = w[experts].astype(mx.float32)
    return (chosen @ rows[..., None]).squeeze(-1)


class VerifyMatmulMoe:
    """x w[e]^T or silu(x w[e]^T) (x up[e]^T) for the experts e of every row.

    Each row's bits depend on that row, its experts and the shapes alone.

    Args:
        metal_kernel: the factory of the kernels.
        proofs: the launches that are known to be right here.
    """

    def __init__(
        self,
        metal_kernel: KernelFactory = mx.fast.metal_kernel,
        proofs: Proofs | None = None,
    ) -> None:
        self._proofs = proofs or Proofs()
        headers = dict.fromkeys(("plain", "affine"), metal_source("verify_matmul_moe.metal"))
        self._products = product_kernels(
            metal_kernel, "verify_matmul_moe", ["order", "experts"], _CALL, headers
        )
        # By the shapes and kinds of their inputs.
        self._launches: dict[Any, tuple[mx.Dtype, Launch]] = {}
        self._routing: tuple[mx.array | None, Sequence[mx.array]] = None, ()  # of the last experts

    def __call__(
        self,
        x: mx.array,
        w: Weights,
        experts: mx.array,
        up: Weights | None = None,
    ) -> mx.array:
        """The products of each row with each of its experts: [..., k, N].

        Args:
            x: [..., K], rows for the tokens, or for each token and each of its experts.
            w: [E, N, K], the weights of all experts; read once for up to 16 rows of an expert.
            experts: integers in [0, E), [..., k]: the experts of every token.
            up: if given, of w's shape and kind; w is then the gate.

        The dtype is MLX's for x @ w.T, sums are float32. Raises `KernelError`.
        """
        key = x.shape, x.dtype, kind(w), kind(up), experts.shape
        prepared = self._launches.get(key)
        weights = (w,) if up is None else (w, up)
        if prepared is None:
            prepared = self._prepare(x, w, experts, up)
            self._proofs.require(self._check(prepared, x, experts, weights))
            self._launches[key] = prepared
        return self._launch(prepared, weights, x, experts)

    def _launch(
        self,
        prepared: tuple[mx.Dtype, Launch],
        weights: Sequence[Weights],
        x: mx.array,
        experts: mx.array,
    ) -> mx.array:
        dtype, product = prepared
        given = [rows_in(dtype, x), *self._sorted(experts)]
        for w in weights:
            given += inputs(w)
        return product(inputs=given)[0]

    def _check(
        self,
        prepared: tuple[mx.Dtype, Launch],
        x: mx.array,
        experts: mx.array,
        weights: Sequence[Weights],
    ) -> KernelCheck:
        """The check of a launch, with other rows, each with experts of its own."""
        noise, (*tokens, top_k) = Noise(x.dtype), experts.shape
        chosen = mx.argsort(noise(*tokens, weights[0].shape[0]), axis=-1)[..., :top_k]
        name = f"{' and '.join(map(name_of, weights))}{' as gate and up' * (len(weights) > 1)}"
        rows, depth = x.size // x.shape[-1], x.shape[-1]
        key = f"{rows} rows in {dtype_name(x)} by {experts.size} of {name}"
        given = noise(*(experts.shape if rows == experts.size else tokens), depth)

        def ours(*given: mx.array) -> list[mx.array]:
            return [self._launch(prepared, weights, *given)]

        def reference(x: mx.array, chosen: mx.array, *picked: Weights) -> list[mx.array]:
            w, *up = picked
            return [verify_matmul_moe_reference(x, w, chosen, *up)]

        return product_check(key, ours, reference, weights, given, chosen)

    def _sorted(self, experts: mx.array) -> Sequence[mx.array]:
        """What sorts the experts, and the experts, flat; the products of one unit share them."""
        known, routing = self._routing
        if known is not experts:
            pairs = experts.reshape(-1).astype(mx.uint32)
            routing = [in_device_memory(mx.argsort(pairs)), in_device_memory(pairs)]
            self._routing = experts, routing
        return routing

    def _prepare(
        self, x: mx.array, w: Weights, experts: mx.array, up: Weights | None
    ) -> tuple[mx.Dtype, Launch]:
        weights = [w] if up is None else [w, up]
        check_product(x, "[E, N, K]", *weights)
        _check_routing(x, experts)
        dtype, columns = result_dtype(x, *weights), w.shape[1]
        tiles = -(-columns // (TILE_COLUMNS // len(weights)))
        return dtype, partial(
            self._products[form(dtype, w), up is not None],
            template=[("T", dtype), *traits(w).items(), ("GATE_UP", up is not None)],
            grid=(tiles * THREADS, experts.size, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(*experts.shape, columns)],
            output_dtypes=[dtype],
        )


def _check_routing(x: mx.array, experts: mx.array) -> None:
    """One row of x per token, or per token and expert. Raises `KernelError`."""
    rows = x.size // x.shape[-1]
    if rows not in (experts.size, experts.size // experts.shape[-1]):
        raise KernelError(f"Rows {x.shape[:-1]} do not belong to experts {experts.shape}.")
