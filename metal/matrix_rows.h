// Reading the rows of a matrix, plain or quantized, a piece at a time.
//
// A piece is what one thread reads at once: neighbouring values of one row, 16 bytes as they lie in
// device memory, so that neighbouring threads read a row in one stretch. (8 bytes where 4-bit
// weights are to become float32: the tile is then half as long, and every thread still has a piece
// of it.) Both matrices offer
//
//   piece_values                   how many values that is,
//   Piece                          a piece in registers, not yet unpacked,
//   fetch(piece, row, k, inside)   device memory -> registers; zeros where `inside` is false,
//   unpack(piece, out)             registers -> threadgroup memory, as values of type T.
//
// The two steps are apart so that the next tile can be on its way while this one is multiplied.
#pragma once

#include <metal_stdlib>

#include "language.h"

namespace dflash {
using namespace metal;

// How many values along K a tile holds: 256 bytes of them, 128 in half precision and 64 in float32.
template <typename T>
constexpr int tile_depth() {
  return 256 / sizeof(T);
}

// Rows of numbers: activations, or the weights of a layer that is not quantized.
// W: the type in device memory, which converts to T without loss.
template <typename T, typename W>
struct PlainMatrix {
  enum : int { piece_values = 16 / sizeof(W) };
  struct Piece {
    W values[piece_values];
  };

  const device W* values;  // [rows, K]
  int K;

  void fetch(thread Piece& piece, int row, int k, bool inside) const thread {
    const device W* from = values + size_t(row) * K + k;
    if (inside && K % piece_values == 0) {
      DFLASH_UNROLL
      for (int i = 0; i < piece_values; i += 4) {
        const vec<W, 4> four = *reinterpret_cast<const device vec<W, 4>*>(from + i);
        DFLASH_UNROLL
        for (int j = 0; j < 4; j++) piece.values[i + j] = four[j];
      }
    } else {  // outside, or rows that neither start at a multiple of 16 bytes nor end at one
      DFLASH_UNROLL
      for (int i = 0; i < piece_values; i++) piece.values[i] = inside && k + i < K ? from[i] : W(0);
    }
  }

  static void unpack(const thread Piece& piece, threadgroup T* out) {
    DFLASH_UNROLL
    for (int i = 0; i < piece_values; i += 4) {
      vec<T, 4> four;
      DFLASH_UNROLL
      for (int j = 0; j < 4; j++) four[j] = T(piece.values[i + j]);
      *reinterpret_cast<threadgroup vec<T, 4>*>(out + i) = four;
    }
  }

  // The matrix of one expert, when `values` is [experts, rows, K].
  PlainMatrix expert(int index, int rows) const thread {
    return {values + size_t(index) * rows * K, K};
  }
};

// Weights that MLX has quantized in its affine mode: value = scale * q + bias, where GROUP
// neighbours of a row share scale and bias. q has BITS bits, the first value in the lowest ones.
// S: the type of scales and biases. K is a multiple of GROUP, so no piece crosses the end of a row.
template <typename T, typename S, int BITS, int GROUP>
struct AffineWeights {
  enum : int {
    per_word = 32 / BITS,
    piece_words = tile_depth<T>() * BITS / 128 < 4 ? tile_depth<T>() * BITS / 128 : 4,
    piece_values = piece_words * per_word,  // at most 32, hence inside one group
  };
  struct Piece {
    vec<uint, piece_words> words;
    float scale;
    float bias;
  };

  const device uint* words;  // [rows, K / per_word]
  const device S* scales;    // [rows, K / GROUP]
  const device S* biases;    // [rows, K / GROUP]
  int K;

  void fetch(thread Piece& piece, int row, int k, bool inside) const thread {
    if (!inside) {
      piece.words = vec<uint, piece_words>(0);
      piece.scale = piece.bias = 0;
      return;
    }
    const size_t word = size_t(row) * (K / per_word) + k / per_word;
    const size_t group = size_t(row) * (K / GROUP) + k / GROUP;
    piece.words = *reinterpret_cast<const device vec<uint, piece_words>*>(words + word);
    piece.scale = float(scales[group]);
    piece.bias = float(biases[group]);
  }

  // `fma` by name: left to the compiler, one kernel might round the product and another not.
  static void unpack(const thread Piece& piece, threadgroup T* out) {
    DFLASH_UNROLL
    for (int i = 0; i < piece_values; i += 4) {
      const uint packed = piece.words[i / per_word] >> (i % per_word * BITS);
      vec<T, 4> four;
      DFLASH_UNROLL
      for (int j = 0; j < 4; j++) {
        const uint q = (packed >> (j * BITS)) & ((1u << BITS) - 1);
        four[j] = T(fma(piece.scale, float(q), piece.bias));
      }
      *reinterpret_cast<threadgroup vec<T, 4>*>(out + i) = four;
    }
  }

  // The weights of one expert, when the arrays are [experts, rows, ...].
  AffineWeights expert(int index, int rows) const thread {
    const size_t first = size_t(index) * rows;
    return {words + first * (K / per_word), scales + first * (K / GROUP),
            biases + first * (K / GROUP), K};
  }
};

}  // namespace dflash
