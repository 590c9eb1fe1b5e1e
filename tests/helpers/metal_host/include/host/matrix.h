// simdgroup_matrix: 8x8, spread over the lanes as MLX's own kernels rely on (BaseMMAFrag in
// mlx/backend/metal/kernels/steel/gemm/mma.h): each lane holds two neighbours of one row.
#pragma once

#include "simdgroup.h"
#include "vectors.h"

namespace metal {

// The place of a lane's first element; its second is one column on.
struct MatrixPlace {
  int row, column;
};
inline MatrixPlace matrix_place() {
  const int lane = metal_host_lane(), quad = lane / 4;
  return {(quad & 4) + lane / 2 % 4, (quad & 2) * 2 + lane % 2 * 2};
}

template <class T, int Rows = 8, int Columns = 8>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "Metal has 8x8 only");
  vec<T, 2> elements;

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    const MatrixPlace at = matrix_place();
    elements[0] = at.row == at.column ? diagonal : T(0);
    elements[1] = at.row == at.column + 1 ? diagonal : T(0);
  }
  thread vec<T, 2>& thread_elements() { return elements; }
  const thread vec<T, 2>& thread_elements() const { return elements; }
};

#define METAL_HOST_LOAD_STORE(space)                                                          \
  template <class T>                                                                          \
  METAL_HOST_INLINE void simdgroup_load(thread simdgroup_matrix<T>& matrix,                   \
      const space T* from, ulong stride = 8, vec<ulong, 2> origin = {0, 0},                   \
      bool transposed = false) {                                                              \
    const MatrixPlace at = matrix_place();                                                    \
    from += origin[1] * stride + origin[0];                                                   \
    from += transposed ? at.column * stride + at.row : at.row * stride + at.column;           \
    matrix.elements[0] = from[0];                                                             \
    matrix.elements[1] = from[transposed ? stride : 1];                                       \
  }                                                                                           \
  template <class T>                                                                          \
  METAL_HOST_INLINE void simdgroup_store(const thread simdgroup_matrix<T>& matrix,            \
      space T* to, ulong stride = 8, vec<ulong, 2> origin = {0, 0},                           \
      bool transposed = false) {                                                              \
    const MatrixPlace at = matrix_place();                                                    \
    to += origin[1] * stride + origin[0];                                                     \
    to += transposed ? at.column * stride + at.row : at.row * stride + at.column;             \
    to[0] = matrix.elements[0];                                                               \
    to[transposed ? stride : 1] = matrix.elements[1];                                         \
  }
METAL_HOST_LOAD_STORE(device)
#undef METAL_HOST_LOAD_STORE

template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(thread simdgroup_matrix<D>& d,
    const thread simdgroup_matrix<A>& a, const thread simdgroup_matrix<B>& b,
    const thread simdgroup_matrix<C>& c, METAL_HOST_SITE) {
  const float left[2] = {(float)a.elements[0], (float)a.elements[1]};
  const float right[2] = {(float)b.elements[0], (float)b.elements[1]};
  const float added[2] = {(float)c.elements[0], (float)c.elements[1]};
  const MatrixPlace at = matrix_place();
  const float* result =
      metal_host_multiply_accumulate(left, right, added, site) + at.row * 8 + at.column;
  d.elements[0] = (D)result[0];
  d.elements[1] = (D)result[1];
}

}  // namespace metal
