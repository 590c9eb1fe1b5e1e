// The rows of a matrix of weights, plain or quantized, as one lane of a SIMD-group reads them.
//
// A matrix product goes along K in steps. Of a step's values in a row, four lanes have a quarter
// each, neighbours that lie together in device memory. Lanes hand their values to 8x8 matrices two
// at a time, so K is permuted: product i of a step takes values 8 (i / 4) + i % 4 of every quarter,
// and those four further on. Every k is multiplied by its own column of x, once. So a lane
// multiplies the values that it has read, and weights need no tile.
//
//   step                        how many values along K that is,
//   scaled                      whether a row's values of a step share a scale and a bias,
//   whole                       whether every row consists of whole steps,
//   Piece                       a lane's quarter of a step in registers, as it was stored,
//   fetch(piece, row, k, quarter, inside)   device memory -> registers; zeros if not `inside`,
//   value(piece, v)             value v of the quarter, before it is scaled.
#pragma once

#include <metal_stdlib>

#include "language.h"

namespace dflash {
using namespace metal;

// Values `at` to `at` + 3 of a row of `length`; zeros for what lies outside. WHOLE: nothing lies
// outside, and rows begin at multiples of four values.
template <bool WHOLE, typename T>
inline vec<T, 4> four_of(const device T* row, int at, int length, bool inside) {
  vec<T, 4> four = vec<T, 4>(T(0));
  if (WHOLE || length % 4 == 0) {
    if (inside && (WHOLE || at < length)) {
      four = *reinterpret_cast<const device vec<T, 4>*>(row + at);
    }
  } else {  // rows that begin anywhere
    DFLASH_UNROLL
    for (int i = 0; i < 4; i++) {
      if (inside && at + i < length) four[i] = row[at + i];
    }
  }
  return four;
}

// Rows of numbers: the weights of a layer that is not quantized.
template <typename W>
struct PlainMatrix {
  enum : int { scaled = false, whole = false, step = 32 };
  struct Piece {
    W values[step / 4];
    float scale, bias;  // never read
  };

  const device W* values;  // [rows, K]
  int K;

  void fetch(thread Piece& piece, int row, int k, int quarter, bool inside) const thread {
    const device W* from = values + size_t(row) * K;
    DFLASH_UNROLL
    for (int i = 0; i < step / 4; i += 4) {
      const vec<W, 4> four = four_of<false>(from, k + quarter * (step / 4) + i, K, inside);
      DFLASH_UNROLL
      for (int j = 0; j < 4; j++) piece.values[i + j] = four[j];
    }
  }

  static float value(const thread Piece& piece, int v) { return float(piece.values[v]); }

  // The matrix of one expert, when `values` is [experts, rows, K].
  PlainMatrix expert(int index, int rows) const thread {
    return {values + size_t(index) * rows * K, K};
  }
};

// Reads COUNT neighbouring words: a multiple of four, two, or one.
template <int COUNT>
inline void read_words(thread uint (&to)[COUNT], const device uint* from) {
  DFLASH_UNROLL
  for (int i = 0; i < COUNT; i += 4) {
    const uint4 four = *reinterpret_cast<const device uint4*>(from + i);
    DFLASH_UNROLL
    for (int j = 0; j < 4; j++) to[i + j] = four[j];
  }
}

inline void read_words(thread uint (&to)[2], const device uint* from) {
  const uint2 two = *reinterpret_cast<const device uint2*>(from);
  to[0] = two[0];
  to[1] = two[1];
}

inline void read_words(thread uint (&to)[1], const device uint* from) { to[0] = from[0]; }

// Weights that MLX has quantized in its affine mode: value = scale * q + bias, where GROUP
// neighbours of a row share scale and bias. q has BITS bits, the first value in the lowest ones.
// S: the type of scales and biases. K is a multiple of GROUP, and a step is a group.
//
// The kernels multiply the codes, less the middle of their range so that sums stay small: small
// integers, exact in every type. scale and bias are applied once per group.
template <typename S, int BITS, int GROUP>
struct AffineWeights {
  enum : int {
    scaled = true,
    whole = true,
    step = GROUP,
    per_word = 32 / BITS,
    middle = 1 << (BITS - 1),
  };
  struct Piece {
    uint words[GROUP / 4 / per_word];
    float scale;
    float bias;  // of the codes less `middle`
  };

  const device uint* words;  // [rows, K / per_word]
  const device S* scales;    // [rows, K / GROUP]
  const device S* biases;    // [rows, K / GROUP]
  int K;

  void fetch(thread Piece& piece, int row, int k, int quarter, bool inside) const thread {
    constexpr int count = GROUP / 4 / per_word;
    if (!inside) {
      DFLASH_UNROLL
      for (int i = 0; i < count; i++) piece.words[i] = 0;
      piece.scale = piece.bias = 0;
      return;
    }
    const size_t group = size_t(row) * (K / GROUP) + k / GROUP;
    read_words(piece.words, words + (group * 4 + quarter) * count);
    piece.scale = float(scales[group]);
    piece.bias = fma(piece.scale, float(middle), float(biases[group]));
  }

  // A code without shifting or converting it, which take a GPU four times as long as a mask or a
  // sum. Its bits, where they lie in half a word, are put into the fraction of 2^23, which makes
  // a float of 2^23 + code * 2^place; `fma` scales and subtracts, without rounding anything.
  static float value(const thread Piece& piece, int v) {
    constexpr int per_half = 16 / BITS;
    const int code = v % per_word;
    const uint bits = code < per_half ? piece.words[v / per_word] : piece.words[v / per_word] >> 16;
    const int place = code % per_half * BITS;
    const float unit = 1.0f / float(1 << place);
    const float raised = as_type<float>((bits & (((1u << BITS) - 1) << place)) | 0x4b000000u);
    return fma(raised, unit, -(8388608.0f * unit + float(middle)));
  }

  // The weights of one expert, when the arrays are [experts, rows, ...].
  AffineWeights expert(int index, int rows) const thread {
    const size_t first = size_t(index) * rows;
    return {words + first * (K / per_word), scales + first * (K / GROUP),
            biases + first * (K / GROUP), K};
  }
};

}  // namespace dflash
