// The device memory of a launch: what Python hands over and what it reads back. The structures are
// mirrored in launch.py.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shadow.h"

namespace metal_host {

enum BufferFlag : uint32_t { kWritable = 1, kInitialised = 2 };

struct Buffer {
  const char* name;
  char* data;
  uint64_t size, element;  // bytes
  uint32_t flags;
};

struct Launch {
  void (*kernel)(void** buffers, const metal_host_thread* place);
  const char* image_begin;  // of the kernel's library, which holds its constants
  const char* image_end;
  uint32_t grid[3], threadgroup[3];
  uint32_t first_group, last_group;  // of the threadgroups, counted along x, then y, then z
  uint32_t buffer_count;
  Buffer* buffers;
};

extern Launch* launch;
extern std::vector<Shadow> buffer_shadows;

}  // namespace metal_host
