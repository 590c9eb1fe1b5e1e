// Where threads meet: barriers, SIMD-group exchanges and matrix products.
#include "shadow.h"
#include "state.h"

namespace metal_host {

namespace {

int first_lane(int simdgroup) { return simdgroup * kLanes; }

uint32_t waiting_lanes(int simdgroup, int site, bool any_site) {
  uint32_t lanes = 0;
  for (int lane = 0; lane < kLanes && first_lane(simdgroup) + lane < group.size; lane++) {
    const Fiber& other = group.fibers[first_lane(simdgroup) + lane];
    if (other.state == State::at_simdgroup && (any_site || other.site == site)) {
      lanes |= 1u << lane;
    }
  }
  return lanes;
}

void release_lanes(int number, uint32_t lanes) {
  Simdgroup& simdgroup = group.simdgroups[number];
  const unsigned flags = group.fibers[first_lane(number) + __builtin_ctz(lanes)].flags;
  char* slots = simdgroup.slots[simdgroup.round & 1];
  for (uint32_t rest = lanes; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    Fiber& other = group.fibers[first_lane(number) + lane];
    char* slot = slots + METAL_HOST_SLOT * lane;
    // A lane that waited while a subset went on has its value in an earlier table.
    if (other.value && other.value != slot) {
      __builtin_memcpy(slot, other.value, METAL_HOST_SLOT);
    }
    other.lanes = lanes;
    other.complete = __builtin_popcount(lanes) == simdgroup.live;
    other.slots = slots;
    other.state = State::ready;
    simdgroup.waiting--;
  }
  simdgroup.round++;
  simdgroup.mixed = false;
  for (Space space : {kThreadgroupSpace, kDeviceSpace}) {
    if (flags & kFlag[space]) simdgroup.epochs[space]++;
  }
  if (!simdgroup.waiting) return;
  const uint32_t left = waiting_lanes(number, 0, true);
  simdgroup.site = group.fibers[first_lane(number) + __builtin_ctz(left)].site;
  simdgroup.mixed = waiting_lanes(number, simdgroup.site, false) != left;
}

void wait_for_lanes(Fiber& self, Simdgroup& simdgroup, unsigned flags, int site) {
  if (simdgroup.waiting == 0) simdgroup.site = site;
  if (simdgroup.site != site) simdgroup.mixed = true;
  simdgroup.waiting++;
  self.state = State::at_simdgroup;
  self.site = site;
  self.flags = flags;
  if (simdgroup.waiting == simdgroup.live && !simdgroup.mixed) {
    const int number = self.place.simdgroup;
    release_lanes(number, simdgroup.live == kLanes ? ~0u : waiting_lanes(number, 0, true));
  } else {
    leave_fiber();
  }
}

void release_barrier() {
  if (group.mixed) {
    report("barrier-divergence", nullptr,
        "threads wait at different threadgroup_barrier calls, one of them at line %d "
        "(threadgroup %u)", group.site, group.number);
  }
  if (group.live < group.size) {
    report("barrier-divergence", nullptr,
        "%d of %d threads left the kernel before the threadgroup_barrier at line %d "
        "(threadgroup %u)", group.size - group.live, group.size, group.site, group.number);
  }
  for (int i = 0; i < group.size; i++) {
    Fiber& other = group.fibers[i];
    if (other.state == State::at_barrier) other.state = State::ready;
  }
  group.waiting = 0;
  group.mixed = false;
  for (Space space : {kThreadgroupSpace, kDeviceSpace}) {
    if (group.flags & kFlag[space]) epochs[space]++;
  }
  refresh_stamps(fiber());
}

}  // namespace

void lane_done(Fiber& done) {
  const int number = done.place.simdgroup;
  Simdgroup& simdgroup = group.simdgroups[number];
  simdgroup.live--;
  if (simdgroup.live && simdgroup.waiting == simdgroup.live && !simdgroup.mixed) {
    release_lanes(number, waiting_lanes(number, 0, true));
  }
}

void release_divergent() {
  for (int number = 0; number < (int)group.simdgroups.size(); number++) {
    const uint32_t waiting = waiting_lanes(number, 0, true);
    if (!waiting) continue;
    int site = group.fibers[first_lane(number) + __builtin_ctz(waiting)].site;
    for (uint32_t rest = waiting; rest; rest &= rest - 1) {
      const int other = group.fibers[first_lane(number) + __builtin_ctz(rest)].site;
      if (other < site) site = other;
    }
    release_lanes(number, waiting_lanes(number, site, false));
    return;
  }
  release_barrier();
}

}  // namespace metal_host

