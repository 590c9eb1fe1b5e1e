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
METAL_HOST_FUNCTION(exp10, __builtin_powf(10.0f, x))
METAL_HOST_FUNCTION(expm1, __builtin_expm1f(x))
METAL_HOST_FUNCTION(log, __builtin_logf(x))
METAL_HOST_FUNCTION(log2, __builtin_log2f(x))
METAL_HOST_FUNCTION(log10, __builtin_log10f(x))
METAL_HOST_FUNCTION(log1p, __builtin_log1pf(x))
METAL_HOST_FUNCTION(sqrt, __builtin_sqrtf(x))
METAL_HOST_FUNCTION(rsqrt, 1.0f / __builtin_sqrtf(x))
METAL_HOST_FUNCTION(sin, __builtin_sinf(x))
METAL_HOST_FUNCTION(cos, __builtin_cosf(x))
METAL_HOST_FUNCTION(tan, __builtin_tanf(x))
METAL_HOST_FUNCTION(sinh, __builtin_sinhf(x))
METAL_HOST_FUNCTION(cosh, __builtin_coshf(x))
METAL_HOST_FUNCTION(tanh, __builtin_tanhf(x))
METAL_HOST_FUNCTION(erf, __builtin_erff(x))
METAL_HOST_FUNCTION(floor, __builtin_floorf(x))
METAL_HOST_FUNCTION(ceil, __builtin_ceilf(x))
METAL_HOST_FUNCTION(round, __builtin_roundf(x))
METAL_HOST_FUNCTION(rint, __builtin_rintf(x))
METAL_HOST_FUNCTION(trunc, __builtin_truncf(x))
METAL_HOST_FUNCTION(fabs, __builtin_fabsf(x))
#undef METAL_HOST_FUNCTION

template <class T>
inline T abs(T value) {
  return value < T(0) ? T(-value) : value;
}
template <class T>
inline bool isnan(T value) {
  return __builtin_isnan((float)value);
}
template <class T>
inline bool isinf(T value) {
  return __builtin_isinf((float)value);
}
template <class T>
inline bool isfinite(T value) {
  return __builtin_isfinite((float)value);
}
template <class T>
inline T fma(T a, T b, T c) {
  metal_host_count_fma();
  return (T)__builtin_fmaf((float)a, (float)b, (float)c);
}
template <class T>
inline T pow(T base, T exponent) {
  return (T)__builtin_powf((float)base, (float)exponent);
}
template <class T>
inline T fmod(T a, T b) {
  return (T)__builtin_fmodf((float)a, (float)b);
}
template <class T>
inline T copysign(T size, T sign) {
  return (T)__builtin_copysignf((float)size, (float)sign);
}
template <class T>
inline T max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
inline T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
inline T max3(T a, T b, T c) {
  return max(a, max(b, c));
}
template <class T>
inline T min3(T a, T b, T c) {
  return min(a, min(b, c));
}
template <class T>
inline T fmax(T a, T b) {
  return (T)__builtin_fmaxf((float)a, (float)b);
}
template <class T>
inline T fmin(T a, T b) {
  return (T)__builtin_fminf((float)a, (float)b);
}
template <class T>
inline T clamp(T value, T low, T high) {
  return min(max(value, low), high);
}
template <class T>
inline T select(T if_false, T if_true, bool condition) {
  return condition ? if_true : if_false;
}
inline int popcount(uint32_t value) { return __builtin_popcount(value); }
inline int clz(uint32_t value) { return value ? __builtin_clz(value) : 32; }
inline int ctz(uint32_t value) { return value ? __builtin_ctz(value) : 32; }

namespace precise {
using metal::cos;
using metal::exp;
using metal::exp2;
using metal::log;
using metal::log2;
using metal::rsqrt;
using metal::sin;
using metal::sqrt;
using metal::tanh;
}  // namespace precise
namespace fast = precise;

}  // namespace metal
