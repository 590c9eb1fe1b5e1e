// The gated delta rule over the rows of one draft: its output at every row, and the state after a
// chain. The rows that were kept of a draft are a chain.
//
// A state is a matrix [Dv, Dk] per head, and its Dv rows do not depend on each other. A SIMD-group
// takes four of them, eight lanes for each: fewer lanes mean fewer steps to add up over the lanes,
// which take longer than the multiplications. A lane holds every eighth group of four elements of its
// row (neighbouring lanes read neighbouring groups) in registers while the row goes through the
// draft: the state is read once from device memory, and written at most once. Every state row of a
// head reads the same keys and queries, a few kilobytes that stay in the cache.
//
// Why a row's bits depend on its own path alone: a step is a function of the state before it and
// of its own row; sums over Dk are taken lane by lane in ascending order and then over the lanes
// by the butterfly written out below, whatever else the draft holds. `fma` is written out, so that
// every instance of a function rounds alike.
//
// In a tree a node steps from its parent's state. The nodes are visited from the root down, each
// subtree at once, so most nodes follow their parent directly. Where a node has several children,
// its state waits in a slot of threadgroup memory for the later ones. Lanes use only their
// own elements there, so no barrier is needed.
#include <metal_simdgroup>
#include <metal_stdlib>

#include "language.h"

namespace dflash {
using namespace metal;

enum : int { kRowLanes = 8, kRowsOfSimdgroup = 32 / kRowLanes };

// One row [DK] of a state, or a key or query, spread over eight lanes; `part` is the lane's number
// among them. What lies past the end of the row is zero.
template <int DK>
struct SpreadRow {
  enum : int { per_lane = (DK + 4 * kRowLanes - 1) / (4 * kRowLanes) * 4 };
  float values[per_lane];

  // Where in the row a lane's value `i` lies.
  static int place(int i, int part) { return (i / 4 * kRowLanes + part) * 4 + i % 4; }

  template <typename Pointer>
  void load(Pointer row, int part) thread {
    DFLASH_UNROLL
    for (int i = 0; i < per_lane; i++) {
      values[i] = place(i, part) < DK ? float(row[place(i, part)]) : 0.0f;
    }
  }

  template <typename Pointer>
  void store(Pointer row, int part) const thread {
    DFLASH_UNROLL
    for (int i = 0; i < per_lane; i++) {
      if (place(i, part) < DK) row[place(i, part)] = values[i];
    }
  }

  // The product with another row, the same on all eight lanes.
  float dot(const thread SpreadRow& other) const thread {
    float sum = 0;
    DFLASH_UNROLL
    for (int i = 0; i < per_lane; i++) sum = fma(values[i], other.values[i], sum);
    DFLASH_UNROLL
    for (ushort distance = 1; distance < kRowLanes; distance *= 2) {
      sum += simd_shuffle_xor(sum, distance);
    }
    return sum;
  }

  // The state decays. Then it learns the difference between the value and what it has for this key.
  void step(const thread SpreadRow& key, float value, float decay, float beta) thread {
    DFLASH_UNROLL
    for (int i = 0; i < per_lane; i++) values[i] *= decay;
    const float missing = (value - dot(key)) * beta;
    DFLASH_UNROLL
    for (int i = 0; i < per_lane; i++) values[i] = fma(key.values[i], missing, values[i]);
  }
};

// The recurrence's inputs: keys [N, Hk, DK], values [N, Hv, DV], decay and beta [N, Hv].
template <typename T, typename Beta, int DK>
struct DeltaInputs {
  const device T* keys;
  const device T* values;
  const device float* decay;
  const device Beta* beta;
  int key_heads, heads, value_dim;

  // Element of [N, Hk, DK] where the row's key, or query, for a value head begins.
  int key_at(int row, int head) const thread {
    return (row * key_heads + head / (heads / key_heads)) * DK;
  }

  void step(thread SpreadRow<DK>& state, int row, int head, int d, int part) const thread {
    const int gate = row * heads + head;
    const float value = float(values[gate * value_dim + d]);
    SpreadRow<DK> key;
    key.load(keys + key_at(row, head), part);
    state.step(key, value, decay[gate], float(beta[gate]));
  }
};

// The verify of a chain. queries as keys; state and next [Hv, DV, DK]; out [N, Hv, DV].
template <typename T, typename Beta, int DK>
inline void verify_chain(DeltaInputs<T, Beta, DK> in, const device T* queries,
    const device float* state, int rows, device T* out, device float* next, int head, int d,
    int part) {
  SpreadRow<DK> current, query;
  const int at = (head * in.value_dim + d) * DK;
  current.load(state + at, part);
  for (int row = 0; row < rows; row++) {
    in.step(current, row, head, d, part);
    query.load(queries + in.key_at(row, head), part);
    const float read = current.dot(query);
    if (part == 0) out[(row * in.heads + head) * in.value_dim + d] = T(read);
  }
  current.store(next + at, part);
}

// The verify of a tree, in the order of `visits` [N, 3]: a node, the slot its parent's state waits
// in (-1: the node before it in this order is its parent), the slot to leave its own in (-1: none).
// slots: this state row's, [slots, DK].
template <typename T, typename Beta, int DK>
inline void verify_tree(DeltaInputs<T, Beta, DK> in, const device T* queries,
    const device float* state, const device int* visits, int nodes, device T* out,
    threadgroup float* slots, int head, int d, int part) {
  SpreadRow<DK> current, query;
  current.load(state + (head * in.value_dim + d) * DK, part);
  for (int visit = 0; visit < nodes; visit++) {
    const int node = visits[visit * 3], from = visits[visit * 3 + 1], to = visits[visit * 3 + 2];
    if (from >= 0) current.load(slots + from * DK, part);
    in.step(current, node, head, d, part);
    if (to >= 0) current.store(slots + to * DK, part);
    query.load(queries + in.key_at(node, head), part);
    const float read = current.dot(query);
    if (part == 0) out[(node * in.heads + head) * in.value_dim + d] = T(read);
  }
}

}  // namespace dflash
