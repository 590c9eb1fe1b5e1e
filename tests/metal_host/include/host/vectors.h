// Vectors of two to four scalars, aligned as Metal aligns them. Of Metal's
// swizzles there are those that lie in memory as they are: xy, zw, xyz.
#pragma once

#include "scalars.h"

namespace metal {

template <class T, int N>
struct vec;

#define METAL_HOST_MEMBERS(N)                                    \
  vec() = default;                                               \
  T& operator[](int i) { return (&x)[i]; }                       \
  const T& operator[](int i) const { return (&x)[i]; }           \
  vec(T value) {                                                 \
    for (int i = 0; i < N; i++) (*this)[i] = value;              \
  }                                                              \
  template <class U>                                             \
  explicit vec(const vec<U, N>& other) {                         \
    for (int i = 0; i < N; i++) (*this)[i] = (T)other[i];        \
  }

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  METAL_HOST_MEMBERS(2)
  vec(T a, T b) : x(a), y(b) {}
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  union {
    struct { T x, y, z; };
    vec<T, 2> xy;
  };
  METAL_HOST_MEMBERS(3)
  vec(T a, T b, T c) : x(a), y(b), z(c) {}
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  union {
    struct { T x, y, z, w; };
    struct { vec<T, 2> xy, zw; };
    vec<T, 3> xyz;
  };
  METAL_HOST_MEMBERS(4)
  vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  vec(vec<T, 2> low, vec<T, 2> high) : xy(low), zw(high) {}
};
#undef METAL_HOST_MEMBERS

#define METAL_HOST_OPERATOR(op)                                                  \
  template <class T, int N>                                                      \
  inline vec<T, N> operator op(const vec<T, N>& a, const vec<T, N>& b) {         \
    vec<T, N> result;                                                            \
    for (int i = 0; i < N; i++) result[i] = a[i] op b[i];                        \
    return result;                                                               \
  }                                                                              \
  template <class T, int N>                                                      \
  inline vec<T, N> operator op(const vec<T, N>& a, std::common_type_t<T> b) {    \
    return a op vec<T, N>(b);                                                    \
  }                                                                              \
  template <class T, int N>                                                      \
  inline vec<T, N> operator op(std::common_type_t<T> a, const vec<T, N>& b) {    \
    return vec<T, N>(a) op b;                                                    \
  }                                                                              \
  template <class T, int N, class R>                                             \
  inline vec<T, N>& operator op##=(vec<T, N>& a, const R& b) {                   \
    return a = a op b;                                                           \
  }
METAL_HOST_OPERATOR(+)
METAL_HOST_OPERATOR(-)
METAL_HOST_OPERATOR(*)
METAL_HOST_OPERATOR(/)
METAL_HOST_OPERATOR(&)
METAL_HOST_OPERATOR(|)
METAL_HOST_OPERATOR(^)
METAL_HOST_OPERATOR(<<)
METAL_HOST_OPERATOR(>>)
#undef METAL_HOST_OPERATOR

#define METAL_HOST_VECTORS(T) \
  typedef vec<T, 2> T##2;     \
  typedef vec<T, 3> T##3;     \
  typedef vec<T, 4> T##4;
METAL_HOST_VECTORS(float)
METAL_HOST_VECTORS(half)
METAL_HOST_VECTORS(bfloat)
METAL_HOST_VECTORS(char)
METAL_HOST_VECTORS(uchar)
METAL_HOST_VECTORS(short)
METAL_HOST_VECTORS(ushort)
METAL_HOST_VECTORS(int)
METAL_HOST_VECTORS(uint)
METAL_HOST_VECTORS(long)
METAL_HOST_VECTORS(ulong)
#undef METAL_HOST_VECTORS

template <class T, int N>
inline T dot(const vec<T, N>& a, const vec<T, N>& b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum += a[i] * b[i];
  return sum;
}

}  // namespace metal
