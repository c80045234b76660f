#pragma once
#include <kernelgen/cuda/conversions.cuh>

namespace kernelgen {
template <class T>
inline uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  const float2 x = unpack_pair<T>(a), y = unpack_pair<T>(b), z = unpack_pair<T>(c);
  // In double, so that the only rounding is the last one.
  auto fma = [](float p, float q, float r) { return static_cast<float>(static_cast<double>(p) * q + r); };
  return pack_pair<T>(fma(x.x, y.x, z.x), fma(x.y, y.y, z.y));
}
inline uint32_t masked_or(uint32_t x, uint32_t mask, uint32_t bits) { return (x & mask) | bits; }
inline uint32_t merged_bits(uint32_t x, uint32_t y, uint32_t mask) { return (x & mask) | (y & ~mask); }
}  // namespace kernelgen
