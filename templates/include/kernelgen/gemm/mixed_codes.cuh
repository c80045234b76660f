// Two neighbouring 4-bit codes, a byte, to a pair of 16-bit floats times their scale: what mixed_sm90.cuh multiplies.
//
// Integer instructions limit how fast codes are decoded, and multiplications of integers run in another pipe: where a nibble has to go to
// two places, one multiplication by two powers of two puts it there.
#pragma once

#include <kernelgen/cuda/four_bit.cuh>

namespace kernelgen {

template <class T, class Code, bool Zero>
struct MixedCodes {
  static constexpr bool kInt4 = is_same_v<Code, int4_code>;
  static_assert(kInt4 || is_same_v<T, bf16>, "a scale of mxfp4 is a bf16, and may be no fp16");

  // The byte's codes, the lower nibble first, each minus 8 or plus what `negative_zero` holds, times `scale`, which holds it twice. mxfp4 is
  // exact; int4 is rounded once.
  __device__ static uint32_t decode(uint32_t byte, uint32_t scale, uint32_t negative_zero) {
    if constexpr (kInt4) {
      const uint32_t raised = masked_or(byte * 0x1001u, 0x000f000fu, kNibbleBase<T>);
      uint32_t value;
      if constexpr (Zero) {
        // In two steps: 128 + zero points above 127 are no bf16.
        value = fma_pair<T>(fma_pair<T>(raised, kPairOfOnes<T>, kNibbleBase<T> | kSigns), kPairOfOnes<T>, negative_zero);
      } else {
        value = fma_pair<T>(raised, kPairOfOnes<T>, (kNibbleBase<T> + 0x00080008u) | kSigns);
      }
      return fma_pair<T>(value, scale, kSigns);
    } else {
      // Exponent and mantissa to bits 6 - 8 of a half, the sign to bit 15: a bf16 of 2^-126 times the value, subnormals included.
      const uint32_t magnitudes = byte * 0x00040040u & 0x01c001c0u;
      const uint32_t moved = masked_or(byte * 0x01001000u, kSigns, magnitudes);
      return fma_pair<T>(fma_pair<T>(moved, 0x7e807e80u, kSigns), scale, kSigns);  // 2^126, in two steps as their product may be none
    }
  }
};

}  // namespace kernelgen
