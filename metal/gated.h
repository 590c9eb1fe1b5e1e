// The gated unit, for the product kernels and for merging split sums.
#pragma once

#include <metal_stdlib>

#include "language.h"

namespace dflash {
using namespace metal;

// The gated unit of a transformer's MLP: silu(gate) up.
inline float gated(float gate, float up) {
  return gate / (1 + exp(-gate)) * up;
}

}  // namespace dflash
