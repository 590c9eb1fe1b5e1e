// Barriers and the functions by which the 32 lanes of a SIMD-group exchange values.
#pragma once

#include "scalars.h"

namespace metal {

enum class mem_flags : unsigned {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
};
inline mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags((unsigned)a | (unsigned)b);
}

#define METAL_HOST_SITE int site = __builtin_LINE()  // a default argument: the caller's line

inline void threadgroup_barrier(mem_flags flags, METAL_HOST_SITE) {
  metal_host_threadgroup_barrier((unsigned)flags, site);
}
inline void simdgroup_barrier(mem_flags flags, METAL_HOST_SITE) {
  metal_host_simdgroup_barrier((unsigned)flags, site);
}

// The values that the lanes have handed in at one call.
template <class T>
struct Lanes {
  static_assert(sizeof(T) <= METAL_HOST_SLOT, "a lane's value fits its slot");
  const char* slots;
  uint32_t present;

  Lanes(const T& value, int site) {
    slots = metal_host_exchange(&value, sizeof(T), site, &present);
  }
  bool has(uint32_t lane) const { return lane < 32 && (present >> lane & 1); }
  T operator[](uint32_t lane) const {
    if (!has(lane)) {
      metal_host_inactive_lane();
      lane = metal_host_lane();
    }
    T value;
    __builtin_memcpy(&value, slots + METAL_HOST_SLOT * lane, sizeof value);
    return value;
  }
  uint32_t first() const { return __builtin_ctz(present); }
};

template <class T>
inline T simd_shuffle(T value, ushort lane, METAL_HOST_SITE) {
  return Lanes<T>(value, site)[lane];
}
template <class T>
inline T simd_broadcast(T value, ushort lane, METAL_HOST_SITE) {
  return Lanes<T>(value, site)[lane];
}
template <class T>
inline T simd_broadcast_first(T value, METAL_HOST_SITE) {
  const Lanes<T> lanes(value, site);
  return lanes[lanes.first()];
}
template <class T>
inline T simd_shuffle_xor(T value, ushort mask, METAL_HOST_SITE) {
  return Lanes<T>(value, site)[metal_host_lane() ^ mask];
}
// Beyond the last lane the result is unspecified; here it is the lane's own value.
template <class T>
inline T simd_shuffle_down(T value, ushort delta, METAL_HOST_SITE) {
  const Lanes<T> lanes(value, site);
  const uint32_t from = metal_host_lane() + delta;
  return from < 32 ? lanes[from] : value;
}
template <class T>
inline T simd_shuffle_up(T value, ushort delta, METAL_HOST_SITE) {
  const Lanes<T> lanes(value, site);
  const uint32_t lane = metal_host_lane();
  return lane < delta ? value : lanes[lane - delta];
}
template <class T>
inline T simd_shuffle_rotate_down(T value, ushort delta, METAL_HOST_SITE) {
  return Lanes<T>(value, site)[(metal_host_lane() + delta) % 32];
}

// Halves are folded onto each other (lane i with i + 16, then i + 8 ...), the same in every lane.
template <class T, class F>
inline T simd_fold(T value, int site, F combine) {
  const Lanes<T> lanes(value, site);
  T folded[32];
  uint32_t present = lanes.present;
  for (int i = 0; i < 32; i++) {
    if (lanes.has(i)) folded[i] = lanes[i];
  }
  for (int half_width = 16; half_width; half_width /= 2) {
    for (int i = 0; i < half_width; i++) {
      const bool low = present >> i & 1, high = present >> (i + half_width) & 1;
      const T other = folded[i + half_width];
      if (high) folded[i] = low ? combine(folded[i], other) : other;
      present |= (uint32_t)high << i;
    }
  }
  return folded[0];
}

#define METAL_HOST_FOLD(name, expression)                                   \
  template <class T>                                                        \
  inline T name(T value, METAL_HOST_SITE) {                                 \
    return simd_fold(value, site, [](T a, T b) { return T(expression); });  \
  }
METAL_HOST_FOLD(simd_sum, a + b)
METAL_HOST_FOLD(simd_product, a * b)
METAL_HOST_FOLD(simd_max, a < b ? b : a)
METAL_HOST_FOLD(simd_min, b < a ? b : a)
METAL_HOST_FOLD(simd_and, a & b)
METAL_HOST_FOLD(simd_or, a | b)
METAL_HOST_FOLD(simd_xor, a ^ b)
#undef METAL_HOST_FOLD

template <class T>
inline T simd_prefix_exclusive_sum(T value, METAL_HOST_SITE) {
  const Lanes<T> lanes(value, site);
  T sum = T(0);
  for (uint32_t i = 0; i < metal_host_lane(); i++) {
    if (lanes.has(i)) sum += lanes[i];
  }
  return sum;
}
template <class T>
inline T simd_prefix_inclusive_sum(T value, METAL_HOST_SITE) {
  return T(simd_prefix_exclusive_sum(value, site) + value);
}
inline bool simd_any(bool value, METAL_HOST_SITE) {
  return simd_fold<int>(value, site, [](int a, int b) { return a | b; });
}
inline bool simd_all(bool value, METAL_HOST_SITE) {
  return simd_fold<int>(value, site, [](int a, int b) { return a & b; });
}
struct simd_vote {
  uint64_t bits;
  explicit operator uint64_t() const { return bits; }
};
inline simd_vote simd_ballot(bool value, METAL_HOST_SITE) {
  const Lanes<bool> lanes(value, site);
  uint64_t bits = 0;
  for (int i = 0; i < 32; i++) {
    if (lanes.has(i) && lanes[i]) bits |= 1ull << i;
  }
  return {bits};
}
inline bool simd_is_first(METAL_HOST_SITE) {
  return Lanes<int>(0, site).first() == metal_host_lane();
}
template <class T>
inline T quad_shuffle_xor(T value, ushort mask, METAL_HOST_SITE) {
  return Lanes<T>(value, site)[metal_host_lane() ^ (mask & 3)];
}
template <class T>
inline T quad_sum(T value, METAL_HOST_SITE) {
  const Lanes<T> lanes(value, site);
  const uint32_t quad = metal_host_lane() & ~3u;
  return T(T(lanes[quad] + lanes[quad + 1]) + T(lanes[quad + 2] + lanes[quad + 3]));
}

}  // namespace metal
