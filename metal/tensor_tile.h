// The tile of matmul_tile.h by an M5's tensor units, for bfloat16 and MLX's 4-bit weights.
//
// One operation multiplies a group: 16 rows of x by 32 rows of w, read as they lie in device memory.
// Its operand is a tensor of 4-bit integers, which is what MLX's packed words are, so nothing is
// unpacked. The middle of the range is not subtracted here: codes run from 0 to 15.
//
// Metal says how many results a lane has, and which: get_capacity, is_valid_element and
// get_multidimensional_index. A lane reads scale and bias of one column and half of a row of x, and
// the others get them from it. The order of all other sums is that of matmul_tile.h. The order inside
// an operation is not specified, and neither is how it rounds: exact decoding keeps to matmul_tile.h.
//
// Sources: MPPTensorOpsMatMul2d.h as quoted in public (types, and `k` a multiple of 32), the use of
// tensors in MLX's steel_gemm_thin_nax.h (what lies beyond their extents is masked), and Apple's
// documentation of MTLTensorDescriptor (rows of 4-bit tensors are 128 bytes apart, or a multiple).
#pragma once

#include <metal_simdgroup>
#include <metal_stdlib>

#include "matmul_tile.h"

#ifdef __HAVE_INT4B_FORMAT_TYPE__

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

namespace dflash {

// The place of a lane's result `i`, and whether there is one. If not, the place may still be read.
struct Result {
  ushort row, column;
  bool valid;
};

template <typename Sums>
inline Result result_of(thread Sums& sums, int i) {
  const bool valid = sums.is_valid_element(i);
  auto place = sums.get_multidimensional_index(i);
  return {ushort(valid ? place[1] : 0), ushort(valid ? place[0] : 0), valid};
}

template <typename Sums>
inline void clear(thread Sums& totals) {
  DFLASH_UNROLL
  for (int i = 0; i < totals.get_capacity(); i++) totals[i] = 0;
}

// Adds a group's sums of codes to the totals. scale, bias: of column `lane`; x_sum: of row lane / 2.
template <typename Sums>
inline void add_group(thread Sums& totals, thread Sums& sums, int from, float scale, float bias,
                      float x_sum) {
  DFLASH_UNROLL
  for (int i = 0; i < sums.get_capacity(); i++) {
    const Result at = result_of(sums, i);  // every lane takes part in a shuffle
    const ushort lane = from + at.column;
    const float total = fma(simd_shuffle(scale, lane), sums[i], totals[i]);
    totals[i] = fma(simd_shuffle(bias, lane), simd_shuffle(x_sum, 2 * at.row), total);
  }
}

template <typename Sums>
inline void store(thread Sums& totals, threadgroup float* to) {
  DFLASH_UNROLL
  for (int i = 0; i < totals.get_capacity(); i++) {
    const Result at = result_of(totals, i);
    if (at.valid) to[at.row * kTileColumns + at.column] = totals[i];
  }
}

// For K a multiple of 256 and N of 32. Fewer than 9 rows take the same operations as 16.
template <typename T, int ROW_BLOCKS, int GROUP, bool GATE_UP>
void multiply_tile(DenseRows<T> rows, Columns<AffineWeights<T, 4, GROUP>, GATE_UP> columns,
                   int begin, int end, threadgroup float* scratch, int t, int s) {
  using mpp::tensor_ops::matmul2d_descriptor;
  using Extents = dextents<int32_t, 2>;
  using Codes = tensor<device uint4b_format, Extents, tensor_inline>;
  constexpr int width = Columns<AffineWeights<T, 4, GROUP>, GATE_UP>::width;
  constexpr auto form = matmul2d_descriptor(kTileRows, width, GROUP, false, true, false,
                                            matmul2d_descriptor::mode::multiply);
  mpp::tensor_ops::matmul2d<form, execution_simdgroup> product;

  const int K = rows.K, lane = t % 32;
  tensor<device T, Extents, tensor_inline> x((device T*)rows.row(0), Extents(K, rows.count));
  Codes w((device uchar*)columns.w.words, Extents(K, columns.N));
  Codes up((device uchar*)columns.up.words, Extents(K, columns.N));
  using Left = decltype(x.slice(0, 0));
  using Right = decltype(w.slice(0, 0));
  auto sums = product.template get_destination_cooperative_tensor<Left, Right, float>();
  auto totals = product.template get_destination_cooperative_tensor<Left, Right, float>();
  auto up_totals = product.template get_destination_cooperative_tensor<Left, Right, float>();
  clear(totals);
  clear(up_totals);

  const AffineWeights<T, 4, GROUP> own = lane < width ? columns.w : columns.up;
  const size_t own_row = size_t(columns.first + lane % width) * (K / GROUP);
  const bool inside = lane / 2 < rows.count;
  const device T* half_row = rows.row(inside ? lane / 2 : 0) + lane % 2 * (GROUP / 2);
  for (int k = begin + s * GROUP; k < end; k += kSimdgroups * GROUP) {
    const float scale = float(own.scales[own_row + k / GROUP]);
    const float bias = float(own.biases[own_row + k / GROUP]);
    float x_sum = 0;
    DFLASH_UNROLL
    for (int v = 0; v < GROUP / 2; v += 4) {
      const vec<T, 4> four = four_of<true>(half_row, k + v, K, inside);
      DFLASH_UNROLL
      for (int j = 0; j < 4; j++) x_sum += float(four[j]);
    }
    x_sum += simd_shuffle_xor(x_sum, 1);
    auto x_step = x.slice(k, 0);
    auto codes = w.slice(k, columns.first);
    product.run(x_step, codes, sums);
    add_group(totals, sums, 0, scale, bias, x_sum);
    if (GATE_UP) {
      auto up_codes = up.slice(k, columns.first);
      product.run(x_step, up_codes, sums);
      add_group(up_totals, sums, width, scale, bias, x_sum);
    }
  }

  threadgroup float* to = scratch + s * (kTileRows * kTileColumns);
  store(totals, to);
  if (GATE_UP) store(up_totals, to + width);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

}  // namespace dflash

#endif
