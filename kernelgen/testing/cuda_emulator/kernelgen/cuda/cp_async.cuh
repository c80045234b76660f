#pragma once
#include <kernelgen/cuda/gather.cuh>
#include <kernelgen/cuda/memory.cuh>
#include <kernelgen/cuda/types.cuh>

namespace kernelgen {
inline void require_aligned(const void* source, int alignment, bool used) {
  if (used && reinterpret_cast<uintptr_t>(source) % alignment != 0) std::fprintf(stderr, "emulator: unaligned copy\n"), std::abort();
}
inline void cp_async_16(uint32_t shared, const void* source, bool valid = true) {
  require_aligned(source, 16, valid);
  emulator::copy_async(shared, source, valid ? 16 : 0, 16);
}
template <int Alignment>
inline void copy_bytes_aligned(uint32_t shared, const void* source, int bytes) {
  require_aligned(source, Alignment, bytes > 0);
  if constexpr (Alignment < 4) {
    uint32_t words[4];
    gather_prefix<Alignment>(words, source, bytes);
    store_chunk(shared, words);
  } else {
    emulator::copy_async(shared, source, bytes, 16);
  }
}
template <int Alignment>
inline void copy_16_aligned(uint32_t shared, const void* source, bool valid = true) {
  static_assert(Alignment >= 2);
  copy_bytes_aligned<Alignment>(shared, source, valid ? 16 : 0);
}
template <int Alignment>
inline void copy_prefix(uint32_t shared, const void* source, int bytes) {
  require_aligned(source, Alignment, bytes > 0);
  if constexpr (Alignment < 4) {
    uint32_t words[4];
    gather_prefix<Alignment>(words, source, bytes);
    store_chunk(shared, words);
  } else {
    emulator::copy_async(shared, source, bytes, 16);
  }
}
inline void copy_window(uint32_t shared, const void* source, int first, int end) {
  uint32_t words[4];
  gather_window(words, source, first, end);
  store_chunk(shared, words);
}
inline void cp_async_4(uint32_t shared, const void* source, bool valid = true) {
  require_aligned(source, 4, valid);
  emulator::copy_async(shared, source, valid ? 4 : 0, 4);
}
inline void cp_async_commit() { emulator::commit(); }
template <int Pending>
inline void cp_async_wait() {
  emulator::wait_groups(Pending);
}
}  // namespace kernelgen
