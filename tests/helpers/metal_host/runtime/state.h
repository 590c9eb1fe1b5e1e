// What the parts of the runtime share: the threads of the threadgroup that is running.
//
// One threadgroup runs at a time, on one host thread, and its Metal threads are fibers: a fiber
// runs until it waits for others at a barrier or in a SIMD-group function, then the next one does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../include/host/runtime.h"

namespace metal_host {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 32 << 10;

enum class State : uint8_t { ready, at_simdgroup, at_barrier, done };

struct Fiber {
  void* stack_pointer = nullptr;
  State state = State::ready;
  int site = 0;                 // where it waits,
  unsigned flags = 0;           // for the memory that a barrier orders; 0 if it is no barrier
  const char* value = nullptr;  // its slot, while it waits in an exchange
  const char* slots = nullptr;  // what the exchange gave: everyone's slots,
  uint32_t lanes = 0;           // who took part,
  bool complete = false;        // and whether that is every lane there is
  uint64_t stamps[2] = {0, 0};  // see shadow.h
  metal_host_thread place;
};

struct Simdgroup {
  int live, waiting;
  int site;        // where the first of those waiting waits
  bool mixed;      // some wait elsewhere
  unsigned round;  // two tables take turns: the lanes may read one while others fill the next
  uint32_t epochs[2];
  alignas(64) char slots[2][kLanes * METAL_HOST_SLOT];
  float a[64], b[64], c[64], product[2][64];
};

struct Threadgroup {
  std::vector<Fiber> fibers;
  std::vector<Simdgroup> simdgroups;
  int current = -1;  // the running fiber
  int size = 0, live = 0, waiting = 0;
  int site = 0;
  bool mixed = false;
  unsigned flags = 0;  // of the barrier: what every waiting thread asked for
  uint32_t number = 0;
};
extern Threadgroup group;

extern Fiber* running;      // group.fibers[group.current],
extern char* running_stack;  // and its private memory

inline Fiber& fiber() { return *running; }

// Which memory a barrier orders, and which an access touches.
enum Space { kThreadgroupSpace = 0, kDeviceSpace = 1 };
constexpr unsigned kFlag[2] = {2, 1};  // mem_flags

// fibers.cpp
extern void (*kernel)(void** buffers, const metal_host_thread* place);
extern void** kernel_buffers;
void make_fibers(int count);
void run_threadgroup();
void leave_fiber();               // run others until this one is ready again
[[noreturn]] void stop_launch();  // back to the launcher, for good,
extern bool stopped;              // which sees this
int stack_of(const char* address);  // whose private memory it is; -1: nobody's

// barriers.cpp
void release_divergent();  // nobody can run: let go some of those who wait
void lane_done(Fiber& done);

// findings.cpp
void report(const char* kind, const void* where, const char* format, ...)
    __attribute__((format(printf, 3, 4)));
void clear_findings();

}  // namespace metal_host
