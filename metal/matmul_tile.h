// One tile of x w^T: 16 rows of x by 32 rows of w (columns of the result), along a range of K.
//
// A threadgroup of four SIMD-groups computes a tile. K goes in steps, a group of quantized weights
// each, and SIMD-group s takes steps s, s + 4, s + 8 ... of the range: together they read 32 rows
// of w in long stretches, each weight once for all 16 rows of x. There is no
// barrier in between: a lane reads the values that it multiplies (matrix_rows.h says how K is
// permuted for that), and the four SIMD-groups add up once, after the last step, in threadgroup memory.
//
//   w: 8 rows x 8 of K        x^T: 8 of K x 8 rows      sums: 8 columns x 8 rows of the result
//   a lane has two values     a lane has one k          a lane has one column
//   of one row                of two rows               for two rows
//
// So a lane holds the scale and bias of its column. A group's sum of code times x becomes a
// part of the result by one `fma` with the scale and one of the bias with the sum of the row's x,
// once for each column and row instead of once for each weight.
//
// The order of every sum is fixed by K alone: the steps of one SIMD-group in ascending order, then
// SIMD-groups 0 to 3. A row's place in the tile and the other rows do not matter:
// missing rows are zeros, and a column of an 8x8 product does not see the other columns.
// Nothing is added atomically.
#pragma once

#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "fragment.h"
#include "matrix_rows.h"

namespace dflash {
using namespace metal;

enum : int {
  kTileRows = 16,
  kTileColumns = 32,
  kColumnBlocks = kTileColumns / 8,
  kSimdgroups = 4,
  kThreads = 32 * kSimdgroups,
  kScratch = kSimdgroups * kTileRows * kTileColumns,  // floats: every SIMD-group's sums
};

// Rows of the left side: `count` of x [M, K], from `first` on.
template <typename T>
struct DenseRows {
  const device T* x;
  int K;
  int first;
  int count;

  const device T* row(int index) const thread { return x + size_t(first + index) * K; }
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

  void fetch(thread typename Weights::Piece& piece, int row, int k, int quarter) const thread {
    const bool second = GATE_UP && row >= width;
    const int column = first + (second ? row - width : row);
    if (second) {
      up.fetch(piece, column, k, quarter, column < N);
    } else {
      w.fetch(piece, column, k, quarter, column < N);
    }
  }
};

// The rows of x that one lane reads: two neighbours of every eight, four values of each.
template <typename T, int ROW_BLOCKS>
struct LaneRows {
  const device T* rows[2 * ROW_BLOCKS];
  bool inside[2 * ROW_BLOCKS];
  vec<T, 4> four[2 * ROW_BLOCKS];

  template <typename Rows>
  void find(Rows from, Place place) thread {
    DFLASH_UNROLL
    for (int i = 0; i < 2 * ROW_BLOCKS; i++) {
      const int row = i / 2 * 8 + place.column + i % 2;
      inside[i] = row < from.count;
      rows[i] = from.row(inside[i] ? row : 0);
    }
  }

  template <bool WHOLE>
  void read(int k, int K) thread {
    DFLASH_UNROLL
    for (int i = 0; i < 2 * ROW_BLOCKS; i++) four[i] = four_of<WHOLE>(rows[i], k, K, inside[i]);
  }
};

// One SIMD-group's sums: 32 columns by 8 ROW_BLOCKS rows of the result, over its steps.
template <typename T, typename Weights, int ROW_BLOCKS>
struct TileSums {
  Fragment sums[kColumnBlocks][ROW_BLOCKS];    // of one step, where `scaled`
  Fragment totals[kColumnBlocks][ROW_BLOCKS];  // read where `scaled`
  float x_sums[2 * ROW_BLOCKS];                // of the lane's rows and of its k, in one step

  // Metal 4.1 asks for a constructor of `thread` objects, and an implicit one does not count. Those
  // of simdgroup_matrix are declared like this, too.
  TileSums() thread {}

  static void clear(thread Fragment (&matrices)[kColumnBlocks][ROW_BLOCKS]) {
    DFLASH_UNROLL
    for (int c = 0; c < kColumnBlocks; c++) {
      DFLASH_UNROLL
      for (int r = 0; r < ROW_BLOCKS; r++) matrices[c][r] = Fragment(0);
    }
  }

  void begin() thread {
    clear(sums);
    clear(totals);
    DFLASH_UNROLL
    for (int i = 0; i < 2 * ROW_BLOCKS; i++) x_sums[i] = 0;
  }

