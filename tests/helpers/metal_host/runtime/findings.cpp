// What a launch has found: one entry for each kind and place in the code, and how often.
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>

#include "buffers.h"
#include "state.h"

namespace metal_host {
namespace {

struct Finding {
  const char* kind;
  size_t offset;  // of the code in the kernel's library; 0: unknown
  std::string message;
  unsigned count;
};
constexpr size_t kMostFindings = 32;
std::vector<Finding> findings;
std::string text;

}  // namespace

void clear_findings() { findings.clear(); }

void report(const char* kind, const void* where, const char* format, ...) {
  const char* address = (const char*)where;
  const bool known = address >= launch->image_begin && address < launch->image_end;
  const size_t offset = known ? address - launch->image_begin : 0;
  for (Finding& finding : findings) {
    if (finding.offset == offset && !strcmp(finding.kind, kind)) {
      finding.count++;
      return;
    }
  }
  if (findings.size() == kMostFindings) return;
  char message[400];
  va_list values;
  va_start(values, format);
  vsnprintf(message, sizeof message, format, values);
  va_end(values);
  findings.push_back({kind, offset, message, 1});
}

}  // namespace metal_host

// One line each: kind, offset, count and message, with tabs between.
extern "C" METAL_HOST_EXPORT const char* metal_host_findings() {
  using namespace metal_host;
  text.clear();
  for (const Finding& finding : findings) {
    text += std::string(finding.kind) + "\t" + std::to_string(finding.offset) + "\t" +
            std::to_string(finding.count) + "\t" + finding.message + "\n";
  }
  return text.c_str();
}
