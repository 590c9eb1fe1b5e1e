// Attention of the rows of one draft over a long context, split over the keys.
//
// Pass 1, `attend_chunk`: a threadgroup takes one head of keys and values, one chunk of CHUNK
// keys and as many query rows as it has SIMD-groups for, eight or sixteen each. The rows are every
// query head that shares these keys (GQA) times every node of the draft, so keys and values are read
// once for all of them. All threads together bring KEYS keys and values at a time into threadgroup
// memory; then each SIMD-group on its own multiplies, keeps the running softmax of its rows and adds
// up their outputs in registers. Queries, keys and values are matrices of T; sums are float.
// A chunk leaves, for every row, the sum of its weighted values, the sum of its weights and the
// largest score, unnormalised.
// Pass 2, `merge_chunks`: one thread for each output adds the chunks in their order.
//
// Why a row's bits depend on that row alone. Chunks and the tiles within them begin at multiples
// of CHUNK and KEYS of the absolute position, so every key has one slot, wherever the cache
// begins. A score is a sum over D in the order of D. A row's weights are summed
// tile after tile, chunk after chunk, and a slot that a row must not see adds an exact zero.
// Rows do not interact: they are rows of one matrix product.
//
// Trees keep this. The nodes of a tree lie in the cache in the order of the draft, siblings at the
// same position, so from the chunk on where the draft begins a threadgroup takes a single node
// and puts its ancestors in the slots of their positions. The bits are those of the path alone.
// Only these few chunks have a threadgroup for each node: the chunks before them, thousands of keys,
// have as many threadgroups as with a chain.
//
// Where a product is added to something, `fma` says so: left to the compiler, one instance of a
// function might round the product and another not.
#include "fragment.h"

namespace dflash {
using namespace metal;

constexpr constant float kHidden = -1e30f;  // marks the scores of hidden keys; below any score
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

// Loads KEYS keys and values into their tiles, four elements of each per thread. Neighbouring
// threads read neighbouring addresses.
//
// In a product of matrices a weight of zero does not hide a value that is not finite: 0 * NaN would
// also spoil the rows that do not see it. So the value is replaced by zero and its key by NaN
// instead: `weigh` applies that score only to the rows that see the key.
template <typename T, int D, int KEYS, typename Rows>
inline void load_tiles(threadgroup T* key_tile, threadgroup T* value_tile, Rows keys, Rows values,
    const threadgroup int* rows, uint thread_index, uint threads) {
  for (int i = thread_index; i < KEYS * D / 4; i += threads) {
    const int slot = i / (D / 4), d = i % (D / 4) * 4, row = rows[slot];
    const vec<T, 4> key = row < 0 ? vec<T, 4>(T(0)) : keys.load(row, d);
    const vec<T, 4> value = row < 0 ? vec<T, 4>(T(0)) : values.load(row, d);
    DFLASH_UNROLL
    for (int j = 0; j < 4; j++) {
      const bool finite = isfinite(float(value[j]));
      key_tile[slot * (D + kPad) + d + j] = finite ? key[j] : T(NAN);
      value_tile[slot * (D + kPad) + d + j] = finite ? value[j] : T(0);
    }
  }
}

// One SIMD-group's query rows, eight in each of BLOCKS, and their running softmax and outputs.
template <typename T, int D, int KEYS, int BLOCKS>
struct QueryRows {
  typedef simdgroup_matrix<T, 8, 8> Operand;
  Operand query[BLOCKS][D / 8];
  Fragment output[BLOCKS][D / 8];
  float top[BLOCKS], total[BLOCKS];  // of this lane's rows: largest score, sum of the weights

  QueryRows() thread {}  // see TileSums

  void begin(int block, const device T* row, long stride, bool mine, Place place) thread {
    DFLASH_UNROLL
    for (int i = 0; i < D / 8; i++) {
      DFLASH_UNROLL
      for (int e = 0; e < 2; e++) {
        const int d = i * 8 + place.column + e;
        query[block][i].thread_elements()[e] = mine ? row[d * stride] : T(0);
      }
      output[block][i] = Fragment(0);
    }
    top[block] = kHidden;
    total[block] = 0;
  }

