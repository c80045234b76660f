// Asynchronous copies from global to shared memory (cp.async, sm_80 and later), with zero-fill.
//
// A thread's copies become visible to itself after cp_async_wait, to the block after a barrier that follows it.
#pragma once

#include <kernelgen/cuda/gather.cuh>
#include <kernelgen/cuda/memory.cuh>

namespace kernelgen {

// Copies 16 bytes, or writes 16 zero bytes when `valid` is false; `source` is then not read, but must still be a
// legal address form (pass the tensor's base).
__device__ inline void cp_async_16(uint32_t shared, const void* source, bool valid = true) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(source),
               "r"(valid ? 16 : 0)
               : "memory");
}

// The same for data that is aligned to `Alignment` bytes only: 16 bytes in pieces of that size. There is no cp.async
// of 2 bytes: that class loads through registers and is synchronous.
template <int Alignment>
__device__ inline void copy_16_aligned(uint32_t shared, const void* source, bool valid = true) {
  static_assert(Alignment == 2 || Alignment == 4 || Alignment == 8 || Alignment == 16, "alignment class in bytes");
  if constexpr (Alignment == 16) {
    cp_async_16(shared, source, valid);
  } else if constexpr (Alignment == 2) {
    uint32_t words[4];
    gather_prefix<2>(words, source, valid ? 16 : 0);
    store_chunk(shared, words);
  } else {
    const char* bytes = static_cast<const char*>(source);
#pragma unroll
    for (int i = 0; i < 16; i += Alignment) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared + i), "l"(bytes + i), "n"(Alignment),
                   "r"(valid ? Alignment : 0)
                   : "memory");
    }
  }
}

// Copies the first `bytes` (0, 8 or 16) of 16 bytes and writes zeros for the rest; `source` is aligned to `Alignment`
// bytes. Classes 1 and 2, which cp.async does not have, load through registers and are synchronous.
template <int Alignment>
__device__ inline void copy_bytes_aligned(uint32_t shared, const void* source, int bytes) {
  if constexpr (Alignment == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(source), "r"(bytes) : "memory");
  } else if constexpr (Alignment >= 4) {
    const char* from = static_cast<const char*>(source);
#pragma unroll
    for (int i = 0; i < 16; i += Alignment) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared + i), "l"(from + i), "n"(Alignment),
                   "r"(i < bytes ? Alignment : 0)
                   : "memory");
    }
  } else {
    uint32_t words[4];
    gather_prefix<Alignment>(words, source, bytes);
    store_chunk(shared, words);
  }
}

// Copies the first `bytes` (0 .. 16, any number) of 16 bytes and writes zeros for the rest; `source` is aligned to `Alignment`
// bytes. Classes 1 and 2 load through registers and are synchronous.
template <int Alignment>
__device__ inline void copy_prefix(uint32_t shared, const void* source, int bytes) {
  if constexpr (Alignment == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(source), "r"(bytes) : "memory");
  } else if constexpr (Alignment >= 4) {
    const char* from = static_cast<const char*>(source);
#pragma unroll
    for (int i = 0; i < 16; i += Alignment) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared + i), "l"(from + i), "n"(Alignment),
                   "r"(max_of(0, min_of(bytes - i, Alignment)))
                   : "memory");
    }
  } else {
    uint32_t words[4];
    gather_prefix<Alignment>(words, source, bytes);
    store_chunk(shared, words);
  }
}

// Bytes [first, end) of 16 bytes, zeros for the others; synchronous, of any alignment.
__device__ inline void copy_window(uint32_t shared, const void* source, int first, int end) {
  uint32_t words[4];
  gather_window(words, source, first, end);
  store_chunk(shared, words);
}

// Copies one aligned 32-bit word, or writes 0.
__device__ inline void cp_async_4(uint32_t shared, const void* source, bool valid = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(source), "r"(valid ? 4 : 0) : "memory");
}

__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Pending` of the newest groups of this thread are unfinished.
template <int Pending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace kernelgen
