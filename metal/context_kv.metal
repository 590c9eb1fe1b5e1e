// The drafter's keys and values of new context rows, for all of its layers in one launch.
//
// Every layer of a DFlash drafter sees the same context feature, which enters it as one more key
// and value: k_proj, a norm over each head and the rotation to the row's position; and v_proj.
// Grid: (heads of keys, 2 * layers, tiles of 16 rows) threadgroups of 128 threads; of 2 * layers,
// the even ones make the keys of a layer and the odd ones its values. A threadgroup makes one head:
// it multiplies 32 columns of it after the other (matmul_tile.h says how; every weight is read
// from device memory once for 16 rows), gathers them in threadgroup memory and, for keys, lets
// each SIMD-group normalize and rotate four of the rows.
//
// The order of every sum is given by the shapes: along K that of matmul_tile.h, and over a head
// that of its elements, lane by lane and then by the butterfly below.
#include <metal_stdlib>

#include "matmul_tile.h"

namespace dflash {

struct ContextRows {
  int rows;      // of the context that are new
  int heads;     // of keys
  int position;  // of the first row
  float eps;     // of the norm
  float growth;  // of keys, where the rotary embedding asks for it (YaRN); else 1
};

// What multiplies the elements of a row of a head so that their mean square is 1.
inline float norm_of(const threadgroup float* row, int head_dim, float eps, int lane) {
  float sum = 0;
  for (int i = lane; i < head_dim; i += 32) sum = fma(row[i], row[i], sum);
  for (ushort distance = 1; distance < 32; distance *= 2) sum += simd_shuffle_xor(sum, distance);
  return rsqrt(sum / head_dim + eps);
}

// x [rows, K], normed features; w and v [layers, heads * D, K]; norms [layers, D]; frequencies
// [D / 2] in radians per position. keys and values [layers, heads, rows, D].
// head: threadgroup memory for 16 rows of D; scratch: kScratch float4; t, s, lane: this thread.
template <typename T, int D, typename Weights, typename Norms>
void context_kv(const device T* x, Weights w, Weights v, Norms norms,
                const device float* frequencies, ContextRows of, device T* keys, device T* values,
                threadgroup float* head, threadgroup float4* scratch, uint3 tile, int t, int s,
                int lane) {
  const int layer = tile.y / 2, size = of.heads * D, begin = tile.x * D;
  const bool is_key = tile.y % 2 == 0;
  const int first_row = tile.z * kTileRows;
  const DenseRows<T> rows = {{x, w.K}, first_row, min(int(kTileRows), of.rows - first_row)};
  const Weights matrix = (is_key ? w : v).expert(layer, size);
  for (int column = 0; column < D; column += kTileColumns) {
    const Columns<Weights, false> columns = {matrix, matrix, begin + column, begin + D};
    if (rows.count <= 8) {  // half of the work, and for each row the same sums
      multiply_tile<T, 1>(rows, columns, 0, w.K, scratch, t, s);
    } else {
      multiply_tile<T, 2>(rows, columns, 0, w.K, scratch, t, s);
    }
    for (int i = t; i < rows.count * kTileColumns; i += kThreads) {
      const int row = i / kTileColumns, inside = i % kTileColumns;
      if (column + inside < D) head[row * D + column + inside] = tile_sum(scratch, row, inside);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  const size_t to = ((size_t(layer) * of.heads + tile.x) * of.rows + first_row) * D;
  if (!is_key) {
    for (int i = t; i < rows.count * D; i += kThreads) values[to + i] = T(head[i]);
    return;
  }
  for (int row = s; row < rows.count; row += kThreads / 32) {
    const threadgroup float* from = head + row * D;
    const float norm = norm_of(from, D, of.eps, lane) * of.growth;
    const float position = of.position + first_row + row;
    for (int i = lane; i < D / 2; i += 32) {
      const float angle = position * frequencies[i];
      const float cosine = precise::cos(angle), sine = precise::sin(angle);
      const float left = from[i] * norm * float(norms[layer * D + i]);
      const float right = from[i + D / 2] * norm * float(norms[layer * D + D / 2 + i]);
      device T* key = keys + to + row * D;
      key[i] = T(fma(left, cosine, -(right * sine)));
      key[i + D / 2] = T(fma(left, sine, right * cosine));
    }
  }
}

}  // namespace dflash
