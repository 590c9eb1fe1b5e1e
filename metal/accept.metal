// The target's choices for a draft, and the walk through it, without a word to the host.
//
// Pass 1, `best_of_piece`: a threadgroup finds the largest logit of one piece of one row's
// vocabulary; neighbouring threads read neighbouring logits. Many pieces, because a row alone
// would keep one core busy and leave the others idle.
// Pass 2, `accept_walk`: a single threadgroup takes the best of every row's pieces, and one thread
// follows them from the root down. What it writes is all that the host has to read of a round.
//
// The largest of numbers does not depend on the order in which they are compared, and of equal
// ones the first in the vocabulary wins, as in mx.argmax.
#include <metal_simdgroup>
#include <metal_stdlib>

namespace dflash {
using namespace metal;

struct Best {
  float logit;
  uint token;
};

constexpr constant uint kNoToken = 0xffffffff;

// Nothing yet: any logit beats it, even one of minus infinity. NaN beats nothing.
inline Best none() {
  return {-INFINITY, kNoToken};
}

inline Best better(Best a, Best b) {
  const bool second = b.logit > a.logit || (b.logit == a.logit && b.token < a.token);
  return second ? b : a;
}

inline Best simd_best(Best best) {
  for (ushort distance = 16; distance > 0; distance /= 2) {
    const float logit = simd_shuffle_xor(best.logit, distance);
    best = better(best, {logit, simd_shuffle_xor(best.token, distance)});
  }
  return best;
}

// Pass 1. logits [N, vocabulary]; piece [N, pieces] of `length` logits each, the last one shorter.
// logit_of, token_of: threadgroup memory for one best a SIMD-group.
template <typename T>
inline void best_of_piece(const device T* logits, int vocabulary, int length, device float* best,
    device uint* token, threadgroup float* logit_of, threadgroup uint* token_of, uint2 group_at,
    uint pieces, uint thread_index, uint threads, uint simdgroup, uint simdgroups, uint lane) {
  const device T* row = logits + size_t(group_at.y) * vocabulary;
  const int begin = group_at.x * length, end = min(begin + length, vocabulary);
  Best mine = none();
  for (int i = begin + int(thread_index); i < end; i += threads) {
    mine = better(mine, {float(row[i]), uint(i)});
  }
  mine = simd_best(mine);
  if (lane == 0) {
    logit_of[simdgroup] = mine.logit;
    token_of[simdgroup] = mine.token;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup > 0) return;
  mine = simd_best(lane < simdgroups ? Best{logit_of[lane], token_of[lane]} : none());
  if (lane == 0) {
    best[group_at.y * pieces + group_at.x] = mine.logit;
    token[group_at.y * pieces + group_at.x] = mine.token;
  }
}

// Pass 2. best, token [N, pieces]; tokens, parents [N]. walk [2 + N]: how many rows are kept, the
// target's token after the last of them, the kept rows, and -1 in the places that are left.
// choices: threadgroup memory for N tokens.
inline void accept_walk(const device float* best, const device uint* token,
    const device int* tokens, const device int* parents, int nodes, int pieces, device int* walk,
    threadgroup int* choices, uint thread_index, uint simdgroup, uint simdgroups, uint lane) {
  for (int row = simdgroup; row < nodes; row += simdgroups) {
    Best mine = none();
    for (int piece = lane; piece < pieces; piece += 32) {
      mine = better(mine, {best[row * pieces + piece], token[row * pieces + piece]});
    }
    mine = simd_best(mine);
    if (lane == 0) choices[row] = mine.token == kNoToken ? 0 : int(mine.token);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index > 0) return;
  // Children come after their parents, so one pass finds the whole path.
  int last = 0, count = 0;
  walk[2 + count++] = 0;
  for (int row = 1; row < nodes; row++) {
    if (parents[row] == last && tokens[row] == choices[last]) {
      walk[2 + count++] = row;
      last = row;
    }
  }
  walk[0] = count;
  walk[1] = choices[last];
  while (count < nodes) walk[2 + count++] = -1;
}

}  // namespace dflash
