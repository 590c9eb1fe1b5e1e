// Fibers: a stack for each Metal thread, and who runs next.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#include "shadow.h"
#include "state.h"

// Saves what a call must preserve, swaps the stacks, and restores.
extern "C" void metal_host_switch(void** from, void* to);
#if defined(__x86_64__)
constexpr int kSavedRegisters = 6;
asm(".text\n"
    ".globl metal_host_switch\n"
    ".hidden metal_host_switch\n"
    ".type metal_host_switch, @function\n"
    "metal_host_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n");
#elif defined(__aarch64__)
asm(".text\n"
    ".globl metal_host_switch\n"
    ".hidden metal_host_switch\n"
    ".type metal_host_switch, @function\n"
    "metal_host_switch:\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n"
    "  mov sp, x1\n"
    "  ldp x19, x20, [sp]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n"
    "  ret\n");
#else
#error "the Metal emulator switches fibers on x86-64 and arm64 only"
#endif

namespace metal_host {

Threadgroup group;
Fiber* running;
char* running_stack;

void (*kernel)(void**, const metal_host_thread*);
void** kernel_buffers;
bool stopped;

namespace {

constexpr uint64_t kCanary = 0x5aa5c33c0ff01234;

char* stacks = nullptr;
size_t stack_count = 0;
bool fresh = true;  // every fiber is at its beginning or end; not so after a launch was stopped
void* launcher = nullptr;  // the stack pointer of run_threadgroup

char* stack(size_t i) { return stacks + i * kStackBytes; }

void switch_to(void** from, int next) {
  group.current = next;
  running = &group.fibers[next];
  running_stack = stack(next);
  refresh_stamps(*running);
  metal_host_switch(from, running->stack_pointer);
}

void fiber_main() {
  for (;;) {
    kernel(kernel_buffers, &fiber().place);
    fiber().state = State::done;
    group.live--;
    lane_done(fiber());
    leave_fiber();
  }
}

void prepare_stack(size_t i) {
  *(uint64_t*)stack(i) = kCanary;
  // Stacks begin at different places of a page, or their tops would share a few cache lines.
  char* top = stack(i) + kStackBytes - 64 - i * 37 % 64 * 64;
#if defined(__x86_64__)
  void** frame = (void**)top;
  *--frame = nullptr;  // where a return from fiber_main would go
  *--frame = (void*)fiber_main;
  for (int k = 0; k < kSavedRegisters; k++) *--frame = nullptr;
#else
  void** frame = (void**)(top - 160);
  frame[11] = (void*)fiber_main;  // x30, the return address
#endif
  group.fibers[i].stack_pointer = frame;
}

void check_canary() {
  if (*(uint64_t*)running_stack == kCanary) return;
  report("stack-overflow", nullptr, "a thread used more than %zu bytes of private memory; the "
      "launch ends here", kStackBytes);
  stop_launch();
}

// The first fiber that is ready, beginning after the current one: its own SIMD-group's first,
// whose stacks are in the cache.
int next_ready() {
  const int after = group.current + 1;
  const int begin = group.current & ~(kLanes - 1);
  const int end = begin + kLanes < group.size ? begin + kLanes : group.size;
  const int ranges[4][2] = {{after, end}, {begin, after}, {end, group.size}, {0, begin}};
  for (auto& range : ranges) {
    for (int i = range[0]; i < range[1]; i++) {
      if (group.fibers[i].state == State::ready) return i;
    }
  }
  return -1;
}

}  // namespace

void make_fibers(int count) {
  if ((size_t)count > stack_count) {
    if (stacks) munmap(stacks - kStackBytes, (stack_count + 1) * kStackBytes);
    void* memory = mmap(nullptr, (count + 1) * kStackBytes, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      perror("metal_host: no memory for the stacks of a threadgroup");
      abort();
    }
    stacks = (char*)memory + kStackBytes;  // what is below is for the first one to run over into
    stack_count = count;
    group.fibers = std::vector<Fiber>(count);
    fresh = false;
  }
  if (fresh) return;
  for (size_t i = 0; i < stack_count; i++) prepare_stack(i);
  fresh = true;
}

void run_threadgroup() {
  switch_to(&launcher, 0);
  group.current = -1;
}

void leave_fiber() {
  Fiber& self = fiber();
  check_canary();
  for (;;) {
    const int next = next_ready();
    if (next == group.current) return;
    if (next >= 0) {
      switch_to(&self.stack_pointer, next);
      return;
    }
    if (group.live == 0) {
      metal_host_switch(&self.stack_pointer, launcher);
      return;
    }
    release_divergent();
  }
}

void stop_launch() {
  stopped = true;
  fresh = false;
  void* abandoned;
  metal_host_switch(&abandoned, launcher);
  __builtin_unreachable();
}

int stack_of(const char* address) {
  const size_t offset = address - stacks;
  return offset < stack_count * kStackBytes ? int(offset / kStackBytes) : -1;
}

}  // namespace metal_host
