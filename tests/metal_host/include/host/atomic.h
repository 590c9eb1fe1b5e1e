// Relaxed atomics, the only kind Metal has.
#pragma once

#include "scalars.h"

namespace metal {

enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;

template <class T>
using same_t = std::common_type_t<T>;  // takes part in no deduction

#define METAL_HOST_UPDATE(space, name, expression)                                            \
  template <class T>                                                                          \
  inline T name(space atomic<T>* object, same_t<T> operand, memory_order) {                   \
    T old{};                                                                                  \
    T updated; __atomic_load(&object->value, &old, __ATOMIC_RELAXED); do {                    \
      updated = T(expression);                                                                \
    } while (!__atomic_compare_exchange(                                                      \
        &object->value, &old, &updated, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));           \
    return old;                                                                               \
  }
#define METAL_HOST_ATOMICS(space)                                                             \
  template <class T>                                                                          \
  inline T atomic_load_explicit(const space atomic<T>* object, memory_order) {                \
    T value{};                                                                                \
    __atomic_load(const_cast<T*>(&object->value), &value, __ATOMIC_RELAXED);                  \
    return value;                                                                             \
  }                                                                                           \
  template <class T>                                                                          \
  inline void atomic_store_explicit(space atomic<T>* object, same_t<T> value, memory_order) { \
    __atomic_store(&object->value, &value, __ATOMIC_RELAXED);                                 \
  }                                                                                           \
  METAL_HOST_UPDATE(space, atomic_exchange_explicit, operand)                                 \
  METAL_HOST_UPDATE(space, atomic_fetch_add_explicit, old + operand)                          \
  METAL_HOST_UPDATE(space, atomic_fetch_sub_explicit, old - operand)                          \
  METAL_HOST_UPDATE(space, atomic_fetch_or_explicit, old | operand)                           \
  METAL_HOST_UPDATE(space, atomic_fetch_and_explicit, old & operand)                          \
  METAL_HOST_UPDATE(space, atomic_fetch_max_explicit, old < operand ? operand : old)          \
  METAL_HOST_UPDATE(space, atomic_fetch_min_explicit, operand < old ? operand : old)
METAL_HOST_ATOMICS(device)
#undef METAL_HOST_ATOMICS
#undef METAL_HOST_UPDATE

}  // namespace metal
