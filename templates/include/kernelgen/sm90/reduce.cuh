// Additions to global memory that give nothing back.
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

// Eight neighbours of 16 bits, at a multiple of 16 bytes, each rounded and added for itself: who adds at the same time is not lost.
template <class T>
__device__ inline void reduce_add_16(T* target, const uint32_t (&words)[4]) {
  static_assert(is_same_v<T, bf16> || is_same_v<T, fp16>, "reduce_add_16 adds 16-bit floats");
  if constexpr (is_same_v<T, bf16>) {
    asm volatile("red.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  } else {
    asm volatile("red.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  }
}

}  // namespace kernelgen
