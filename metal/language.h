// What every kernel here asks of the compiler.
#pragma once

#include <metal_stdlib>

// A product and a sum are one operation only where the source says `fma`: left to the compiler, one
// instance of a template might round the product and another not, and a row's bits would depend on
// the rows beside it.
#pragma METAL fp contract(off)

// For loops over small arrays, which are registers only if every index is known: an array that is
// indexed by a variable lies in memory, even if it could be unrolled.
#define DFLASH_UNROLL _Pragma("clang loop unroll(full)")
