// The tile of matmul_tile.h by an M5's tensor units, for bfloat16 and MLX's 4-bit weights.
//
// One operation multiplies a group: 16 rows of x by 32 rows of w, read as they lie in device memory.
// Its operand is a tensor of 4-bit integers, which is what MLX's packed words are, so nothing is
// unpacked. The codes are not less their middle here: they run from 0 to 15.
//
// Which lane has which of the results is asked, not known: get_multidimensional_index. A lane reads
// scale and bias of one column and half of a row of x, and the others get them from it. The order of
// all other sums is that of matmul_tile.h. The order inside an operation is not specified, and
// neither is how it rounds: exact decoding keeps to matmul_tile.h.
//
// Sources: MPPTensorOpsMatMul2d.h as quoted in public (types, and `k` a multiple of 32), the use of
// tensors in MLX's steel_gemm_thin_nax.h (what lies beyond their extents is masked), and Apple's
// documentation of MTLTensorDescriptor (rows of 4-bit tensors are 128 bytes apart, or a multiple).
#pragma once

#include <metal_simdgroup>
#include <metal_stdlib>

#include "matmul_tile.h"

#if __METAL_VERSION__ >= 400

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

namespace dflash {

// For K a multiple of 256 and N of 32. Fewer than 9 rows take the same operations as 16.
template <typename T, int ROW_BLOCKS, int GROUP, bool GATE_UP>
void multiply_tile(DenseRows<T> rows, Columns<AffineWeights<T, 4, GROUP>, GATE_UP> columns,
                   int begin, int end, threadgroup float* scratch, int t, int s) {
  using mpp::tensor_ops::matmul2d_descriptor;
  using Extents = dextents<int32_t, 2>;
  using Codes = tensor<device uint4b_format, Extents, tensor_inline>;
  constexpr int width = Columns<AffineWeights<T, 4, GROUP>, GATE_UP>::width;
  constexpr int parts = kTileColumns / width, held = kTileRows * width / 32;  // results in a lane
  constexpr auto form = matmul2d_descriptor(kTileRows, width, GROUP, false, true, false,
                                            matmul2d_descriptor::mode::multiply);
  mpp::tensor_ops::matmul2d<form, execution_simdgroup> product;

  const int K = rows.K, lane = t % 32;
  tensor<device T, Extents, tensor_inline> x((device T*)rows.row(0), Extents(K, rows.count));
  Codes w((device uchar*)columns.w.words, Extents(K, columns.N));
  auto first_x = x.slice(0, 0);
  auto first_codes = w.slice(0, 0);
  auto sums = product.template get_destination_cooperative_tensor<
      decltype(first_x), decltype(first_codes), float>();
  ushort row[held], column[held];
  float totals[parts][held];
  DFLASH_UNROLL
  for (int i = 0; i < held; i++) {
    auto place = sums.get_multidimensional_index(i);
    column[i] = place[0];
    row[i] = place[1];
    DFLASH_UNROLL
    for (int part = 0; part < parts; part++) totals[part][i] = 0;
  }

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
    DFLASH_UNROLL
    for (int part = 0; part < parts; part++) {
      const device uint* words = part == 0 ? columns.w.words : columns.up.words;
      Codes whole((device uchar*)words, Extents(K, columns.N));
      auto codes = whole.slice(k, columns.first);
      product.run(x_step, codes, sums);
      DFLASH_UNROLL
      for (int i = 0; i < held; i++) {
        const ushort from = part * width + column[i];
        const float total = fma(simd_shuffle(scale, from), sums[i], totals[part][i]);
        totals[part][i] = fma(simd_shuffle(bias, from), simd_shuffle(x_sum, 2 * row[i]), total);
      }
    }
  }

  threadgroup float* to = scratch + s * (kTileRows * kTileColumns);
  DFLASH_UNROLL
  for (int part = 0; part < parts; part++) {
    DFLASH_UNROLL
    for (int i = 0; i < held; i++) {
      to[row[i] * kTileColumns + part * width + column[i]] = totals[part][i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

}  // namespace dflash

#endif
