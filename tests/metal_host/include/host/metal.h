// Everything that <metal_stdlib> and its siblings offer, as far as kernels here need it.
//
// Two builds share these headers. The one that runs erases address spaces. METAL_HOST_STRICT, which
// clang only parses, makes them real, so that a `device` pointer does not pass for a `threadgroup`
// one; where the two differ, the header says so.
#pragma once

#include "address_spaces.h"
#include "scalars.h"
#include "vectors.h"
#include "math.h"
#include "simdgroup.h"
#include "matrix.h"
#include "atomic.h"

using namespace metal;

// What MLX's own prelude to a custom kernel names.
typedef metal::half float16_t;
typedef metal::bfloat bfloat16_t;