  // Scores against a tile of keys: a sum over D, eight at a time in the order of D.
  void score(thread Fragment (&scores)[BLOCKS][KEYS / 8], const threadgroup T* keys) thread {
    DFLASH_UNROLL
    for (int j = 0; j < KEYS / 8; j++) {
      DFLASH_UNROLL
      for (int b = 0; b < BLOCKS; b++) scores[b][j] = Fragment(0);
    }
    DFLASH_UNROLL
    for (int i = 0; i < D / 8; i++) {
      DFLASH_UNROLL
      for (int j = 0; j < KEYS / 8; j++) {
        Operand columns;  // keys, as the columns of a matrix
        simdgroup_load(columns, keys + j * 8 * (D + kPad) + i * 8, D + kPad, ulong2(0), true);
        DFLASH_UNROLL
        for (int b = 0; b < BLOCKS; b++) {
          simdgroup_multiply_accumulate(scores[b][j], query[b][i], columns, scores[b][j]);
        }
      }
    }
  }

  // Turns the scores of a block into weights: exp2(score - largest score so far). If the largest
  // score grows, the sums so far are scaled to it. `scale` brings scores to units of log 2.
  // This lane's row sees the slots of the tile from `oldest` to `newest` that hold a row.
  void weigh(int block, thread Fragment (&scores)[KEYS / 8], const threadgroup int* rows,
      int oldest, int newest, float scale, Place place) thread {
    float highest = top[block], weights = 0;
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
        pair[e] = pair[e] == kHidden ? 0.0f : exp2(fma(pair[e], scale, -highest));
        weights += pair[e];
      }
    }
    const float faded = exp2(top[block] - highest);
    total[block] = fma(total[block], faded, row_sum(weights));
    top[block] = highest;
    DFLASH_UNROLL
    for (int i = 0; i < D / 8; i++) {
      output[block][i].thread_elements()[0] *= faded;
      output[block][i].thread_elements()[1] *= faded;
    }
  }

  // Adds the weighted values, eight keys at a time in the order of their positions.
  void gather(thread Fragment (&weights)[BLOCKS][KEYS / 8], const threadgroup T* values) thread {
    DFLASH_UNROLL
    for (int j = 0; j < KEYS / 8; j++) {
      DFLASH_UNROLL
      for (int i = 0; i < D / 8; i++) {
        Operand rows;
        simdgroup_load(rows, values + j * 8 * (D + kPad) + i * 8, D + kPad);
        DFLASH_UNROLL
        for (int b = 0; b < BLOCKS; b++) {
          simdgroup_multiply_accumulate(output[b][i], weights[b][j], rows, output[b][i]);
        }
      }
    }
  }

  // partial and stats: where this lane's row of the block belongs.
  void store(int block, device float* partial, device float* stats, Place place) thread {
    DFLASH_UNROLL
    for (int i = 0; i < D / 8; i++) {
      partial[i * 8 + place.column] = output[block][i].thread_elements()[0];
      partial[i * 8 + place.column + 1] = output[block][i].thread_elements()[1];
    }
    if (place.column == 0) {
      stats[0] = top[block];
      stats[1] = total[block];
    }
  }
};

// A threadgroup's work: a chunk, and query rows from `begin` to `count` of those that share it.
struct Share {
  int chunk;
  bool single;  // whether the rows are those of one node of a tree
  int node, begin, count;
};

// The chunks before a tree come first, with a threadgroup for every `rows` query rows; then those
// with nodes of the tree, with one for each node (and `rows` of the heads that share keys).
template <int CHUNK, bool TREE>
inline Share share_of(Problem of, int index, int rows) {
  const int tiles = (of.group * of.nodes + rows - 1) / rows;
  const int whole = (of.first + of.length - of.nodes) / CHUNK - of.first / CHUNK;
  if (TREE && index >= whole * tiles) {
    const int parts = (of.group + rows - 1) / rows;
    const int rest = index - whole * tiles;
    const int chunk = rest / (of.nodes * parts);
    const int part = rest % (of.nodes * parts);
    return {whole + chunk, true, part / parts, part % parts * rows, of.group};
  }
  return {index / tiles, false, 0, index % tiles * rows, of.group * of.nodes};
}

// The position of a node: a chain's follow each other.
template <bool TREE>
inline int position_of(Problem of, const device int* positions, int node) {
  return TREE ? positions[node] : of.first + of.length - of.nodes + node;
}

