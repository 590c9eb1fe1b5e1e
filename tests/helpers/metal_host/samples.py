"""A small kernel to test the emulator with, and the arguments of a call."""

from dataclasses import dataclass, field

import mlx.core as mx

from metal_host.kernel import EmulatedKernel
from metal_host.wrapper import METAL_NAMES

# y[16, N] = x[16, K] by 4-bit weights in groups of 64. A threadgroup of four SIMD-groups takes 32
# columns, and 64 of K at a time.
MATMUL_HEADER = """
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

template <typename T>
METAL_FUNC void unpack(uint packed, T scale, T bias, threadgroup T* out) {
  for (int i = 0; i < 8; i++) {
    out[i] = T(float(scale) * float((packed >> (4 * i)) & 15u) + float(bias));
  }
}
"""
MATMUL = """
  constexpr int columns = 32, depth = 64, stride = depth + 8;
  threadgroup T x_tile[16 * stride];
  threadgroup T w_tile[columns * stride];
  threadgroup float sums[16 * columns];
  const uint t = thread_index_in_threadgroup, s = simdgroup_index_in_threadgroup;
  const uint first = threadgroup_position_in_grid.x * columns;
  simdgroup_matrix<float, 8, 8> low(0), high(0);
  for (int start = 0; start < K; start += depth) {
    const uint x_row = t / 8, x_at = t % 8 * 8;
    for (int i = 0; i < 8; i++) {
      x_tile[x_row * stride + x_at + i] = x[x_row * K + start + x_at + i];
    }
    const uint w_row = t / 4, w_at = t % 4 * 16;
    const uint column = first + w_row;
    const uint group = column * (K / 64) + start / 64;
    const T scale = scales[group], bias = biases[group];
    const device uint* words = w + column * (K / 8) + (start + w_at) / 8;
    unpack<T>(words[0], scale, bias, w_tile + w_row * stride + w_at);
    unpack<T>(words[1], scale, bias, w_tile + w_row * stride + w_at + 8);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int k = 0; k < depth; k += 8) {
      simdgroup_matrix<T, 8, 8> x_low, x_high, w_columns;
      simdgroup_load(x_low, x_tile + k, stride);
      simdgroup_load(x_high, x_tile + 8 * stride + k, stride);
      simdgroup_load(w_columns, w_tile + s * 8 * stride + k, stride, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(low, x_low, w_columns, low);
      simdgroup_multiply_accumulate(high, x_high, w_columns, high);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  simdgroup_store(low, sums + s * 8, columns);
  simdgroup_store(high, sums + 8 * columns + s * 8, columns);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = t; i < 16 * columns; i += 128) {
    y[i / columns * N + first + i % columns] = T(sums[i]);
  }
"""


CONSTANTS = "using T = {}; constexpr int K = {}, N = {};\n"


@dataclass(frozen=True)
class Sample:
    """A kernel and one call of it: the keywords of the constructor and of the call."""

    constructor: dict
    call: dict
    inputs: list[mx.array] = field(default_factory=list)

    def run(self, **how) -> list[mx.array]:
        return EmulatedKernel(**self.constructor, **how)(inputs=self.inputs, **self.call)


def matmul(x: mx.array, weights: mx.array) -> Sample:
    """x [16, K] by weights [N, K], quantized here; N a multiple of 32, K of 64."""
    columns, depth = weights.shape
    return Sample(
        dict(
            name="matmul",
            input_names=["x", "w", "scales", "biases"],
            output_names=["y"],
            source=CONSTANTS.format(METAL_NAMES[x.dtype], depth, columns) + MATMUL,
            header=MATMUL_HEADER,
        ),
        dict(
            output_shapes=[(16, columns)],
            output_dtypes=[x.dtype],
            grid=(columns // 32 * 128, 1, 1),
            threadgroup=(128, 1, 1),
        ),
        [x, *mx.quantize(weights, group_size=64, bits=4)],
    )
