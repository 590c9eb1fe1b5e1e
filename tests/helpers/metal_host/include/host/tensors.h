// Tensors in memory, and the product of two whose result is spread over a SIMD-group, as Metal 4's
// specification and MPPTensorOpsMatMul2d.h describe them in public. What those leave open is chosen
// to be unlike any device: which lane has which elements, and what a result holds before a product.
#pragma once

#include "metal.h"

namespace metal {

struct uint4b_format {};
struct tensor_inline {};
struct execution_simdgroup {};

template <class Index, size_t Rank>
struct dextents {
  static_assert(Rank == 2, "matrices only");
  Index sizes[2];
  dextents(Index inner, Index outer) : sizes{inner, outer} {}
};

template <class T>
struct Stored {
  typedef T* handle;
  static float read(const T* from, size_t at) { return float(from[at]); }
};
template <>
struct Stored<uint4b_format> {  // the even element in a byte's low half
  typedef uchar* handle;
  static float read(const uchar* from, size_t at) { return from[at / 2] >> at % 2 * 4 & 15; }
};

// Two dimensions, the inner one first. An element outside is zero.
template <class T, class Extents, class Kind>
struct tensor {
  typename Stored<T>::handle data;
  Extents extents;
  size_t stride;
  int first[2];

  tensor(typename Stored<T>::handle data, Extents extents)
      : data(data), extents(extents), stride(extents.sizes[0]), first{0, 0} {}
  tensor slice(int inner, int outer) const {
    tensor part = *this;
    part.first[0] += inner;
    part.first[1] += outer;
    return part;
  }
  float at(int inner, int outer) const {
    inner += first[0], outer += first[1];
    const bool inside = inner < extents.sizes[0] && outer < extents.sizes[1];
    return inside ? Stored<T>::read(data, outer * stride + inner) : 0;
  }
};

// A lane's elements of a matrix of ROWS x COLUMNS. Every fifth is none of it.
template <int ROWS, int COLUMNS>
struct cooperative_tensor {
  enum : int { held = ROWS * COLUMNS / 32 * 5 / 4 + 1 };
  float elements[held];

  static constexpr int get_capacity() { return held; }
  bool is_valid_element(int i) const { return i % 5 && i - i / 5 - 1 < ROWS * COLUMNS / 32; }
  float& operator[](int i) {
    if (i < 0 || i >= held) metal_host_inactive_lane();
    return elements[i];
  }
  vec<int, 2> get_multidimensional_index(int i) const {
    if (!is_valid_element(i)) return {1 << 20, 1 << 20};
    const int at = ((i - i / 5 - 1) * 32 + metal_host_lane()) * 21 % (ROWS * COLUMNS);
    return {at % COLUMNS, at / COLUMNS};
  }
};

}  // namespace metal

namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;

  constexpr matmul2d_descriptor(int m, int n, int k, bool left_transposed, bool right_transposed,
                                bool relaxed, mode how)
      : m(m), n(n), k(left_transposed || !right_transposed || relaxed || how != mode::multiply
                          ? 0 : k) {}
  // Apple's templates take the object itself, which C++17 has not.
  constexpr operator long() const { return (long)k << 32 | m << 16 | n; }
};

template <long FORM, class Scope>
struct matmul2d {
  enum : int { k = FORM >> 32, m = FORM >> 16 & 0xffff, n = FORM & 0xffff };
  static_assert(k > 0, "x w^T, not accumulated, is what the emulator multiplies");
  static_assert(k % 32 == 0, "k of 4-bit operands");
  static_assert(m % 16 == 0 || n % 16 == 0, "at least one of m and n");

  template <class Left, class Right, class Result>
  cooperative_tensor<m, n> get_destination_cooperative_tensor() const {
    return {};
  }
  template <class Left, class Right>
  void run(Left& left, Right& right, cooperative_tensor<m, n>& sums, METAL_HOST_SITE) const {
    if (Lanes<int>(0, site).present != ~0u) metal_host_inactive_lane();
    for (int i = 0; i < sums.held; i++) {
      if (!sums.is_valid_element(i)) continue;
      const auto place = sums.get_multidimensional_index(i);
      float sum = 0;
      for (int j = 0; j < k; j++) sum += left.at(j, place[1]) * right.at(j, place[0]);
      sums[i] = sum;
    }
  }
};

}  // namespace tensor_ops
}  // namespace mpp
