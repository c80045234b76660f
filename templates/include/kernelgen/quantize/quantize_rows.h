// Rows of floating values to fp8 codes and their scales, as the contract has them: scale = largest magnitude / largest code,
// 1 for zeros and at least the smallest normal float; code = value / scale rounded. A NaN makes its scale, and so all that
// shares it, NaN.
#pragma once

#include "kernelgen/cache/fp8.h"

namespace kernelgen {

enum class Recipe { kTensor, kRow, kBlock1x128, kBlock128x128 };
constexpr int64_t kScaleBlock = 128;

// Magnitudes as words: these are ordered like the values, and a NaN is above all of them.
template <class T>
KERNELGEN_INLINE uint32_t largest_magnitude(const T* x, int64_t count, uint32_t largest = 0) {
  using V = Simd<float>;
  constexpr int64_t kBlock = 64;
  alignas(64) uint32_t most[kBlock] = {};
  alignas(64) float block[kBlock];
  for (int64_t c = 0; c < count; c += kBlock) {
    for (int64_t i = 0; i < kBlock; i += V::kLanes) {
      const int64_t n = count - c - i;
      V::store(block + i, n >= V::kLanes ? V::load(x + c + i) : V::load_first(x + c + i, n));
    }
    uint32_t words[kBlock];
    std::memcpy(words, block, sizeof words);
    for (int64_t i = 0; i < kBlock; ++i) {
      const uint32_t word = words[i] & 0x7fffffffu;
      most[i] = most[i] > word ? most[i] : word;
    }
  }
  for (int64_t i = 0; i < kBlock; ++i) largest = largest > most[i] ? largest : most[i];
  return largest;
}

template <class Code>
inline float scale_for(uint32_t largest) {
  float amax;
  std::memcpy(&amax, &largest, sizeof amax);
  if (amax == 0) return 1;
  const float scale = amax / Fp8Encoder<Code>::kLargest;
  return scale < 1.17549435e-38f ? 1.17549435e-38f : scale;  // a NaN stays one
}

// `rows` rows of `width` values, row_step apart, into codes, codes_step apart, with one scale, which is returned.
template <class T, class Code>
inline float quantize_tile(const T* x, int64_t row_step, Code* codes, int64_t codes_step, int64_t rows, int64_t width) {
  uint32_t largest = 0;
  for (int64_t r = 0; r < rows; ++r) largest = largest_magnitude(x + r * row_step, width, largest);
  const float scale = scale_for<Code>(largest);
  for (int64_t r = 0; r < rows; ++r) quantize_row(x + r * row_step, codes + r * codes_step, width, scale);
  return scale;
}

}  // namespace kernelgen
