// y = x w^T for the few rows of a verify, and silu(x gate^T) (x up^T) in one pass.
//
// Grid: (tiles of columns, splits of K, tiles of 16 rows) threadgroups of 128 threads. Several
// matrices share a launch: the tiles of the second one's columns follow those of the first. Keys,
// values and gates have few columns, and each by itself would leave a GPU half empty or need its K
// split; together they seldom do. With up to 16 rows every weight is read from device memory once.
// See matmul_tile.h for the work inside a threadgroup and for the order of its sums.
//
// A matrix with few columns has too few tiles to keep a GPU busy, so its K is split: every split
// writes its sums, and merge_splits.metal adds them, the first split first. Where the splits lie is
// given by N and K alone, so a row's sums have the same order whatever shares the call.
#include <metal_stdlib>

#include "gated.h"
#include "matmul_tile.h"

namespace dflash {

// Tiles of a matrix, of which GATE_UP makes half of the columns.
template <bool GATE_UP>
inline int tiles_of(int columns) {
  constexpr int width = GATE_UP ? kTileColumns / 2 : kTileColumns;
  return (columns + width - 1) / width;
}

// x [M, K], w and up [N, K] (`up` is read only with GATE_UP).
// y: [M, N] without SPLIT; else [splits, 1 or (GATE_UP) 2, M, N] in float32: sums yet to be merged.
// Its rows are `stride` apart: more than N where it is a part of longer rows.
// tile: threadgroup in the grid; grid: its size; scratch: kScratch floats; t, s: this thread.
template <typename T, bool GATE_UP, bool SPLIT, typename Weights, typename Out>
void verify_matmul(const device T* x, Weights w, Weights up, device Out* y, int M, int N,
                   int stride, threadgroup float* scratch, uint3 tile, uint3 grid, uint t, uint s) {
  constexpr int width = Columns<Weights, GATE_UP>::width;
  constexpr int step = Weights::step;
  const int first_row = tile.z * kTileRows;
  const int first_column = tile.x * width;
  const int steps = (w.K + step - 1) / step;
  const int begin = steps * int(tile.y) / int(grid.y) * step;
  const int end = steps * int(tile.y + 1) / int(grid.y) * step;  // past K there are zeros

  const DenseRows<T> rows = {x, w.K, first_row, min(int(kTileRows), M - first_row)};
  const Columns<Weights, GATE_UP> columns = {w, up, first_column, N};
  if (rows.count <= 8) {  // half of the work, and for each row the same sums
    multiply_tile<T, 1>(rows, columns, begin, end, scratch, t, s);
  } else {
    multiply_tile<T, 2>(rows, columns, begin, end, scratch, t, s);
  }

  for (int i = t; i < rows.count * width; i += kThreads) {
    const int row = i / width, column = i % width;
    if (first_column + column >= N) continue;
    const size_t at = size_t(first_row + row) * stride + first_column + column;
    const float sum = tile_sum(scratch, row, column);
    const float up_sum = GATE_UP ? tile_sum(scratch, row, width + column) : 0;
    if (SPLIT) {
      const size_t part = size_t(tile.y) * (GATE_UP ? 2 : 1);
      y[part * M * stride + at] = Out(sum);
      if (GATE_UP) y[(part + 1) * M * stride + at] = Out(up_sum);
    } else {
      y[at] = Out(GATE_UP ? gated(sum, up_sum) : sum);
    }
  }
}

}  // namespace dflash