using namespace metal_host;

extern "C" {

uint32_t metal_host_lane() { return fiber().place.lane; }

void metal_host_threadgroup_barrier(unsigned flags, int site) {
  Fiber& self = fiber();
  if (group.waiting == 0) {
    group.site = site;
    group.flags = flags;
  }
  if (group.site != site) group.mixed = true;
  group.flags &= flags;
  group.waiting++;
  self.state = State::at_barrier;
  if (group.waiting == group.size) {
    release_barrier();
  } else {
    leave_fiber();
  }
}

void metal_host_simdgroup_barrier(unsigned flags, int site) {
  Fiber& self = fiber();
  Simdgroup& simdgroup = group.simdgroups[self.place.simdgroup];
  self.value = nullptr;
  wait_for_lanes(self, simdgroup, flags, site);
  refresh_stamps(self);
  if (!self.complete) {
    report("barrier-divergence", nullptr, "the simdgroup_barrier at line %d without all lanes "
        "(threadgroup %u)", site, group.number);
  }
}

const char* metal_host_exchange(const void* value, unsigned size, int site, uint32_t* lanes) {
  Fiber& self = fiber();
  Simdgroup& simdgroup = group.simdgroups[self.place.simdgroup];
  char* slot = simdgroup.slots[simdgroup.round & 1] + METAL_HOST_SLOT * self.place.lane;
  __builtin_memcpy(slot, value, size);
  self.value = slot;
  wait_for_lanes(self, simdgroup, 0, site);
  *lanes = self.lanes;
  return self.slots;
}

const float* metal_host_multiply_accumulate(
    const float* a, const float* b, const float* c, int site) {
  typedef float Row __attribute__((vector_size(32), aligned(4)));
  Fiber& self = fiber();
  Simdgroup& simdgroup = group.simdgroups[self.place.simdgroup];
  const int lane = self.place.lane, quad = lane / 4;
  const int row = (quad & 4) + lane / 2 % 4, column = (quad & 2) * 2 + lane % 2 * 2;
  for (int i = 0; i < 2; i++) {
    simdgroup.a[row * 8 + column + i] = a[i];
    simdgroup.b[row * 8 + column + i] = b[i];
    simdgroup.c[row * 8 + column + i] = c[i];
  }
  float* product = simdgroup.product[simdgroup.round & 1];
  if (simdgroup.waiting == kLanes - 1 && simdgroup.live == kLanes) {  // the last lane computes
    for (int i = 0; i < 8; i++) {
      Row sum = *(Row*)(simdgroup.c + i * 8);
      for (int k = 0; k < 8; k++) sum += simdgroup.a[i * 8 + k] * *(Row*)(simdgroup.b + k * 8);
      *(Row*)(product + i * 8) = sum;
    }
  }
  self.value = nullptr;
  wait_for_lanes(self, simdgroup, 0, site);
  if (self.lanes != ~0u) {
    report("divergent-matrix", nullptr, "the simdgroup_matrix operation at line %d without all "
        "32 lanes (threadgroup %u)", site, group.number);
  }
  return product;
}

void metal_host_inactive_lane() {
  report("inactive-lane", nullptr, "a SIMD-group function at line %d takes the value of a lane "
      "that is not there (threadgroup %u)", fiber().site, group.number);
}
}
