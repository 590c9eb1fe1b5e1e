// The sums of a product whose K was split (verify_matmul.metal), added up: the first split first.
#include <metal_stdlib>

#include "gated.h"

namespace dflash {
using namespace metal;

// sums [splits, 1 or 2, M N], float32 -> y [M N]; one thread per element, `at`.
template <bool GATE_UP, typename Out>
void merge_splits(const device float* sums, device Out* y, int splits, size_t size, size_t at) {
  constexpr int parts = GATE_UP ? 2 : 1;
  float totals[2] = {0, 0};
  for (int split = 0; split < splits; split++) {
    DFLASH_UNROLL
    for (int part = 0; part < parts; part++) {
      totals[part] += sums[(size_t(split) * parts + part) * size + at];
    }
  }
  y[at] = Out(GATE_UP ? gated(totals[0], totals[1]) : totals[0]);
}

// sums [splits, M, A + B + C + D], float32, of fused products -> y_a [M, A], y_b [M, B] and so
// on; one thread per element, column `column` of row `row`.
template <typename Out>
void merge_qkv(const device float* sums, device Out* y_a, device Out* y_b, device Out* y_c,
                  device Out* y_d, int splits, int A, int B, int C, int D, size_t rows, size_t row,
                  int column) {
  const size_t stride = A + B + C + D, at = row * stride + column;
  float total = 0;
  for (int split = 0; split < splits; split++) total += sums[split * rows * stride + at];
  if (column < A) {
    y_a[row * A + column] = Out(total);
  } else if (column < A + B) {
    y_b[row * B + column - A] = Out(total);
  } else if (column < A + B + C) {
    y_c[row * C + column - A - B] = Out(total);
  } else {
    y_d[row * D + column - A - B - C] = Out(total);
  }
}

}  // namespace dflash
