// Mathematical functions: computed in float and rounded back to the type.
#pragma once

#include "scalars.h"
#include "vectors.h"

namespace metal {

#define METAL_HOST_FUNCTION(name, expression)                                     \
  template <class T, class = enable_if_t<is_floating_point<T>::value>>            \
  inline T name(T value) {                                                        \
    const float x = (float)value;                                                 \
    return (T)(expression);                                                       \
  }
METAL_HOST_FUNCTION(exp, __builtin_expf(x))
METAL_HOST_FUNCTION(exp2, __builtin_exp2f(x))
#undef METAL_HOST_FUNCTION

template <class T>
inline bool isfinite(T value) {
  return __builtin_isfinite((float)value);
}
template <class T>
inline T fma(T a, T b, T c) {
  return (T)__builtin_fmaf((float)a, (float)b, (float)c);
}
template <class T>
inline T max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
inline T min(T a, T b) {
  return b < a ? b : a;
}

}  // namespace metal
