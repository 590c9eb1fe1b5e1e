// One tile of x w^T: 16 rows of x by 32 rows of w (columns of the result), along a range of K.
//
// A threadgroup of 128 threads, four SIMD-groups, computes a tile. Along K it advances in steps of
// 256 bytes per row (128 values in half precision, 64 in float32):
//
//   1. All 128 threads together fetch the step's pieces of x and w into registers, neighbouring
//      threads neighbouring pieces of a row.
//   2. They unpack them into threadgroup memory: each weight is read from device memory once and
//      dequantized once, for all 16 rows.
//   3. While the pieces of the next step are on their way, SIMD-group s multiplies the 8x8 matrices
//      of its share: columns 16 (s % 2) ... + 15, and the half s / 2 of the step's K.
//
//                        K of a step
//                    first half   second half
//      columns  0-15   group 0      group 2        16 x 16 sums each, in float32:
//      columns 16-31   group 1      group 3        2 x 2 matrices of 8 x 8
//
// At the end the two halves meet in threadgroup memory and are added.
//
// The order of every sum is fixed by K alone. An element of the result is the sum over the first
// halves in ascending k, plus the same over the second halves. Its row's place in the tile, the
// other rows and their number do not enter: rows that do not exist are zeros, and a row of an 8x8
// product does not see the other rows. Nothing is added atomically.
#pragma once

#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "matrix_rows.h"

namespace dflash {
using namespace metal;

enum : int {
  kTileRows = 16,
  kTileColumns = 32,
  kThreads = 128,
  kRowBytes = 256 + 16,  // the 16 spread the rows of a tile over the banks
  kScratch = (kTileRows + kTileColumns) * kRowBytes / 16,  // in float4, the same for every type
};

// Rows of the left side: `count` of x, from `first` on.
template <typename T>
struct DenseRows {
  PlainMatrix<T, T> x;
  int first;
  int count;

  void fetch(thread typename PlainMatrix<T, T>::Piece& piece, int row, int k) const thread {
    x.fetch(piece, first + row, k, row < count && k < x.K);
  }
};

// Rows of the right side: 32 of `w`, or (GATE_UP) 16 of `w` and the same 16 of `up`, so that both
// factors of a gated unit end up in one threadgroup.
template <typename Weights, bool GATE_UP>
struct Columns {
  enum : int { width = GATE_UP ? kTileColumns / 2 : kTileColumns };  // columns of the result

  Weights w;
  Weights up;
  int first;
  int N;

  void fetch(thread typename Weights::Piece& piece, int row, int k) const thread {
    const bool second = GATE_UP && row >= width;
    const int column = first + (second ? row - width : row);
    const bool inside = column < N && k < w.K;
    if (second) {
      up.fetch(piece, column, k, inside);
    } else {
      w.fetch(piece, column, k, inside);
    }
  }
};

// This thread's pieces of a tile of ROWS rows, between device and threadgroup memory.
template <typename T, typename Matrix, int ROWS>
struct TileLoader {
  enum : int {
    per_row = tile_depth<T>() / Matrix::piece_values,
    count = ROWS * per_row / kThreads,
    stride = kRowBytes / sizeof(T),
  };
  static_assert(count * kThreads == ROWS * per_row, "every thread has the same number of pieces");
  typename Matrix::Piece pieces[count];

  template <typename Source>
  void fetch(Source source, int k, int t) thread {
    DFLASH_UNROLL
    for (int i = 0; i < count; i++) {
      const int piece = i * kThreads + t;
      source.fetch(pieces[i], piece / per_row, k + piece % per_row * Matrix::piece_values);
    }
  }

  void store(threadgroup T* tile, int t) const thread {
    DFLASH_UNROLL
    for (int i = 0; i < count; i++) {
      const int piece = i * kThreads + t;
      const int column = piece % per_row * Matrix::piece_values;
      Matrix::unpack(pieces[i], tile + piece / per_row * stride + column);
    }
  }
};

// The sums of one SIMD-group: 8 ROW_BLOCKS rows by 16 columns, over its half of every step.
template <typename T, int ROW_BLOCKS>
struct TileSums {
  enum : int { stride = kRowBytes / sizeof(T) };
  simdgroup_matrix<float, 8, 8> sums[ROW_BLOCKS][2];

