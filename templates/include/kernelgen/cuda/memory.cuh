// Loads and stores of one 16-byte chunk or one 32-bit word in shared memory, and 16-byte stores to global memory that
// are aligned to less.
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

__device__ inline void load_chunk(uint32_t (&words)[4], uint32_t shared) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared)
               : "memory");
}

__device__ inline void store_chunk(uint32_t shared, const uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

__device__ inline uint32_t load_word(uint32_t shared) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(shared) : "memory");
  return word;
}

__device__ inline uint32_t load_byte(uint32_t shared) {
  uint32_t byte;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(shared) : "memory");
  return byte;
}

__device__ inline void store_word(uint32_t shared, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
}

__device__ inline void load_pair(uint32_t (&words)[2], uint32_t shared) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(shared) : "memory");
}

// Brings the line of an address to L2. Nothing is read, so this may run before a kernel whose writes it would have to see: those go
// to L2 as well.
__device__ inline void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Stores 16 bytes to global memory aligned to `Alignment` bytes.
template <int Alignment>
__device__ inline void store_16_aligned(void* target, const uint32_t (&words)[4]) {
  static_assert(Alignment == 2 || Alignment == 4 || Alignment == 8 || Alignment == 16, "alignment class in bytes");
  if constexpr (Alignment == 16) {
    *static_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
  } else if constexpr (Alignment == 8) {
    static_cast<uint2*>(target)[0] = make_uint2(words[0], words[1]);
    static_cast<uint2*>(target)[1] = make_uint2(words[2], words[3]);
  } else if constexpr (Alignment == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) static_cast<uint32_t*>(target)[i] = words[i];
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) static_cast<uint16_t*>(target)[i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
  }
}

// Stores 16 aligned bytes in one access, which the compiler may not cut up.
__device__ inline void store_whole_16(void* target, const uint32_t (&words)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Words of global memory that are read once: they leave no trace in L1, and L2 fetches their neighbours with them.
template <int Words>
__device__ inline void load_stream(uint32_t (&words)[Words], const void* source) {
  static_assert(Words == 1 || Words == 2 || Words == 4, "a load has 4, 8 or 16 bytes");
  if constexpr (Words == 4) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(source));
  } else if constexpr (Words == 2) {
    asm volatile("ld.global.nc.L2::256B.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(source));
  } else {
    asm volatile("ld.global.nc.L2::256B.b32 %0, [%1];" : "=r"(words[0]) : "l"(source));
  }
}

}  // namespace kernelgen
