// Metal's language and library, declared for clang's "C++ for OpenCL", which knows address spaces.
//
// Nothing here runs: clang reads a kernel with these declarations and refuses what Metal refuses.
// As in Metal 4.1, a member function whose `this` has no address space takes a generic one.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#define METAL_FUNC inline
#define METAL_CONST static constexpr constant
#define __METAL_VERSION__ 410
#define __HAVE_INT4B_FORMAT_TYPE__ 1
#define __HAVE_BFLOAT__ 1
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define bfloat __bf16

// Anything of type T: kernels are read, not run.
template <class T>
T metal_host_any();

// The front end turns `threadgroup T name[n];` into METAL_HOST_SHARED(name, (T), ([n])).
#define METAL_HOST_UNWRAP(...) __VA_ARGS__
#define METAL_HOST_SHARED(name, type, size)                             \
  typedef METAL_HOST_UNWRAP type name##_shared METAL_HOST_UNWRAP size; \
  threadgroup name##_shared& name = metal_host_any<threadgroup name##_shared&>()

namespace metal {

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
// What MLX's own prelude to a custom kernel names.
typedef half float16_t;
typedef bfloat bfloat16_t;

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

#define METAL_HOST_VECTORS(T) \
  typedef vec<T, 2> T##2;     \
  typedef vec<T, 3> T##3;     \
  typedef vec<T, 4> T##4;
METAL_HOST_VECTORS(float)
METAL_HOST_VECTORS(half)
METAL_HOST_VECTORS(char)
METAL_HOST_VECTORS(uchar)
METAL_HOST_VECTORS(short)
METAL_HOST_VECTORS(ushort)
METAL_HOST_VECTORS(int)
METAL_HOST_VECTORS(uint)
METAL_HOST_VECTORS(long)
METAL_HOST_VECTORS(ulong)
#undef METAL_HOST_VECTORS
typedef vec<bfloat, 2> bfloat2;
typedef vec<bfloat, 3> bfloat3;
typedef vec<bfloat, 4> bfloat4;

// What the front end makes of `vec<T, N>(...)`: clang's vectors have no constructors.
template <class T, int N, class Only>
vec<T, N> make_vector(Only);
template <class T, int N, class First, class Second, class... Rest>
vec<T, N> make_vector(First, Second, Rest...);

template <class To, class From>
To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  return metal_host_any<To>();
}

float exp(float);
float exp2(float);
float fma(float, float, float);
bool isfinite(float);
template <class T>
T max(T, T);
template <class T>
T min(T, T);

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

template <class T>
T simd_shuffle(T, ushort);
template <class T>
T simd_shuffle_xor(T, ushort);

// As Apple declares it: the storage is a vector of all 64 elements, of which a lane's are the first,
// and operands are values. Apple's constructors are of `thread` objects, so a struct with matrices
// needs one too; for members and temporaries clang finds no such constructor, so
// test_metal_strict.py looks at the structs instead.
template <class T, int Rows = 8, int Columns = 8>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "Metal has 8x8 only");
  typedef vec<T, 64> storage_type;
  storage_type elements;

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal);
  thread storage_type& thread_elements() thread { return elements; }
  const thread storage_type& thread_elements() const thread { return elements; }
};

#define METAL_HOST_LOAD_STORE(space)                                                        \
  template <class T>                                                                        \
  void simdgroup_load(thread simdgroup_matrix<T>&, const space T*, ulong = 8,               \
      ulong2 = (ulong2)(0), bool = false);                                                  \
  template <class T>                                                                        \
  void simdgroup_store(const thread simdgroup_matrix<T>&, space T*, ulong = 8,              \
      ulong2 = (ulong2)(0), bool = false);
METAL_HOST_LOAD_STORE(device)
METAL_HOST_LOAD_STORE(threadgroup)
#undef METAL_HOST_LOAD_STORE
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D>&, simdgroup_matrix<A>, simdgroup_matrix<B>, simdgroup_matrix<C>);

template <class T>
struct numeric_limits {
  static constexpr T max();
  static constexpr T min();
  static constexpr T lowest();
  static constexpr T infinity();
};

// Tensors in memory, as MLX's steel_gemm_thin_nax.h and other public kernels declare them.
struct uint4b_format {};
struct tensor_inline {};
struct execution_simdgroup {};
template <class Index, size_t Rank>
struct dextents {
  dextents(Index, Index);
};
template <class T>
struct tensor_storage {
  typedef T* handle;
};
template <>
struct tensor_storage<device uint4b_format> {
  typedef device uchar* handle;
};
template <class T, class Extents, class Kind>
struct tensor {
  tensor(typename tensor_storage<T>::handle, Extents);
  tensor slice(int, int) const thread;
};
struct tensor_index {
  int operator[](int) const thread;
};
template <class T>
struct cooperative_tensor {
  ushort get_capacity() const thread;
  bool is_valid_element(ushort) const thread;
  thread T& operator[](ushort) thread;
  tensor_index get_multidimensional_index(ushort) const thread;
};

}  // namespace metal

namespace mpp {
namespace tensor_ops {
struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  constexpr matmul2d_descriptor(int m, int n, int k, bool, bool, bool, mode) : m(m), n(n), k(k) {}
  // Apple's templates take the object itself, which C++17 has not.
  constexpr operator long() const { return (long)k << 32 | m << 16 | n; }
};
template <long Form, class Scope>
struct matmul2d {
  static_assert(Form >> 32 & ~31 && (Form >> 32) % 32 == 0, "k of 4-bit operands");
  static_assert((Form >> 16) % 16 == 0 || Form % 16 == 0, "at least one of m and n");
  // bfloat by uint4b_format into float is in the table of MPPTensorOpsMatMul2d.h; others may not be.
  template <class Left, class Right, class Result>
  metal::cooperative_tensor<Result> get_destination_cooperative_tensor() thread;
  template <class Extents, class Kind>
  void run(thread metal::tensor<device bfloat, Extents, Kind>&,
      thread metal::tensor<device metal::uint4b_format, Extents, Kind>&,
      thread metal::cooperative_tensor<float>&) thread;
};
}  // namespace tensor_ops
}  // namespace mpp
using namespace metal;
