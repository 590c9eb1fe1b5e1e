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

}  // namespace dflash
