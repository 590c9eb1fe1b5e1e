// Three products of the same rows side by side, in one launch: what queries, keys and values are.
//
// Grid: (tiles of columns of the first matrix, then of the second, then of the third; splits of K;
// tiles of 16 rows). Keys and values have few columns, and each by itself would leave a GPU half
// empty or need its K split; together they seldom do.
#include <metal_stdlib>

#include "verify_matmul.metal"

namespace dflash {

// x [M, K]; a [A, K], b [B, K] and c [C, K]. Without SPLIT each has its own result, [M, A] and so on;
// else their columns follow each other in y_a, [splits, M, A + B + C] in float32, and y_b and y_c are
// not used. The rest as of verify_matmul.
template <typename T, bool SPLIT, typename Weights, typename Out>
void verify_beside(const device T* x, Weights a, Weights b, Weights c, device Out* y_a,
                   device Out* y_b, device Out* y_c, int M, int A, int B, int C,
                   threadgroup float* scratch, uint3 tile, uint3 grid, uint t, uint s) {
  const int tiles_a = (A + kTileColumns - 1) / kTileColumns;
  const int tiles_b = (B + kTileColumns - 1) / kTileColumns;
  const int second = tiles_a, third = tiles_a + tiles_b, index = tile.x;
  Weights w = a;
  device Out* y = y_a;
  int N = A;
  if (index >= third) {
    w = c;
    y = SPLIT ? y_a + A + B : y_c;
    N = C;
    tile.x = index - third;
  } else if (index >= second) {
    w = b;
    y = SPLIT ? y_a + A : y_b;
    N = B;
    tile.x = index - second;
  }
  verify_matmul<T, false, SPLIT>(
      x, w, w, y, M, N, SPLIT ? A + B + C : N, scratch, tile, grid, t, s);
}

}  // namespace dflash
