// The address-space qualifiers, and what else of the language C++ does not have.
#pragma once

#include "runtime.h"

#ifdef METAL_HOST_STRICT
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant
#define threadgroup
#endif
#define thread
#define METAL_FUNC inline
#define METAL_HOST_INLINE inline __attribute__((always_inline))
#define METAL_CONST static constexpr constant
#define __METAL_VERSION__ 320
#define __HAVE_BFLOAT__ 1

// The front end turns `threadgroup T name[n];` into METAL_HOST_SHARED(name, (T), ([n])); types and
// sizes come in brackets because they may hold commas.
#define METAL_HOST_UNWRAP(...) __VA_ARGS__
#ifdef METAL_HOST_STRICT
#define METAL_HOST_SHARED(name, type, size) \
  static threadgroup METAL_HOST_UNWRAP type name METAL_HOST_UNWRAP size
#else
#define METAL_HOST_SHARED(name, type, size)                                  \
  typedef METAL_HOST_UNWRAP type name##_shared METAL_HOST_UNWRAP size;       \
  name##_shared& name = *(name##_shared*)metal_host_threadgroup_variable(    \
      __COUNTER__, sizeof(name##_shared), alignof(name##_shared), #name)
#endif