  void clear() thread {
    DFLASH_UNROLL
    for (int r = 0; r < ROW_BLOCKS; r++) {
      DFLASH_UNROLL
      for (int c = 0; c < 2; c++) sums[r][c] = simdgroup_matrix<float, 8, 8>(0);
    }
  }

  // Adds `depth` values along K; x and w are rows of the two tiles at the first of them.
  void multiply_add(const threadgroup T* x, const threadgroup T* w, int depth) thread {
    for (int k = 0; k < depth; k += 8) {
      simdgroup_matrix<T, 8, 8> rows[ROW_BLOCKS], columns[2];
      DFLASH_UNROLL
      for (int r = 0; r < ROW_BLOCKS; r++) simdgroup_load(rows[r], x + 8 * r * stride + k, stride);
      DFLASH_UNROLL
      for (int c = 0; c < 2; c++) {
        simdgroup_load(columns[c], w + 8 * c * stride + k, stride, ulong2(0), true);
      }
      DFLASH_UNROLL
      for (int r = 0; r < ROW_BLOCKS; r++) {
        DFLASH_UNROLL
        for (int c = 0; c < 2; c++) {
          simdgroup_multiply_accumulate(sums[r][c], rows[r], columns[c], sums[r][c]);
        }
      }
    }
  }

  // to: [16, kTileColumns], at the first of its columns.
  void store(threadgroup float* to) const thread {
    DFLASH_UNROLL
    for (int r = 0; r < ROW_BLOCKS; r++) {
      DFLASH_UNROLL
      for (int c = 0; c < 2; c++) {
        simdgroup_store(sums[r][c], to + 8 * r * kTileColumns + 8 * c, kTileColumns);
      }
    }
  }
};

// Leaves the tile's sums over k in [begin, end) in `scratch`, where `tile_sum` finds them. `begin`
// is a multiple of the step; t: thread in the threadgroup, s: SIMD-group in the threadgroup.
template <typename T, int ROW_BLOCKS, typename Rows, typename Weights, bool GATE_UP>
void multiply_tile(Rows rows, Columns<Weights, GATE_UP> columns, int begin, int end,
                   threadgroup float4* scratch, int t, int s) {
  constexpr int depth = tile_depth<T>();
  constexpr int stride = kRowBytes / sizeof(T);
  threadgroup T* x_tile = reinterpret_cast<threadgroup T*>(scratch);
  threadgroup T* w_tile = x_tile + kTileRows * stride;
  const int half_step = s / 2 * (depth / 2);
  const int column = s % 2 * 16;

  TileLoader<T, PlainMatrix<T, T>, 8 * ROW_BLOCKS> x_loader;
  TileLoader<T, Weights, kTileColumns> w_loader;
  TileSums<T, ROW_BLOCKS> sums;
  sums.clear();
  x_loader.fetch(rows, begin, t);
  w_loader.fetch(columns, begin, t);
  for (int k = begin; k < end; k += depth) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // everyone is done with the last step's tiles
    x_loader.store(x_tile, t);
    w_loader.store(w_tile, t);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (k + depth < end) {
      x_loader.fetch(rows, k + depth, t);
      w_loader.fetch(columns, k + depth, t);
    }
    sums.multiply_add(x_tile + half_step, w_tile + column * stride + half_step,
                      min(depth / 2, end - k - half_step));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the sums take the place of the tiles
  threadgroup float* halves = reinterpret_cast<threadgroup float*>(scratch);  // [2, 16, columns]
  sums.store(halves + s / 2 * (kTileRows * kTileColumns) + column);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// An element of the tile that `multiply_tile` has left in `scratch`.
inline float tile_sum(const threadgroup float4* scratch, int row, int column) {
  const threadgroup float* halves = reinterpret_cast<const threadgroup float*>(scratch);
  const int i = row * kTileColumns + column;
  return halves[i] + halves[kTileRows * kTileColumns + i];
}

// The gated unit of a transformer's MLP: silu(gate) up.
inline float gated(float gate, float up) {
  return gate / (1 + exp(-gate)) * up;
}

}  // namespace dflash
