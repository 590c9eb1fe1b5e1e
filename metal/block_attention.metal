// Attention of the rows of one draft over a long context, split over the keys.
//
// Pass 1, `attend_chunk`: a threadgroup takes one head of keys and values, one chunk of CHUNK
// keys and as many query rows as it has SIMD-groups for, eight each. The rows are every query head
// that shares these keys (GQA) times every node of the draft, so keys and values are read once for
// all of them. All threads together bring KEYS keys and values at a time into threadgroup memory;
// then each SIMD-group on its own multiplies, keeps the running softmax of its rows and adds up
// their outputs in registers. A chunk leaves, for every row, the sum of its weighted values, the
// sum of its weights and the largest score, unnormalised.
// Pass 2, `merge_chunks`: one thread for each output adds the chunks in their order.
//
// Why a row's bits depend on that row alone. Chunks and the tiles within them begin at multiples
// of CHUNK and KEYS of the absolute position, so every key has one slot, wherever the cache
// begins and whoever asks. A score is a sum over D in the order of D. A row's weights are summed
// tile after tile, chunk after chunk, and a slot that a row must not see adds an exact zero.
// No row ever meets another: they are rows of one matrix product, and nothing else.
//
// Trees keep this. The nodes of a tree lie in the cache in the order of the draft, siblings at the
// same position, so from the chunk on where the draft begins a threadgroup takes a single node
// and puts its ancestors in the slots of their positions. The bits are those of the path alone.
//
// Where a product is added to something, `fma` says so: left to the compiler, one instance of a
// function might round the product and another not.
#include "fragment.h"

namespace dflash {
using namespace metal;

constexpr constant float kHidden = -1e30f;  // below any score
constexpr constant float kLog2E = 1.44269504f;

// Rows of a tile are a little longer than D, so that the lanes of a column hit different banks.
constexpr constant int kPad = 8;

// Keys in one tile: a tile of keys and one of values fill half of the threadgroup memory.
constexpr int keys_per_tile(int row_bytes) {
  return row_bytes <= 256 ? 32 : row_bytes <= 512 ? 16 : 8;
}

// The keys or values of one head, [L, D] with any strides.
template <typename T>
struct PlainRows {
  const device T* data;
  long row_stride, stride;

  vec<T, 4> load(int row, int d) const thread {
    const device T* from = data + row * row_stride + d * stride;
    if (stride == 1) return *reinterpret_cast<const device vec<T, 4>*>(from);
    vec<T, 4> values;
    DFLASH_UNROLL
    for (int i = 0; i < 4; i++) values[i] = from[i * stride];
    return values;
  }
};

// The same, affine-quantized as mx.quantize does it: value = scale * code + bias for each GROUP.
// `Scales` is a pointer; MLX gives very few elements in constant memory instead of device memory.
template <typename T, int BITS, int GROUP, typename Scales>
struct QuantizedRows {
  const device uint* codes;
  Scales scales, biases;
  long code_stride, scale_stride;

