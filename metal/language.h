// Requests to the compiler that every kernel shares.
#pragma once

#include <metal_stdlib>

// A product and a sum are fused only where the source says `fma`. If the compiler chose, one instance
// of a template might round the product and another not, and a row's bits would depend on the other
// rows.
#pragma METAL fp contract(off)

// For loops over small arrays, which are registers only if every index is known: an array that is
// indexed by a variable lies in memory, even if it could be unrolled.
#define DFLASH_UNROLL _Pragma("clang loop unroll(full)")
