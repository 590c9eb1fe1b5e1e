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
};

template <class T>
inline T simd_shuffle(T value, ushort lane, METAL_HOST_SITE) {
  return Lanes<T>(value, site)[lane];
}
template <class T>
inline T simd_shuffle_xor(T value, ushort mask, METAL_HOST_SITE) {
  return Lanes<T>(value, site)[metal_host_lane() ^ mask];
}

}  // namespace metal
