// Eight 4-bit codes of a 32-bit word, the first in the lowest nibble, to pairs of 16-bit floats, exactly.
//
// int4: a nibble becomes the lowest mantissa bits of 2^7 (bf16) or 2^10 (fp16), whose ulp is 1; what is too much is
// subtracted. e2m1 (mxfp4): sign, exponent and mantissa are moved to their place, and one multiplication by a power of two
// makes up for the exponent biases, subnormals included.
#pragma once

#include <kernelgen/cuda/conversions.cuh>
#include <kernelgen/cuda/pair_math.cuh>

namespace kernelgen {

struct int4_code {};
struct e2m1 {};

template <class T>
constexpr uint32_t kPairOfOnes = is_same_v<T, bf16> ? 0x3f803f80u : 0x3c003c00u;
template <class T>
constexpr uint32_t kNibbleBase = is_same_v<T, bf16> ? 0x43004300u : 0x64006400u;  // 128, 1024
constexpr uint32_t kSigns = 0x80008000u;

// A small whole number twice, negated; `number` is at most 255.
template <class T>
__device__ inline uint32_t negative_pair(int number) {
  const float x = -static_cast<float>(number);
  return pack_pair<T>(x, x);
}

// Codes 2 * Pair and 2 * Pair + 1 of a word, minus 8 or, with Zero, plus what `negative_zero` holds for both.
template <class T, bool Zero>
__device__ inline uint32_t int4_pair(uint32_t word, int pair, uint32_t negative_zero) {
  const uint32_t bytes = __byte_perm(word, word >> 4, pair | (4 + pair) << 8);
  const uint32_t raised = masked_or(bytes, 0x000f000fu, kNibbleBase<T>);
  if constexpr (Zero) {
    // In two steps: 128 + zero points above 127 are no bf16.
    return fma_pair<T>(fma_pair<T>(raised, kPairOfOnes<T>, kNibbleBase<T> | kSigns), kPairOfOnes<T>, negative_zero);
  } else {
    return fma_pair<T>(raised, kPairOfOnes<T>, (kNibbleBase<T> + 0x00080008u) | kSigns);
  }
}

// Codes Pair and Pair + 4, which are 16 bits apart: as 128 + code (bf16) or 1024 + code, and without that.
template <class T>
__device__ inline uint32_t int4_pair_raised(uint32_t word, int pair) {
  return masked_or(word >> 4 * pair, 0x000f000fu, kNibbleBase<T>);
}

template <class T, bool Zero>
__device__ inline uint32_t int4_pair_apart(uint32_t word, int pair, uint32_t negative_zero) {
  const uint32_t raised = int4_pair_raised<T>(word, pair);
  if constexpr (Zero) {
    return fma_pair<T>(fma_pair<T>(raised, kPairOfOnes<T>, kNibbleBase<T> | kSigns), kPairOfOnes<T>, negative_zero);
  } else {
    return fma_pair<T>(raised, kPairOfOnes<T>, (kNibbleBase<T> + 0x00080008u) | kSigns);
  }
}

// Two codes in the upper nibbles of the halves of a word.
template <class T>
__device__ inline uint32_t e2m1_halves(uint32_t halves) {
  constexpr int kShift = is_same_v<T, bf16> ? 6 : 3;
  constexpr uint32_t kScale = is_same_v<T, bf16> ? 0x7e807e80u : 0x74007400u;  // 2^126 = 2^(127 - 1), 2^14 = 2^(15 - 1)
  const uint32_t moved = (halves & kSigns) | ((halves & 0x70007000u) >> kShift);
  return fma_pair<T>(moved, kScale, kSigns);  // adding -0 changes nothing
}

template <class T>
__device__ inline uint32_t e2m1_pair_apart(uint32_t word, int pair) {
  return e2m1_halves<T>(word << (12 - 4 * pair));
}

template <class T>
__device__ inline uint32_t e2m1_pair(uint32_t word, int pair) {
  return e2m1_halves<T>(__byte_perm(word << 4, word, pair << 4 | (4 + pair) << 12));
}

}  // namespace kernelgen
