// What a compiled kernel and the headers it includes ask of the runtime (runtime/*.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

// `site` is the source line of a call: the threads that meet must have come to the same one. Two
// calls on one line are not told apart.
#define METAL_HOST_EXPORT __attribute__((visibility("default")))
#pragma GCC visibility push(default)
extern "C" {

// Where a thread is in its launch; the kernel's attributes ([[thread_position_in_grid]] ...).
struct metal_host_thread {
  uint32_t index, lane, simdgroup, simdgroups;
  uint32_t group_position[3], grid_position[3], threadgroups[3], grid[3];
};

// The sources and results of SIMD-group functions: one slot for each lane.
enum { METAL_HOST_SLOT = 64 };

void metal_host_threadgroup_barrier(unsigned flags, int site);
void metal_host_simdgroup_barrier(unsigned flags, int site);

// Hands in this lane's value and waits for the others. Returns their slots, and in `lanes` a bit
// for each lane that takes part.
const char* metal_host_exchange(const void* value, unsigned size, int site, uint32_t* lanes);

// d = a b + c for 8x8 matrices, of which each lane hands in two elements. Returns all of d.
const float* metal_host_multiply_accumulate(
    const float* a, const float* b, const float* c, int site);

uint32_t metal_host_lane();

// The threadgroup's variable number `id` of the kernel, the same for all of its threads.
void* metal_host_threadgroup_variable(int id, size_t size, size_t element, const char* name);

void metal_host_inactive_lane();
}
#pragma GCC visibility pop
