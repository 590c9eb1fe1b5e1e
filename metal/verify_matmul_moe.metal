// The products of a verify's rows with the experts they are routed to: y[p] = x[p's row] w[e(p)]^T
// for every pair p of a row and one of its experts e(p), and the gated unit likewise.
//
// The pairs come in an order that sorts them by expert. Grid: (tiles of columns, pairs) threadgroups
// of 128 threads, but only the first pair of each expert has work: its threadgroups take all rows of
// that expert, up to 16 at a time, so that with up to 16 rows an expert's weights are read once. The
// others see that the pair before has the same expert and return. How many experts are in use, and
// how the rows spread over them, is thus never needed on the host.
//
// K is not split: there are many experts, hence many tiles. The order of sums is that of one split
// in verify_matmul.metal.
#include <metal_stdlib>

#include "gated.h"
#include "matmul_tile.h"

namespace dflash {

// Rows of the left side: those of the pairs order[first], ..., order[first + count - 1]. A row of x
// has `pairs_per_row` pairs.
template <typename T>
struct RoutedRows {
  const device T* x;
  int K;
  const device uint* order;
  int first;
  int count;
  int pairs_per_row;

  const device T* row(int index) const thread {
    return x + size_t(order[first + index] / pairs_per_row) * K;
  }
};

// x [M, K]; w and up [E, N, K] (`up` is read only with GATE_UP); experts [P]: each pair's expert;
// order [P]: the pairs, sorted by their experts; y [P, N].
// tile: threadgroup in the grid; pairs: P; scratch: kScratch floats; t, s: this thread.
template <typename T, bool GATE_UP, typename Weights>
void verify_matmul_moe(const device T* x, Weights w, Weights up, const device uint* order,
                       const device uint* experts, device T* y, int M, int N, int pairs,
                       threadgroup float* scratch, uint3 tile, uint t, uint s) {
  constexpr int width = Columns<Weights, GATE_UP>::width;
  const int start = tile.y;
  const uint expert = experts[order[start]];
  if (start > 0 && experts[order[start - 1]] == expert) return;
  int end = start + 1;
  while (end < pairs && experts[order[end]] == expert) end++;

  const int first_column = tile.x * width;
  const Columns<Weights, GATE_UP> columns = {w.expert(expert, N), up.expert(expert, N),
                                             first_column, N};
  for (int first = start; first < end; first += kTileRows) {
    const int count = min(int(kTileRows), end - first);
    const RoutedRows<T> rows = {x, w.K, order, first, count, pairs / M};
    if (count <= 8) {  // as almost always: the rows spread over the experts
      multiply_tile<T, 1>(rows, columns, 0, w.K, scratch, t, s);
    } else {
      multiply_tile<T, 2>(rows, columns, 0, w.K, scratch, t, s);
    }
    for (int i = t; i < count * width; i += kThreads) {
      const int row = i / width, column = i % width;
      if (first_column + column >= N) continue;
      const float sum = tile_sum(scratch, row, column);
      const float up_sum = GATE_UP ? tile_sum(scratch, row, width + column) : 0;
      const size_t at = size_t(order[first + row]) * N + first_column + column;
      y[at] = T(GATE_UP ? gated(sum, up_sum) : sum);
    }
  }
}

}  // namespace dflash
