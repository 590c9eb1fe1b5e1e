"""The products of a mixture of experts for the few rows of a verification.

The stock gathered product runs row by row and reads an expert's weights once per row that uses it.
`metal/verify_matmul_moe.metal` reads them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from ..errors import KernelError
from .launcher import Calls, Kernel, in_device_memory, kernel_name
from .verify_matmul import START, THREADS, TILE_COLUMNS, Prepared, VerifyMatmul
from .weights import (
    AffineWeights,
    Weights,
    check_products,
    dequantized,
    every_form,
    form,
    input_names,
    matrix,
    result_dtype,
    traits,
)

_CALL = """
dflash::verify_matmul_moe<T, {gated}>(x, {w}, {up}, order, experts, y, rows, w_shape[1],
    threadgroups_per_grid.y, scratch, tile, thread_index_in_threadgroup,
    simdgroup_index_in_threadgroup);
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
        words = w.words[experts]
        scales = w.scales[experts]
        biases = w.biases[experts]
        chosen = dequantized(
            AffineWeights(words, scales=scales, biases=biases, bits=w.bits, group_size=w.group_size)
        )
    else:
        chosen = w[experts].astype(mx.float32)
    return (chosen @ rows[..., None]).squeeze(-1)


class VerifyMatmulMoe(VerifyMatmul):
    """x w[e]^T or silu(x w[e]^T) (x up[e]^T) for the experts e of every row.

    Each row's bits depend only on that row, its experts and the shapes.
    """

    # The last experts, and their routing.
    _last: tuple[mx.array | None, list[mx.array]] = (None, [])

    def instances(self, dtype: mx.Dtype, stored: mx.Dtype, tensor_units: bool) -> Calls:
        """Small calls with one matrix, and with a gate and its partner."""
        x = mx.ones((1, 256), dtype)
        experts = mx.array([[0, 1]])
        for w in every_form(stored, False, 2, 33, 256):
            yield partial(self, x, w, experts=experts)
            yield partial(self, x, w, w, gated=True, experts=experts)

    def routing(self, experts: mx.array) -> list[mx.array]:
        """The order that sorts the experts, and the flat experts, which a unit's products share."""
        last_experts, routing = self._last
        if last_experts is not experts:
            pairs = experts.reshape(-1).astype(mx.uint32)
            routing = [in_device_memory(mx.argsort(pairs)), in_device_memory(pairs)]
            self._last = experts, routing
        return routing

    def _reference(
        self, x: mx.array, weights: Sequence[Weights], gated: bool, experts: mx.array
    ) -> list[mx.array]:
        w, *up = weights
        return [verify_matmul_moe_reference(x, w, experts, *up)]

    def _prepare(
        self, x: mx.array, weights: Sequence[Weights], gated: bool, experts: mx.array
    ) -> Prepared:
        check_products(x, layout="[E, N, K]", weights=weights, gated=gated)
        _check_routing(x, experts)
        dtype = result_dtype(x, *weights)
        columns = weights[0].shape[1]
        tiles = -(-columns // (TILE_COLUMNS // len(weights)))
        launch = self._launch(
            _product(form(dtype, weights[0]), gated),
            constants={"T": dtype, **traits(weights[0])},
            grid=(tiles * THREADS, experts.size, 1),
            threadgroup=(THREADS, 1, 1),
            outputs=[((*experts.shape, columns), dtype)],
        )
        cast = None if x.dtype == dtype else dtype
        return cast, launch, None


def _product(form: str, gated: bool) -> Kernel:
    names = ["w", "up"] if gated else ["w"]
    call = _CALL.format(gated=str(gated).lower(), w=matrix("w", form), up=matrix(names[-1], form))
    return Kernel(
        kernel_name("verify_matmul_moe", form, "gate_up" if gated else ""),
        file="verify_matmul_moe.metal",
        inputs=["x", *(n for name in names for n in input_names(name, form)), "order", "experts"],
        outputs=["y"],
        body=START + call,
    )


def _check_routing(x: mx.array, experts: mx.array) -> None:
    """One row of x per token, or per token and expert. Raises `KernelError`."""
    rows = x.size // x.shape[-1]
    if rows not in (experts.size, experts.size // experts.shape[-1]):
        raise KernelError(f"Rows {x.shape[:-1]} do not belong to experts {experts.shape}.")
