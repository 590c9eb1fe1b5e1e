// Up to four products of the same rows in one launch: queries, keys and values, or the inputs of a
// recurrence.
//
// Grid: (tiles of columns of the first matrix, then of the second and so on; splits of K; tiles of 16
// rows). Keys, values and gates have few columns, and each by itself would leave a GPU half empty or
// need its K split; together they seldom do.
#include <metal_stdlib>

#include "verify_matmul.metal"

namespace dflash {

inline int tiles_of(int columns) {
  return (columns + kTileColumns - 1) / kTileColumns;
}

// x [M, K]; a [A, K], b [B, K], c [C, K] and d [D, K], of which the last may have no columns. Without
// SPLIT each has its own result, [M, A] and so on; else their columns follow each other in y_a,
// [splits, M, A + B + C + D] in float32, and the others are not used. The rest as of verify_matmul.
template <typename T, bool SPLIT, typename Weights, typename Out>
void verify_qkv(const device T* x, Weights a, Weights b, Weights c, Weights d, device Out* y_a,
                   device Out* y_b, device Out* y_c, device Out* y_d, int M, int A, int B, int C,
                   int D, threadgroup float* scratch, uint3 tile, uint3 grid, uint t, uint s) {
  Weights w = a;
  device Out* y = y_a;
  int N = A, index = tile.x, before = 0;  // tile of this matrix, columns of those before it
  if (index >= tiles_of(A)) {
    w = b, y = y_b, N = B;
    index -= tiles_of(A), before = A;
    if (index >= tiles_of(B)) {
      w = c, y = y_c, N = C;
      index -= tiles_of(B), before += B;
      if (index >= tiles_of(C)) {
        w = d, y = y_d, N = D;
        index -= tiles_of(C), before += C;
      }
    }
  }
  tile.x = index;
  verify_matmul<T, false, SPLIT>(x, w, w, SPLIT ? y_a + before : y, M, N,
                                 SPLIT ? A + B + C + D : N, scratch, tile, grid, t, s);
}

}  // namespace dflash
