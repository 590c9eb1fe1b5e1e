// Everything that <metal_stdlib> and its siblings offer, as far as kernels here need it.
// Address spaces are erased here; ../../strict/ has them.
#pragma once

#include "address_spaces.h"
#include "scalars.h"
#include "vectors.h"
#include "math.h"
#include "simdgroup.h"
#include "matrix.h"

using namespace metal;

// What MLX's own prelude to a custom kernel names.
typedef metal::half float16_t;
typedef metal::bfloat bfloat16_t;

#include "reserved.h"
