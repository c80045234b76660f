// Arithmetic on a packed pair of 16-bit floats in one instruction that sm_80 has for both types.
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

// a * b + c, rounded once.
template <class T>
__device__ inline uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if constexpr (is_same_v<T, bf16>) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}

// (x & mask) | bits in one instruction: the compiler takes two where mask and bits are constants.
__device__ inline uint32_t masked_or(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
  return y;
}

// Bits of x where the mask has ones and those of y elsewhere, in one instruction likewise.
__device__ inline uint32_t merged_bits(uint32_t x, uint32_t y, uint32_t mask) {
  uint32_t z;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(z) : "r"(x), "r"(y), "r"(mask));
  return z;
}

}  // namespace kernelgen
