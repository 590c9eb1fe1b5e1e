"""The drafter's keys and values of newly committed tokens, for all of its layers in one launch.

All layers of a DFlash drafter see the same context feature, so after every round each makes a few
keys and values of it: ten small products, five norms and five rotations for a drafter of five
layers, each a launch that costs more than its work. `metal/context_kv.metal` does them together.
For the many rows of a prefill there is nothing to gain.
"""

from __future__ import annotations

import mlx.core as mx

from ..errors import KernelError
from .source import KernelFactory, dtype_name, in_device_memory, metal_source
from .verify_matmul import THREADS, TILE_ROWS
from .weights import (
    FLOATS,
    AffineWeights,
    Weights,
    check_product,
    declaration,
    dequantized,
    input_names,
    inputs,
    result_dtype,
    traits,
)

MOST_HEAD_DIM = 256
_NUMBERS = ["position", "eps", "growth"]
_CALL = f"""
  threadgroup float head[{TILE_ROWS} * D];
  threadgroup float4 scratch[dflash::kScratch];
  const dflash::ContextRows rows{{x_shape[0], int(threadgroups_per_grid.x), position, eps, growth}};
  dflash::context_kv<T, D>(x, key_rows, value_rows, norms, frequencies, rows, keys, values, head,
      scratch, threadgroup_position_in_grid, thread_index_in_threadgroup,
      simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""


class ContextKV:
    """Keys and values of context features for every draft layer.

    Each row's bits depend on that row, its position, the weights and the shapes alone.

    Args:
        metal_kernel: the factory of its kernels.
    """

    def __init__(self, metal_kernel: KernelFactory = mx.fast.metal_kernel) -> None:
        header = metal_source("context_kv.metal")
        self._kernels = {
            affine: metal_kernel(
                name=f"context_kv_{'affine' if affine else 'plain'}",
                input_names=[
                    "x",
                    *input_names("w", affine),
                    *input_names("v", affine),
                    *("norms", "frequencies", *_NUMBERS),
                ],
                output_names=["keys", "values"],
                source=declaration("key_rows", "w", affine)
                + declaration("value_rows", "v", affine)
                + _CALL,
                header=header,
            )
            for affine in (False, True)
        }

    def __call__(
        self,
        features: mx.array,
        key_weights: Weights,
        value_weights: Weights,
        norms: mx.array,
        frequencies: mx.array,
        *,
        position: int,
        eps: float,
        growth: float = 1.0,
    ) -> tuple[mx.array, mx.array]:
        """Rotated keys and values, each [layers, KV, S, D], of features [S, K].

        Args:
            features: what `DFlash.fuse` makes of the taps of S tokens.
            key_weights, value_weights: [layers, KV * D, K], the layers' `k_proj` and `v_proj`,
                stacked. Layers with a bias are not for this kernel.
            norms: [layers, D], the weights of their `k_norm`.
            frequencies: [D / 2] float32, of the rotary embedding, in radians per position.
            position: of the first row.
            eps: of the norms.
            growth: of keys, where the rotary embedding asks for it (YaRN).

        The dtype is MLX's for features @ key_weights.T, sums are float32. Raises `KernelError`.
        """
        dtype, heads = _check(features, key_weights, value_weights, norms, frequencies)
        (rows, _), (layers, head_dim) = features.shape, norms.shape
        shape = (layers, heads, rows, head_dim)
        keys, values = self._kernels[isinstance(key_weights, AffineWeights)](
            inputs=[
                features.astype(dtype),
                *inputs(key_weights),
                *inputs(value_weights),
                in_device_memory(norms),
                in_device_memory(frequencies),
                mx.array(position),
                mx.array(eps, mx.float32),
                mx.array(growth, mx.float32),
            ],
            template=[("T", dtype), *traits(key_weights).items(), ("D", head_dim)],
            grid=(heads * THREADS, 2 * layers, -(-rows // TILE_ROWS)),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[shape, shape],
            output_dtypes=[dtype, dtype],
        )
        return keys, values


def context_kv_reference(
    features: mx.array,
    key_weights: Weights,
    value_weights: Weights,
    norms: mx.array,
    frequencies: mx.array,
    *,
    position: int,
    eps: float,
    growth: float = 1.0,
) -> tuple[mx.array, mx.array]:
    """What `ContextKV` computes, in plain MLX and float32, rounded at the end."""
    dtype, heads = _check(features, key_weights, value_weights, norms, frequencies)
    (rows, _), (layers, head_dim) = features.shape, norms.shape
    keys, values = (
        (features.astype(mx.float32) @ dequantized(w).swapaxes(1, 2))
        .reshape(layers, rows, heads, head_dim)
        .transpose(0, 2, 1, 3)
        for w in (key_weights, value_weights)
    )
    keys = mx.fast.rms_norm(keys, None, eps) * norms[:, None, None].astype(mx.float32) * growth
    angles = (position + mx.arange(rows, dtype=mx.float32))[:, None] * frequencies
    left, right = mx.split(keys, 2, axis=-1)
    turned = [
        left * mx.cos(angles) - right * mx.sin(angles),
        left * mx.sin(angles) + right * mx.cos(angles),
    ]
    return mx.concatenate(turned, axis=-1).astype(dtype), values.astype(dtype)


def _check(
    features: mx.array,
    key_weights: Weights,
    value_weights: Weights,
    norms: mx.array,
    frequencies: mx.array,
) -> tuple[mx.Dtype, int]:
    """The dtype of the result and the heads of keys. Raises `KernelError`."""
    check_product(features, "[layers, N, K]", key_weights, value_weights)
    dtype = result_dtype(features, key_weights, value_weights)
    layers, width, _ = key_weights.shape
    if features.ndim != 2 or norms.ndim != 2 or norms.shape[0] != layers:
        raise KernelError(
            f"Features [S, K] and norms of {layers} layers are needed, not {features.shape} and "
            f"{norms.shape}."
        )
    head_dim = norms.shape[1]
    if width % head_dim or head_dim % 2 or head_dim > MOST_HEAD_DIM:
        raise KernelError(
            f"Heads of {head_dim} do not fill {width} columns evenly, are odd or longer than "
            f"{MOST_HEAD_DIM}."
        )
    if frequencies.shape != (head_dim // 2,) or frequencies.dtype != mx.float32:
        raise KernelError(
            f"Heads of {head_dim} have {head_dim // 2} frequencies in float32, not "
            f"{frequencies.shape} in {dtype_name(frequencies)}."
        )
    if norms.dtype not in FLOATS:
        raise KernelError(f"Norms are floating point, not {dtype_name(norms)}.")
    return dtype, width // head_dim
