#pragma once
#include <kernelgen/cuda/types.cuh>

namespace kernelgen {
inline void load_chunk(uint32_t (&words)[4], uint32_t shared) { std::memcpy(words, emulator::dynamic_shared + shared, 16); }
inline void store_chunk(uint32_t shared, const uint32_t (&words)[4]) { std::memcpy(emulator::dynamic_shared + shared, words, 16); }
inline uint32_t load_word(uint32_t shared) {
  uint32_t word;
  std::memcpy(&word, emulator::dynamic_shared + shared, 4);
  return word;
}
inline uint32_t load_byte(uint32_t shared) { return emulator::dynamic_shared[shared]; }
inline void store_word(uint32_t shared, uint32_t word) { std::memcpy(emulator::dynamic_shared + shared, &word, 4); }
inline void load_pair(uint32_t (&words)[2], uint32_t shared) { std::memcpy(words, emulator::dynamic_shared + shared, 8); }
inline void prefetch_l2(const void*) {}
template <int Alignment>
inline void store_16_aligned(void* target, const uint32_t (&words)[4]) {
  if (reinterpret_cast<uintptr_t>(target) % Alignment != 0) std::fprintf(stderr, "emulator: unaligned store\n"), std::abort();
  std::memcpy(target, words, 16);
}
inline void store_whole_16(void* target, const uint32_t (&words)[4]) { store_16_aligned<16>(target, words); }
template <int Words>
inline void load_stream(uint32_t (&words)[Words], const void* source) {
  if (reinterpret_cast<uintptr_t>(source) % (4 * Words) != 0) std::fprintf(stderr, "emulator: unaligned load\n"), std::abort();
  std::memcpy(words, source, 4 * Words);
}
}  // namespace kernelgen
