// A launch: the threadgroups of a grid, one after the other.
#include <algorithm>

#include "buffers.h"
#include "threadgroup_memory.h"

namespace metal_host {

Launch* launch;
std::vector<Shadow> buffer_shadows;

namespace {

struct Extent {
  uint32_t x[3];
  uint32_t count() const { return x[0] * x[1] * x[2]; }
};

Extent place_in(uint32_t index, const Extent& of) {
  return {{index % of.x[0], index / of.x[0] % of.x[1], index / of.x[0] / of.x[1]}};
}

void place_thread(uint32_t index, const Extent& at, const Extent& size, const Extent& dispatched,
    const Extent& groups) {
  Fiber& fiber = group.fibers[index];
  fiber.state = State::ready;
  metal_host_thread& place = fiber.place;
  place.index = index;
  place.lane = index % kLanes;
  place.simdgroup = index / kLanes;
  place.simdgroups = group.simdgroups.size();
  const Extent position = place_in(index, size);
  for (int i = 0; i < 3; i++) {
    place.group_position[i] = at.x[i];
    place.grid_position[i] = at.x[i] * dispatched.x[i] + position.x[i];
    place.threadgroups[i] = groups.x[i];
    place.grid[i] = launch->grid[i];
  }
}

void start_threadgroup(uint32_t number, const Extent& dispatched, const Extent& groups) {
  const Extent at = place_in(number, groups);
  Extent size;  // the last ones of a grid may be smaller
  for (int i = 0; i < 3; i++) {
    size.x[i] = std::min(dispatched.x[i], launch->grid[i] - at.x[i] * dispatched.x[i]);
  }
  group.number = number;
  group.size = group.live = size.count();
  group.waiting = 0;
  group.mixed = false;
  for (Space space : {kThreadgroupSpace, kDeviceSpace}) first_epochs[space] = ++epochs[space];
  clear_threadgroup_memory();
  group.simdgroups.resize((group.size + kLanes - 1) / kLanes);
  for (int i = 0; i < (int)group.simdgroups.size(); i++) {
    Simdgroup& simdgroup = group.simdgroups[i];
    simdgroup.live = std::min(kLanes, group.size - i * kLanes);
    simdgroup.waiting = 0;
    simdgroup.mixed = false;
    simdgroup.epochs[0] = simdgroup.epochs[1] = 0;
  }
  for (int i = 0; i < group.size; i++) place_thread(i, at, size, dispatched, groups);
}

void begin(Launch& started) {
  launch = &started;
  clear_findings();
  stopped = false;
  kernel = started.kernel;
  buffer_shadows.clear();
#ifdef METAL_HOST_CHECKED
  for (uint32_t i = 0; i < started.buffer_count; i++) {
    const Buffer& buffer = started.buffers[i];
    buffer_shadows.emplace_back();
    buffer_shadows.back().resize(buffer.size, buffer.element);
  }
#endif
}

}  // namespace
}  // namespace metal_host

extern "C" METAL_HOST_EXPORT void metal_host_launch(metal_host::Launch* started) {
  using namespace metal_host;
  begin(*started);
  std::vector<void*> addresses;
  for (uint32_t i = 0; i < launch->buffer_count; i++) addresses.push_back(launch->buffers[i].data);
  kernel_buffers = addresses.data();
  Extent dispatched, groups;
  for (int i = 0; i < 3; i++) {
    dispatched.x[i] = std::max(1u, std::min(launch->threadgroup[i], launch->grid[i]));
    groups.x[i] = (launch->grid[i] + dispatched.x[i] - 1) / dispatched.x[i];
  }
  make_fibers(dispatched.count());
  const uint64_t end = std::min<uint64_t>(groups.count(), launch->last_group + 1ull);
  for (uint32_t i = launch->first_group; i < end && !stopped; i++) {
    start_threadgroup(i, dispatched, groups);
    run_threadgroup();
  }
}
