// Every access to memory of a checked kernel comes through here: the compiler, asked for
// -fsanitize=thread, calls a function before each of them, and this file defines those functions.
// (No part of the thread sanitizer itself is linked.)
#include <cstring>

#include "buffers.h"
#include "threadgroup_memory.h"

namespace metal_host {
namespace {

enum Access { kRead, kWrite };
const char* const kAccess[] = {"read", "write"};
constexpr ptrdiff_t kRedZone = 4096;  // around every buffer: launch.py

struct Place {
  const char* name;
  size_t offset;
  const void* code;
};

template <Space space>
void report_race(Access access, const Place& place, Stamp earlier, bool written) {
  const bool same_group = epoch_of(earlier) >= first_epochs[space];
  report("race", place.code, "%s of '%s' at byte %zu by thread %u of threadgroup %u, after a %s by "
      "%s%u of %s with nothing in between that orders them", kAccess[access], place.name,
      place.offset, fiber().place.index, group.number, written ? "write" : "read",
      who(earlier) >= kSeveralLanes ? "several threads, " : "thread ", who(earlier),
      same_group ? "the same threadgroup" : "another threadgroup");
}

template <Space space, Access access>
inline void check_cell(Cell& cell, Stamp mine, bool initialised, const Place& place) {
  if (access == kRead) {
    if (cell.read == mine) return;
    const bool seen = space == kDeviceSpace ? initialised || cell.written
                                            : epoch_of(cell.written) >= first_epochs[space];
    if (!seen) {
      report("uninitialised", place.code, "thread %u of threadgroup %u reads '%s' at byte %zu, "
          "which nobody has written", fiber().place.index, group.number, place.name,
          place.offset);
      return;
    }
  }
  if (unordered<space>(cell.written, mine)) {
    report_race<space>(access, place, cell.written, true);
  } else if (access == kWrite && unordered<space>(cell.read, mine)) {
    report_race<space>(access, place, cell.read, false);
  }
  if (access == kRead) {
    cell.read = joined(cell.read, mine);
  } else {
    cell.written = mine;
  }
}

template <Space space, Access access>
inline void check_cells(Shadow& shadow, unsigned size, bool initialised, const Place& place) {
  if (__builtin_expect(size < 1u << shadow.shift, 0)) shadow.split(__builtin_ctz(size));
  const Stamp mine = fiber().stamps[space];
  Cell* cell = &shadow.cells[place.offset >> shadow.shift];
  Cell* const end = cell + (size >> shadow.shift);
  do {
    check_cell<space, access>(*cell, mine, initialised, place);
  } while (++cell < end);
}

bool is_ours(const char* address) {  // the runtime's own, or a constant of the kernel
  const auto inside = [address](const void* begin, size_t size) {
    return (size_t)(address - (const char*)begin) < size;
  };
  return inside(launch->image_begin, launch->image_end - launch->image_begin) ||
         inside(group.simdgroups.data(), group.simdgroups.size() * sizeof(Simdgroup)) ||
         inside(group.fibers.data(), group.fibers.size() * sizeof(Fiber));
}

void check_elsewhere(const char* address, unsigned size, Access access, const void* code) {
  const unsigned thread = fiber().place.index;
  const int owner = stack_of(address);
  if (owner >= 0) {
    report("thread-memory", code, "thread %u touches the private memory of thread %d: it has run "
        "out of its own, or has a pointer of the other's; the launch ends here", thread, owner);
    stop_launch();
  }
  if (is_ours(address)) return;
  for (uint32_t i = 0; i < launch->buffer_count; i++) {
    const Buffer& buffer = launch->buffers[i];
    const ptrdiff_t offset = address - buffer.data;
    if (offset < -kRedZone || offset >= (ptrdiff_t)buffer.size + kRedZone) continue;
    report("out-of-bounds", code, "%s of %u bytes at byte %td of buffer '%s', which has %llu "
        "(thread %u of threadgroup %u)", kAccess[access], size, offset, buffer.name,
        (unsigned long long)buffer.size, thread, group.number);
    return;
  }
  report("out-of-bounds", code, "%s of %u bytes far from every buffer (thread %u of threadgroup "
      "%u); the launch ends here", kAccess[access], size, thread, group.number);
  stop_launch();
}

template <Access access>
void check_threadgroup(size_t at, unsigned size, const void* code) {
  for (size_t i = 0; i < variable_count; i++) {
    Variable& variable = variables[i];
    const size_t offset = at - variable.offset;
    if (offset >= variable.size || offset + size > variable.size) continue;
    const Place place = {variable.name, offset, code};
    check_cells<kThreadgroupSpace, access>(variable.shadow, size, false, place);
    return;
  }
  report("out-of-bounds", code, "%s of %u bytes outside every threadgroup variable (thread %u of "
      "threadgroup %u)", kAccess[access], size, fiber().place.index, group.number);
}

Buffer* last_buffer = nullptr;

inline Buffer* find_buffer(const char* address, unsigned size) {
  const auto holds = [=](const Buffer& buffer) {
    return address >= buffer.data && address + size <= buffer.data + buffer.size;
  };
  Buffer* const begin = launch->buffers;
  Buffer* const end = begin + launch->buffer_count;
  if (last_buffer >= begin && last_buffer < end && holds(*last_buffer)) return last_buffer;
  for (Buffer* buffer = begin; buffer < end; buffer++) {
    if (holds(*buffer)) return last_buffer = buffer;
  }
  return nullptr;
}

template <Access access>
void check_buffer(Buffer& buffer, const char* address, unsigned size, const void* code) {
  const size_t offset = address - buffer.data;
  const Place place = {buffer.name, offset, code};
  Shadow& shadow = buffer_shadows[&buffer - launch->buffers];
  if (buffer.flags & kWritable) {
    check_cells<kDeviceSpace, access>(shadow, size, buffer.flags & kInitialised, place);
  } else if (access == kWrite) {
    report("write-to-input", code, "write to input '%s' at byte %zu", buffer.name, offset);
  }
}

template <Access access>
inline void check(const char* address, unsigned size, bool aligned, const void* code) {
  if ((size_t)(address - running_stack) < kStackBytes) return;
  const size_t at = address - arena;
  if (at < kArenaBytes) {
    check_threadgroup<access>(at, size, code);
  } else if (Buffer* buffer = find_buffer(address, size)) {
    check_buffer<access>(*buffer, address, size, code);
  } else {
    check_elsewhere(address, size, access, code);
    return;
  }
  if (aligned && (uintptr_t)address & (size - 1)) {
    report("misaligned", code, "%s of %u bytes at an address that is no multiple of it",
        kAccess[access], size);
  }
}

// A copy of any size: piece by piece, each a power of two.
template <Access access>
void check_range(const char* address, size_t size, const void* code) {
  while (size) {
    unsigned piece = 16;
    while (piece > size || (uintptr_t)address & (piece - 1)) piece /= 2;
    check<access>(address, piece, false, code);
    address += piece;
    size -= piece;
  }
}

}  // namespace
}  // namespace metal_host

