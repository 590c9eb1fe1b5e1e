// The 8x8 matrices of a SIMD-group, seen from one lane.
//
// A lane holds two neighbouring elements of every matrix, at (row, column) and (row, column + 1)
// of its `Place`: the layout that MLX's own kernels rely on. Knowing it lets a kernel fill operands
// from memory of any type and treat accumulators as rows, without threadgroup memory.
// Sums are float; operands are float or the model's own type.
#pragma once

#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "language.h"

namespace dflash {
using namespace metal;

typedef simdgroup_matrix<float, 8, 8> Fragment;

struct Place {
  short row, column;
};

inline Place place_of(uint lane) {
  const short quad = lane / 4;
  return {short((quad & 4) + (lane / 2) % 4), short((quad & 2) * 2 + (lane % 2) * 2)};
}

inline Fragment filled_with(float first, float second) {
  Fragment filled;
  filled.thread_elements()[0] = first;
  filled.thread_elements()[1] = second;
  return filled;
}

// The four lanes of a matrix row differ in bits 0 and 3 of their number.
inline float row_max(float value) {
  value = max(value, simd_shuffle_xor(value, 1));
  return max(value, simd_shuffle_xor(value, 8));
}

inline float row_sum(float value) {
  value += simd_shuffle_xor(value, 1);
  return value + simd_shuffle_xor(value, 8);
}

// The eight lanes of a matrix column differ in the others: 1, 2 and 4.
inline float column_sum(float value) {
  value += simd_shuffle_xor(value, 2);
  value += simd_shuffle_xor(value, 4);
  return value + simd_shuffle_xor(value, 16);
}

}  // namespace dflash