// Pass 1. queries [H, N, D] with any strides; where TREE: positions [N], the root's first and
// smallest, and ancestors [N, N]. partial [chunks, H * N, D] and stats [chunks, H * N, 2] (largest
// score, sum of weights). A chunk in which a row sees nothing leaves zeros for it.
// group_at: the threadgroup's head of keys, and the index of its share.
template <typename T, int D, int CHUNK, int BLOCKS, bool TREE, typename Rows>
inline void attend_chunk(const device T* queries, long head_stride, long node_stride, long stride,
    Rows keys, Rows values, const device int* positions, const device bool* ancestors, Problem of, device float* partial,
    device float* stats, threadgroup T* key_tile, threadgroup T* value_tile, threadgroup int* rows,
    uint3 group_at, uint key_heads, uint thread_index, uint simdgroup, uint simdgroups,
    uint lane) {
  constexpr int KEYS = keys_per_tile(D * sizeof(T));
  const int threads = simdgroups * 32;
  const Share share = share_of<CHUNK, TREE>(of, group_at.y, simdgroups * BLOCKS * 8);
  const bool single = share.single;
  const int start = (of.first / CHUNK + share.chunk) * CHUNK;
  const int nearest = position_of<TREE>(of, positions, single ? share.node : of.nodes - 1);
  const int farthest = position_of<TREE>(of, positions, single ? share.node : 0);
  find_rows<CHUNK>(
      rows, positions, ancestors, of, start, share.node, single, thread_index, threads);

  const Place place = place_of(lane);
  const int begin = share.begin + int(simdgroup) * BLOCKS * 8;  // this SIMD-group's first row
  QueryRows<T, D, KEYS, BLOCKS> block;
  Fragment scores[BLOCKS][KEYS / 8];
  int position[BLOCKS], at_row[BLOCKS];
  bool mine[BLOCKS];
  DFLASH_UNROLL
  for (int b = 0; b < BLOCKS; b++) {
    const int row = begin + b * 8 + place.row;
    const int node = single ? share.node : row % of.nodes;
    const int head = int(group_at.x) * of.group + (single ? row : row / of.nodes);
    mine[b] = row < share.count;
    position[b] = mine[b] ? position_of<TREE>(of, positions, node) : 0;
    at_row[b] = head * of.nodes + node;
    const device T* query = queries + (mine[b] ? head * head_stride + node * node_stride : 0);
    block.begin(b, query, stride, mine[b], place);
  }
  for (int tile = 0; tile < CHUNK; tile += KEYS) {
    const int at = start + tile;  // a tile that no row of the threadgroup sees is not loaded
    if (at > nearest || at + KEYS <= of.first || at + KEYS <= farthest - of.window + 1) continue;
    load_tiles<T, D, KEYS>(
        key_tile, value_tile, keys, values, rows + tile, thread_index, threads);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (begin < share.count) {
      block.score(scores, key_tile);
      DFLASH_UNROLL
      for (int b = 0; b < BLOCKS; b++) {
        block.weigh(b, scores[b], rows + tile, position[b] - of.window + 1 - at, position[b] - at,
            of.scale * kLog2E, place);
      }
      block.gather(scores, value_tile);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  const size_t heads = key_heads * of.group;
  DFLASH_UNROLL
  for (int b = 0; b < BLOCKS; b++) {
    const size_t out = share.chunk * heads * of.nodes + at_row[b];
    if (mine[b]) block.store(b, partial + out * D, stats + out * 2, place);
  }
}

// Pass 2: element d of row `row` of out [H * N, D]. A sink is one more score of every row of its
// head that weighs no value; it comes before the chunks. `Sinks` is a pointer, as `Scales` is.
template <typename T, bool SINKS, typename Sinks>
inline void merge_chunks(const device float* partial, const device float* stats, Sinks sinks,
    int chunks, int rows, int nodes, device T* out, uint row, uint d, uint head_dim) {
  const float sink = SINKS ? float(sinks[row / nodes]) * kLog2E : kHidden;
  float top = sink;
  for (int chunk = 0; chunk < chunks; chunk++) {
    top = max(top, stats[(size_t(chunk) * rows + row) * 2]);
  }
  float total = SINKS ? exp2(sink - top) : 0.0f, sum = 0;
  for (int chunk = 0; chunk < chunks; chunk++) {
    const size_t at = size_t(chunk) * rows + row;
    const float weight = exp2(stats[at * 2] - top);
    total = fma(stats[at * 2 + 1], weight, total);
    sum = fma(partial[at * head_dim + d], weight, sum);
  }
  out[row * head_dim + d] = T(sum / total);
}

}  // namespace dflash