using namespace metal_host;
#define CODE __builtin_return_address(0)

#pragma GCC visibility push(default)
extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define METAL_HOST_ACCESSES(size)                                                            \
  void __tsan_read##size(char* a) { check<kRead>(a, size, true, CODE); }                     \
  void __tsan_write##size(char* a) { check<kWrite>(a, size, true, CODE); }                   \
  void __tsan_unaligned_read##size(char* a) { check_range<kRead>(a, size, CODE); }           \
  void __tsan_unaligned_write##size(char* a) { check_range<kWrite>(a, size, CODE); }
METAL_HOST_ACCESSES(1)
METAL_HOST_ACCESSES(2)
METAL_HOST_ACCESSES(4)
METAL_HOST_ACCESSES(8)
METAL_HOST_ACCESSES(16)

void __tsan_read_range(char* a, size_t size) { check_range<kRead>(a, size, CODE); }
void __tsan_write_range(char* a, size_t size) { check_range<kWrite>(a, size, CODE); }
void* __tsan_memcpy(void* to, const void* from, size_t size) {
  check_range<kRead>((const char*)from, size, CODE);
  check_range<kWrite>((char*)to, size, CODE);
  return memcpy(to, from, size);
}
void* __tsan_memset(void* to, int value, size_t size) {
  check_range<kWrite>((char*)to, size, CODE);
  return memset(to, value, size);
}

// The same for what the language leaves undefined: -fsanitize=shift,bounds,integer-divide-by-zero.
// After an index or a division the host has no way to go on.
void __ubsan_handle_shift_out_of_bounds(void*, size_t, size_t by) {
  report("shift", CODE, "shift by %td, or of a negative number", (ptrdiff_t)by);
}
void __ubsan_handle_out_of_bounds(void*, size_t index) {
  report("array-index", CODE, "index %td of an array of fixed size; the launch ends here",
      (ptrdiff_t)index);
  stop_launch();
}
void __ubsan_handle_divrem_overflow(void*, size_t, size_t) {
  report("division", CODE, "division of an integer by zero; the launch ends here");
  stop_launch();
}
}
#pragma GCC visibility pop