  // Adds the step of K at `k`. `pieces`: this lane's weights of it, in each block of columns.
  void multiply_add(const thread typename Weights::Piece (&pieces)[kColumnBlocks],
                    thread LaneRows<T, ROW_BLOCKS>& x, int k, int K, Place place) thread {
    const int from = k + place.row / 2 * (Weights::step / 4) + place.row % 2 * 4;
    DFLASH_UNROLL
    for (int v = 0; v < Weights::step / 4; v += 8) {  // of this lane's quarter of the weights
      x.template read<Weights::whole != 0>(from + v, K);
      DFLASH_UNROLL
      for (int m = 0; m < 4; m++) multiply_add_eight(pieces, x, v + m, m);
    }
    if (Weights::scaled) scale(pieces);
  }

  // Adds one product along K: of weights `v` and `v` + 4 of every lane's piece, and x `m` of four.
  void multiply_add_eight(const thread typename Weights::Piece (&pieces)[kColumnBlocks],
                          const thread LaneRows<T, ROW_BLOCKS>& x, int v, int m) thread {
    Fragment right[ROW_BLOCKS];
    DFLASH_UNROLL
    for (int r = 0; r < ROW_BLOCKS; r++) {
      const float first = float(x.four[2 * r][m]), second = float(x.four[2 * r + 1][m]);
      right[r] = filled_with(first, second);
      if (Weights::scaled) {
        x_sums[2 * r] += first;
        x_sums[2 * r + 1] += second;
      }
    }
    DFLASH_UNROLL
    for (int c = 0; c < kColumnBlocks; c++) {
      const Fragment left =
          filled_with(Weights::value(pieces[c], v), Weights::value(pieces[c], v + 4));
      DFLASH_UNROLL
      for (int r = 0; r < ROW_BLOCKS; r++) {
        simdgroup_multiply_accumulate(sums[c][r], left, right[r], sums[c][r]);
      }
    }
  }

  // Adds the step's sums of codes, scaled, to the totals, and sets them to zero for the next step.
  void scale(const thread typename Weights::Piece (&pieces)[kColumnBlocks]) thread {
    DFLASH_UNROLL
    for (int i = 0; i < 2 * ROW_BLOCKS; i++) {
      const float x_sum = column_sum(x_sums[i]);
      DFLASH_UNROLL
      for (int c = 0; c < kColumnBlocks; c++) {
        float total = totals[c][i / 2].thread_elements()[i % 2];
        total = fma(pieces[c].scale, sums[c][i / 2].thread_elements()[i % 2], total);
        totals[c][i / 2].thread_elements()[i % 2] = fma(pieces[c].bias, x_sum, total);
      }
      x_sums[i] = 0;
    }
    clear(sums);
  }

  // to: [16, kTileColumns].
  void store(threadgroup float* to, Place place) thread {
    DFLASH_UNROLL
    for (int c = 0; c < kColumnBlocks; c++) {
      DFLASH_UNROLL
      for (int i = 0; i < 2 * ROW_BLOCKS; i++) {
        const int row = i / 2 * 8 + place.column + i % 2;
        const float total = Weights::scaled ? totals[c][i / 2].thread_elements()[i % 2]
                                            : sums[c][i / 2].thread_elements()[i % 2];
        to[row * kTileColumns + c * 8 + place.row] = total;
      }
    }
  }
};

// Leaves the tile's sums over k in [begin, end) in `scratch`, where `tile_sum` finds them. `begin`
// is a multiple of the step; t: thread in the threadgroup, s: SIMD-group in the threadgroup.
template <typename T, int ROW_BLOCKS, typename Rows, typename Weights, bool GATE_UP>
void multiply_tile(Rows rows, Columns<Weights, GATE_UP> columns, int begin, int end,
                   threadgroup float* scratch, int t, int s) {
  const Place place = place_of(t % 32);
  LaneRows<T, ROW_BLOCKS> x;
  x.find(rows, place);
  TileSums<T, Weights, ROW_BLOCKS> tile;
  tile.begin();
  for (int k = begin + s * Weights::step; k < end; k += kSimdgroups * Weights::step) {
    typename Weights::Piece pieces[kColumnBlocks];
    DFLASH_UNROLL
    for (int c = 0; c < kColumnBlocks; c++) {
      columns.fetch(pieces[c], c * 8 + place.row, k, place.column / 2);
    }
    tile.multiply_add(pieces, x, k, rows.K, place);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the sums of the last tile have been read
  tile.store(scratch + s * (kTileRows * kTileColumns), place);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// An element of the tile that `multiply_tile` has left in `scratch`.
inline float tile_sum(const threadgroup float* scratch, int row, int column) {
  const int i = row * kTileColumns + column;
  float sum = scratch[i];
  DFLASH_UNROLL
  for (int s = 1; s < kSimdgroups; s++) sum += scratch[s * (kTileRows * kTileColumns) + i];
  return sum;
}

}  // namespace dflash
