// Two neighbouring 4-bit codes, a byte, to a pair of 16-bit floats times their scale: what mixed_sm90.cuh multiplies.
//
// Integer instructions limit how fast codes are decoded, and multiplications of integers run in another pipe: where a nibble has to go to
// two places, one multiplication by two powers of two puts it there.
#pragma once

#include <kernelgen/cuda/four_bit.cuh>
#include <kernelgen/cuda/memory.cuh>

namespace kernelgen {

// A table in shared memory takes fewer instructions still: 256 pairs, once for each lane, so that no two lanes read the same bank. It takes 32
// KB, and of shared memory's time as much as the codes' own loads, which is there where tiles have few rows.
template <class T, class Code, bool Zero, bool Table>
struct MixedCodes {
  static constexpr bool kInt4 = is_same_v<Code, int4_code>;
  static_assert(kInt4 || is_same_v<T, bf16>, "a scale of mxfp4 is a bf16, and may be no fp16");
  static constexpr int kEntryBytes = 4 * kWarpSize, kTableBytes = Table ? 256 * kEntryBytes : 0;

  // What the byte's codes mean, the lower nibble first: int4 minus 8, or without zero points' own part.
  __device__ static uint32_t pair(uint32_t byte) {
    if constexpr (kInt4) {
      constexpr uint32_t kOffset = Zero ? kNibbleBase<T> : kNibbleBase<T> + 0x00080008u;
      return fma_pair<T>(masked_or(byte * 0x1001u, 0x000f000fu, kNibbleBase<T>), kPairOfOnes<T>, kOffset | kSigns);
    } else {
      // Exponent and mantissa to bits 6 - 8 of a half, the sign to bit 15: a bf16 of 2^-126 times the value, subnormals included.
      const uint32_t magnitudes = byte * 0x00040040u & 0x01c001c0u;
      return fma_pair<T>(masked_or(byte * 0x01001000u, kSigns, magnitudes), 0x7e807e80u, kSigns);
    }
  }

  // The table, by all `threads` threads of the block; a barrier must follow.
  __device__ static void fill(uint32_t table, int threads) {
    if constexpr (Table) {
      for (int i = threadIdx.x; i < kTableBytes / 4; i += threads) store_word(table + 4 * i, pair(i / kWarpSize));
    }
  }

  // The byte's codes minus their zero points, times `scale`, which holds it twice. mxfp4 is exact (2^126 and a scale go on one by one, as
  // their product may be no bf16); int4 is rounded once. Zero points are subtracted for themselves: 128 + one above 127 is no bf16.
  // `table`: where this lane's entries begin.
  __device__ static uint32_t decode(uint32_t byte, uint32_t scale, uint32_t negative_zero, uint32_t table) {
    uint32_t value;
    if constexpr (Table) {
      value = load_word(table + byte * kEntryBytes);
    } else {
      value = pair(byte);
    }
    if constexpr (Zero) value = fma_pair<T>(value, kPairOfOnes<T>, negative_zero);
    return fma_pair<T>(value, scale, kSigns);
  }
};

}  // namespace kernelgen
