// The shadow of memory: who touched each element last, to find races and uninitialised reads.
//
// A stamp says who and when: [epoch:32][SIMD-group's epoch:16][who:16]. A threadgroup barrier opens
// a new epoch of the memory that its flags name, a simdgroup_barrier a new SIMD-group's epoch.
// Accesses of different threads are in order when an epoch lies between them, or, inside one
// SIMD-group, one of its epochs.
#pragma once

#include <cstdint>
#include <vector>

#include "state.h"

namespace metal_host {

typedef uint64_t Stamp;  // 0: never

constexpr uint32_t kSeveralLanes = 0x8000;  // who: | SIMD-group, for readers of one SIMD-group
constexpr uint32_t kSeveral = 0xffff;       // who: readers of several

extern uint32_t epochs[2];        // by Space
extern uint32_t first_epochs[2];  // of the running threadgroup

// Of one element, or of a part of it once a smaller access has been seen.
struct Cell {
  Stamp written = 0, read = 0;
};

struct Shadow {
  std::vector<Cell> cells;
  unsigned shift = 0;  // log2 of the bytes of a cell

  void resize(size_t bytes, size_t element);
  void split(unsigned to_shift);  // smaller cells, each with the stamps of the one it was in
};

inline void refresh_stamps(Fiber& fiber) {
  const Simdgroup& simdgroup = group.simdgroups[fiber.place.simdgroup];
  for (Space space : {kThreadgroupSpace, kDeviceSpace}) {
    fiber.stamps[space] = (Stamp)epochs[space] << 32 |
                          (Stamp)(simdgroup.epochs[space] & 0xffff) << 16 | fiber.place.index;
  }
}

inline uint32_t epoch_of(Stamp stamp) { return stamp >> 32; }
inline uint32_t simdgroup_epoch_of(Stamp stamp) { return stamp >> 16 & 0xffff; }
inline uint32_t who(Stamp stamp) { return stamp & 0xffff; }
inline uint32_t simdgroup_of(Stamp stamp) {
  const uint32_t id = who(stamp);
  return id == kSeveral ? kSeveral : id & kSeveralLanes ? id & ~kSeveralLanes : id / kLanes;
}

// Whether nothing orders an earlier access, at least one of the two being a write, before mine.
template <Space space>
inline bool unordered(Stamp earlier, Stamp mine) {
  if (epoch_of(earlier) != epoch_of(mine)) {
    return space == kDeviceSpace && earlier && epoch_of(earlier) < first_epochs[space];
  }
  if (who(earlier) == who(mine)) return false;
  return simdgroup_of(earlier) != simdgroup_of(mine) ||
         simdgroup_epoch_of(earlier) == simdgroup_epoch_of(mine);
}

// The stamp of all that have read in this epoch.
inline Stamp joined(Stamp readers, Stamp mine) {
  if (epoch_of(readers) != epoch_of(mine) || who(readers) == who(mine)) return mine;
  const Stamp when = mine & ~(Stamp)0xffff;
  if (simdgroup_of(readers) != simdgroup_of(mine)) return when | kSeveral;
  return when | kSeveralLanes | simdgroup_of(mine);
}

}  // namespace metal_host
