// The address-space qualifiers, and what else of the language C++ does not have.
#pragma once

#include "runtime.h"

#define device
#define constant
#define threadgroup
#define thread
#define METAL_FUNC inline
#define METAL_HOST_INLINE inline __attribute__((always_inline))
#define METAL_CONST static constexpr constant
#define __METAL_VERSION__ 410
#define __HAVE_INT4B_FORMAT_TYPE__ 1
#define __HAVE_BFLOAT__ 1

// The front end turns `threadgroup T name[n];` into METAL_HOST_SHARED(name, (T), ([n])); types and
// sizes come in brackets because they may hold commas.
#define METAL_HOST_UNWRAP(...) __VA_ARGS__
#define METAL_HOST_SHARED(name, type, size)                                  \
  typedef METAL_HOST_UNWRAP type name##_shared METAL_HOST_UNWRAP size;       \
  name##_shared& name = *(name##_shared*)metal_host_threadgroup_variable(    \
      __COUNTER__, sizeof(name##_shared), alignof(name##_shared), #name)
