// Threadgroup memory: one arena, cut up as the kernel's first thread comes to each variable.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "threadgroup_memory.h"

namespace metal_host {

std::vector<Variable> variables;
size_t variable_count = 0;
alignas(4096) char arena[kArenaBytes];

namespace {
constexpr size_t kGap = 64;  // between variables, so that running over one is seen
size_t used = 0;
size_t total = 0;
}  // namespace

// The shadows stay as they are: the epochs of earlier threadgroups mean nothing to the next one.
void clear_threadgroup_memory() {
  memset(arena, 0xff, used);  // as good as random, and a NaN
  variable_count = used = total = 0;
}

}  // namespace metal_host

extern "C" void* metal_host_threadgroup_variable(
    int id, size_t size, size_t element, const char* name) {
  using namespace metal_host;
  for (size_t i = 0; i < variable_count; i++) {
    if (variables[i].id == id) return arena + variables[i].offset;
  }
  const size_t offset = (used + kGap + 63) & ~(size_t)63;
  if (offset + size + kGap > kArenaBytes) {
    report("threadgroup-memory", nullptr, "'%s' needs %zu bytes of threadgroup memory, the limit "
        "is %zu", name, size, kMemoryLimit);
    stop_launch();
  }
  used = offset + size;
  total += size;
  if (total > kMemoryLimit) {
    report("threadgroup-memory", nullptr, "%zu bytes of threadgroup memory, the limit is %zu",
        total, kMemoryLimit);
  }
  // Every threadgroup of a launch comes to the same variables, nearly always in the same order.
  if (variable_count == variables.size()) variables.emplace_back();
  Variable& variable = variables[variable_count++];
  if (variable.id != id || variable.size != size || variable.offset != offset) {
    variable = {id, offset, size, name, {}};
    variable.shadow.resize(size, element);
  }
  variable.name = name;
  return arena + offset;
}
