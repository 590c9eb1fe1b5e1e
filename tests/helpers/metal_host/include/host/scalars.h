// Scalar types and as_type.
#pragma once

#include <type_traits>

#include "address_spaces.h"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

namespace metal {

typedef _Float16 half;
using std::size_t;

// The upper half of a float, rounded to nearest even.
struct bfloat {
  uint16_t bits;

  bfloat() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic<T>::value ||
                                              std::is_same<T, half>::value>>
  bfloat(T value) : bits(round((float)value)) {}

  operator float() const {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    __builtin_memcpy(&value, &wide, 4);
    return value;
  }

  static uint16_t round(float value) {
    uint32_t wide;
    __builtin_memcpy(&wide, &value, 4);
    if ((wide & 0x7fffffff) > 0x7f800000) return uint16_t((wide >> 16) | 0x40);  // stays a NaN
    return uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
  }
};

// bfloat with bfloat or an integer gives bfloat; with float it gives float.
#define METAL_HOST_OPERATOR(op)                                                             \
  inline bfloat operator op(bfloat a, bfloat b) { return bfloat((float)a op (float)b); }    \
  template <class I, class = std::enable_if_t<std::is_integral<I>::value>>                  \
  inline bfloat operator op(bfloat a, I b) {                                                \
    return bfloat((float)a op (float)b);                                                    \
  }                                                                                         \
  template <class I, class = std::enable_if_t<std::is_integral<I>::value>>                  \
  inline bfloat operator op(I a, bfloat b) {                                                \
    return bfloat((float)a op (float)b);                                                    \
  }                                                                                         \
  inline float operator op(bfloat a, float b) { return (float)a op b; }                     \
  inline float operator op(float a, bfloat b) { return a op (float)b; }                     \
  template <class R>                                                                        \
  inline bfloat& operator op##=(bfloat& a, R b) {                                           \
    return a = bfloat((float)a op (float)b);                                                \
  }
METAL_HOST_OPERATOR(+)
METAL_HOST_OPERATOR(-)
METAL_HOST_OPERATOR(*)
METAL_HOST_OPERATOR(/)
#undef METAL_HOST_OPERATOR

template <bool C, class T = void>
using enable_if_t = std::enable_if_t<C, T>;
template <class T>
struct is_floating_point
    : std::bool_constant<std::is_floating_point<T>::value || std::is_same<T, half>::value ||
                         std::is_same<T, bfloat>::value> {};

template <class To, class From>
inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace metal