  vec<T, 4> load(int row, int d) const thread {
    constexpr int PER_WORD = 32 / BITS;
    const uint word = codes[row * code_stride + d / PER_WORD] >> (d % PER_WORD * BITS);
    const float scale = float(scales[row * scale_stride + d / GROUP]);
    const float bias = float(biases[row * scale_stride + d / GROUP]);
    vec<T, 4> values;
    DFLASH_UNROLL
    for (int i = 0; i < 4; i++) {
      values[i] = T(fma(scale, float(word >> (i * BITS) & ((1u << BITS) - 1)), bias));
    }
    return values;
  }
};

template <typename T, int BITS, int GROUP, typename Scales>
inline QuantizedRows<T, BITS, GROUP, Scales> quantized_rows(
    const device uint* codes, Scales scales, Scales biases, long code_stride, long scale_stride) {
  return {codes, scales, biases, code_stride, scale_stride};
}

struct Problem {
  int nodes;   // rows of the draft, the last rows of keys and values
  int group;   // query heads for each head of keys and values
  int length;  // rows of keys and values
  int first;   // absolute position of row 0
  int window;  // a query sees keys less than this many positions back
  float scale;
};

// Which key row lies in each slot of the chunk that begins at position `start`; -1 for none.
// Where the chunk belongs to one node of a tree, its ancestors (and itself) come after the past.
template <int CHUNK>
inline void find_rows(threadgroup int* rows, const device int* positions,
    const device bool* ancestors, Problem of, int start, int node, bool single, uint thread_index,
    uint threads) {
  const int past = of.length - of.nodes;
  for (int slot = thread_index; slot < CHUNK; slot += threads) {
    const int row = start + slot - of.first;
    rows[slot] = row >= 0 && row < (single ? past : of.length) ? row : -1;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (!single) return;
  for (int other = thread_index; other < of.nodes; other += threads) {
    const int slot = positions[other] - start;
    if (ancestors[node * of.nodes + other] && slot >= 0 && slot < CHUNK) rows[slot] = past + other;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// KEYS rows into a tile, four elements a thread; neighbouring threads read neighbouring addresses.
template <typename T, int D, int KEYS, typename Rows>
inline void load_tile(
    threadgroup T* tile, Rows from, const threadgroup int* rows, uint thread_index, uint threads) {
  for (int i = thread_index; i < KEYS * D / 4; i += threads) {
    const int key = i / (D / 4), d = i % (D / 4) * 4;
    const vec<T, 4> four = rows[key] < 0 ? vec<T, 4>(T(0)) : from.load(rows[key], d);
    DFLASH_UNROLL
    for (int j = 0; j < 4; j++) tile[key * (D + kPad) + d + j] = four[j];
  }
}

// One SIMD-group's eight query rows, and what it has gathered for them so far.
template <typename T, int D, int KEYS>
struct QueryRows {
  vec<T, 2> query[D / 8];  // this lane's elements of the eight rows
  Fragment output[D / 8];
  float top, total;  // of this lane's row: the largest score, the sum of the weights

  void begin(const device T* row, bool mine, Place place) thread {
    DFLASH_UNROLL
    for (int i = 0; i < D / 8; i++) {
      const device T* from = row + i * 8 + place.column;
      DFLASH_UNROLL
      for (int e = 0; e < 2; e++) query[i][e] = mine ? from[e] : T(0);
      output[i] = Fragment(0);
    }
    top = kHidden;
    total = 0;
  }

  // Scores against a tile of keys: a sum over D, eight at a time in the order of D.
  void score(thread Fragment* scores, const threadgroup T* keys, Place place) thread {
    DFLASH_UNROLL
    for (int j = 0; j < KEYS / 8; j++) scores[j] = Fragment(0);
    DFLASH_UNROLL
    for (int i = 0; i < D / 8; i++) {
      const Fragment rows = filled_with(float(query[i][0]), float(query[i][1]));
      DFLASH_UNROLL
      for (int j = 0; j < KEYS / 8; j++) {
        const threadgroup T* key = keys + (j * 8 + place.column) * (D + kPad) + i * 8 + place.row;
        const Fragment column = filled_with(float(key[0]), float(key[D + kPad]));
        simdgroup_multiply_accumulate(scores[j], rows, column, scores[j]);
      }
    }
  }

  // Scores become weights, 2 to the power of what they are below the largest score so far; what
  // was there is scaled to that. `scale` brings scores to units of log 2.
  // This lane's row sees the slots of the tile from `oldest` to `newest` that hold a row.
  void weigh(thread Fragment* scores, const threadgroup int* rows, int oldest, int newest,
      float scale, Place place) thread {
    float highest = top, weights = 0;
    DFLASH_UNROLL
    for (int j = 0; j < KEYS / 8; j++) {
      thread auto& pair = scores[j].thread_elements();
      DFLASH_UNROLL
      for (int e = 0; e < 2; e++) {
        const int slot = j * 8 + place.column + e;
        const bool seen = rows[slot] >= 0 && oldest <= slot && slot <= newest;
        if (seen) {
          highest = max(highest, pair[e] * scale);
        } else {
          pair[e] = kHidden;
        }
      }
    }
    highest = row_max(highest);
    DFLASH_UNROLL
    for (int j = 0; j < KEYS / 8; j++) {
      thread auto& pair = scores[j].thread_elements();
      DFLASH_UNROLL
      for (int e = 0; e < 2; e++) {
        pair[e] = pair[e] > kHidden ? exp2(fma(pair[e], scale, -highest)) : 0.0f;
        weights += pair[e];
      }
    }
    const float faded = exp2(top - highest);
    total = fma(total, faded, row_sum(weights));
    top = highest;
    DFLASH_UNROLL
    for (int i = 0; i < D / 8; i++) {
      output[i].thread_elements()[0] *= faded;
      output[i].thread_elements()[1] *= faded;
    }
  }

  // Adds the weighted values, eight keys at a time in the order of their positions.
  void gather(thread Fragment* weights, const threadgroup T* values, Place place) thread {
    DFLASH_UNROLL
    for (int j = 0; j < KEYS / 8; j++) {
      const threadgroup T* row = values + (j * 8 + place.row) * (D + kPad) + place.column;
      DFLASH_UNROLL
      for (int i = 0; i < D / 8; i++) {
        const Fragment value = filled_with(float(row[i * 8]), float(row[i * 8 + 1]));
        simdgroup_multiply_accumulate(output[i], weights[j], value, output[i]);
      }
    }
  }
};

// Pass 1. queries [H, N, D] contiguous; positions [N], the root's first and smallest; ancestors
// [N, N], read where TREE. partial [chunks, H * N, D] and stats [chunks, H * N, 2] (largest score,
// sum of weights). A chunk in which a row sees nothing leaves it zeros of no weight.
// group_at: head of the keys, chunk, tile of query rows (a node, where the tree has begun).
template <typename T, int D, int CHUNK, bool TREE, typename Rows>
inline void attend_chunk(const device T* queries, Rows keys, Rows values,
    const device int* positions, const device bool* ancestors, Problem of, device float* partial,
    device float* stats, threadgroup T* key_tile, threadgroup T* value_tile, threadgroup int* rows,
    uint3 group_at, uint key_heads, uint thread_index, uint simdgroup, uint simdgroups,
    uint lane) {
  constexpr int KEYS = keys_per_tile(D * sizeof(T));
  const int tile_index = group_at.z, threads = simdgroups * 32;
  const int start = (of.first / CHUNK + int(group_at.y)) * CHUNK;
  const bool single = TREE && start + CHUNK > of.first + of.length - of.nodes;
  const int count = single ? of.group : of.group * of.nodes;  // query rows that share this chunk
  const int begin = single ? 0 : tile_index * int(simdgroups) * 8;
  if (single ? tile_index >= of.nodes : begin >= count) return;

  const Place place = place_of(lane);
  const int row = begin + int(simdgroup) * 8 + place.row;
  const bool busy = begin + int(simdgroup) * 8 < count, mine = row < count;
  const int node = single ? tile_index : row % of.nodes;
  const int head = int(group_at.x) * of.group + (single ? row : row / of.nodes);
  const int position = mine ? positions[node] : 0;
  const int nearest = positions[single ? node : of.nodes - 1];
  const int farthest = positions[single ? node : 0];
  find_rows<CHUNK>(rows, positions, ancestors, of, start, node, single, thread_index, threads);

  QueryRows<T, D, KEYS> block;
  Fragment scores[KEYS / 8];
  block.begin(queries + (head * of.nodes + node) * D, mine, place);
  for (int tile = 0; tile < CHUNK; tile += KEYS) {
    const int at = start + tile;  // a tile that no row of the threadgroup sees is not loaded
    if (at > nearest || at + KEYS <= of.first || at + KEYS <= farthest - of.window + 1) continue;
    load_tile<T, D, KEYS>(key_tile, keys, rows + tile, thread_index, threads);
    load_tile<T, D, KEYS>(value_tile, values, rows + tile, thread_index, threads);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (busy) {
      block.score(scores, key_tile, place);
      block.weigh(scores, rows + tile, position - of.window + 1 - at, position - at,
          of.scale * kLog2E, place);
      block.gather(scores, value_tile, place);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  if (!mine) return;
  const int out = (int(group_at.y * key_heads) * of.group + head) * of.nodes + node;
  DFLASH_UNROLL
  for (int i = 0; i < D / 8; i++) {
    partial[out * D + i * 8 + place.column] = block.output[i].thread_elements()[0];
    partial[out * D + i * 8 + place.column + 1] = block.output[i].thread_elements()[1];
  }
  if (place.column == 0) {
    stats[out * 2] = block.top;
    stats[out * 2 + 1] = block.total;
  }
}

// Pass 2: element d of row `row` of out [H * N, D]. A sink is one more score of every row of its
// head that weighs no value; it comes before the chunks.
template <typename T, bool SINKS>
inline void merge_chunks(const device float* partial, const device float* stats,
    const device float* sinks, int chunks, int rows, int nodes, device T* out, uint row, uint d,
    uint head_dim) {
  const float sink = SINKS ? sinks[row / nodes] * kLog2E : kHidden;
  float top = sink;
  for (int chunk = 0; chunk < chunks; chunk++) {
    top = max(top, stats[(chunk * rows + row) * 2]);
  }
  float total = SINKS ? exp2(sink - top) : 0.0f, sum = 0;
  for (int chunk = 0; chunk < chunks; chunk++) {
    const int at = chunk * rows + row;
    const float weight = exp2(stats[at * 2] - top);
    total = fma(stats[at * 2 + 1], weight, total);
    sum = fma(partial[at * head_dim + d], weight, sum);
  }
  out[row * head_dim + d] = T(sum / total);
}

}  // namespace dflash
