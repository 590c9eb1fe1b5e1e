// Adds up the sums of a product whose K was split (verify_matmul.metal), the first split first.
#include <metal_stdlib>

#include "gated.h"

namespace dflash {
using namespace metal;

// Element `at` of the `size` of every split. sums [splits, 1 or (GATE_UP) 2, size], float32.
template <bool GATE_UP>
inline float sum_of_splits(const device float* sums, int splits, size_t size, size_t at) {
  constexpr int parts = GATE_UP ? 2 : 1;
  float totals[2] = {0, 0};
  for (int split = 0; split < splits; split++) {
    DFLASH_UNROLL
    for (int part = 0; part < parts; part++) {
      totals[part] += sums[(size_t(split) * parts + part) * size + at];
    }
  }
  return GATE_UP ? gated(totals[0], totals[1]) : totals[0];
}

}  // namespace dflash
