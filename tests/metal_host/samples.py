"""Small kernels to test the emulator with: what a call of each of them takes, and what it gives."""

from dataclasses import dataclass, field

import mlx.core as mx

from metal_host.kernel import EmulatedKernel

EXPONENTIAL = """
  const uint i = thread_position_in_grid.x;
  const T value = values[i];
  result[i] = metal::exp(value) * T(2) + T(added);
"""

# Largest element and sum of exponentials of each row: a threadgroup a row.
SOFTMAX_STATISTICS = """
  threadgroup float sums[32], tops[32];
  const uint row = threadgroup_position_in_grid.x;
  const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
  const int length = x_shape[1];
  const device T* values = x + row * length;
  float most = -INFINITY;
  for (int i = thread_position_in_threadgroup.x; i < length; i += threads_per_threadgroup.x) {
    most = metal::max(most, float(values[i]));
  }
  most = simd_max(most);
  if (lane == 0) tops[simdgroup] = most;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  most = simd_max(lane < simdgroups_per_threadgroup ? tops[lane] : -INFINITY);
  float sum = 0;
  for (int i = thread_position_in_threadgroup.x; i < length; i += threads_per_threadgroup.x) {
    sum += metal::exp(float(values[i]) - most);
  }
  for (ushort step = 16; step > 0; step /= 2) sum += simd_shuffle_down(sum, step);
  if (lane == 0) sums[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sum = simd_sum(lane < simdgroups_per_threadgroup ? sums[lane] : 0.0f);
  if (thread_position_in_threadgroup.x == 0) {
    top[row] = most;
    total[row] = sum;
  }
"""

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


@dataclass(frozen=True)
class Sample:
    """A kernel and one call of it: the keywords of the constructor and of the call."""

    constructor: dict
    call: dict
    inputs: list[mx.array] = field(default_factory=list)

    def run(self, **how) -> list[mx.array]:
        return EmulatedKernel(**self.constructor, **how)(inputs=self.inputs, **self.call)


def exponential(values: mx.array, added: mx.array) -> Sample:
    return Sample(
        dict(
            name="exponential",
            input_names=["values", "added"],
            output_names=["result"],
            source=EXPONENTIAL,
        ),
        dict(
            template=[("T", values.dtype)],
            output_shapes=[values.shape],
            output_dtypes=[values.dtype],
            grid=(values.size, 1, 1),
            threadgroup=(256, 1, 1),
        ),
        [values, added],
    )


def softmax_statistics(x: mx.array) -> Sample:
    rows = x.shape[0]
    return Sample(
        dict(
            name="softmax_statistics",
            input_names=["x"],
            output_names=["top", "total"],
            source=SOFTMAX_STATISTICS,
        ),
        dict(
            template=[("T", x.dtype)],
            output_shapes=[(rows,), (rows,)],
            output_dtypes=[mx.float32, mx.float32],
            grid=(rows * 128, 1, 1),
            threadgroup=(128, 1, 1),
        ),
        [x],
    )


def matmul(x: mx.array, weights: mx.array) -> Sample:
    """x [16, K] by weights [N, K], quantized here; N a multiple of 32, K of 64."""
    columns, depth = weights.shape
    return Sample(
        dict(
            name="matmul",
            input_names=["x", "w", "scales", "biases"],
            output_names=["y"],
            source=MATMUL,
            header=MATMUL_HEADER,
        ),
        dict(
            template=[("T", x.dtype), ("K", depth), ("N", columns)],
            output_shapes=[(16, columns)],
            output_dtypes=[x.dtype],
            grid=(columns // 32 * 128, 1, 1),
            threadgroup=(128, 1, 1),
        ),
        [x, *mx.quantize(weights, group_size=64, bits=4)],
    )
