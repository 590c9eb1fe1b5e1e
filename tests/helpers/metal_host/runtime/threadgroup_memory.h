#pragma once

#include "shadow.h"

namespace metal_host {

constexpr size_t kMemoryLimit = 32 << 10;  // Metal's, for all variables of a kernel together
constexpr size_t kArenaBytes = 128 << 10;  // more, so that a kernel that is over it still runs

struct Variable {
  int id = -1;
  size_t offset, size;
  const char* name;
  Shadow shadow;
};
extern std::vector<Variable> variables;  // the first `variable_count` belong to this threadgroup
extern size_t variable_count;
extern char arena[kArenaBytes];

void clear_threadgroup_memory();

}  // namespace metal_host
