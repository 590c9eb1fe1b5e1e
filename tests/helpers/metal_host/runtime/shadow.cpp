#include "shadow.h"

namespace metal_host {

uint32_t epochs[2] = {1, 1};
uint32_t first_epochs[2] = {1, 1};

void Shadow::resize(size_t bytes, size_t element) {
  shift = 0;
  while (shift < 4 && element % (2u << shift) == 0) shift++;
  cells.assign((bytes + ((size_t)1 << shift) - 1) >> shift, Cell());
}

void Shadow::split(unsigned to_shift) {
  const unsigned parts = 1u << (shift - to_shift);
  std::vector<Cell> finer;
  finer.reserve(cells.size() * parts);
  for (const Cell& cell : cells) finer.insert(finer.end(), parts, cell);
  cells.swap(finer);
  shift = to_shift;
}

}  // namespace metal_host
