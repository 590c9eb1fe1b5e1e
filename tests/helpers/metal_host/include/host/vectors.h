// Vectors of two to four scalars, aligned as Metal aligns them.
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
  T x, y, z;
  METAL_HOST_MEMBERS(3)
  vec(T a, T b, T c) : x(a), y(b), z(c) {}
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  METAL_HOST_MEMBERS(4)
  vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
};
#undef METAL_HOST_MEMBERS

#define METAL_HOST_VECTORS(T) \
  typedef vec<T, 2> T##2;     \
  typedef vec<T, 3> T##3;     \
  typedef vec<T, 4> T##4;
METAL_HOST_VECTORS(float)
METAL_HOST_VECTORS(half)
METAL_HOST_VECTORS(short)
METAL_HOST_VECTORS(ushort)
METAL_HOST_VECTORS(int)
METAL_HOST_VECTORS(uint)
METAL_HOST_VECTORS(ulong)
#undef METAL_HOST_VECTORS

}  // namespace metal
