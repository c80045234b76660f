// fp8 codes and their scales out of the registers of a warpgroup: 128 columns of a row share a scale (quantize_fp8's block_1x128).
//
// A quad of lanes holds a row, each lane two of every eight columns. The numbers are those of quantize/quantize_fp8_cuda on float32
// results: the same scale, and codes of the quotient by it, rounded as a true division rounds it.
#pragma once

#include <kernelgen/cuda/fp8.cuh>
#include <kernelgen/cuda/memory.cuh>
#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/quantize/scale.cuh>
#include <kernelgen/sm90/smem_tile.cuh>

namespace kernelgen {

constexpr int kColumnsOfScale = 128;

// The largest of a row's magnitudes, in each lane of its quad.
__device__ inline uint32_t largest_of_quad(uint32_t amax) {
  amax = max(amax, __shfl_xor_sync(kFullWarp, amax, 1));
  return max(amax, __shfl_xor_sync(kFullWarp, amax, 2));
}

template <class Code>
struct QuantizedRows {
  static constexpr float kLargest = is_same_v<Code, e4m3> ? 448.0f : 57344.0f;

  // Two neighbouring codes, the first in the low byte: to nearest even, saturated, NaN kept.
  __device__ static uint32_t pair(float first, float second) {
    uint16_t codes;
    if constexpr (is_same_v<Code, e4m3>) {
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    } else {
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    }
    return codes;
  }

  // Sixteen columns of two rows of the warp's 16 into a slab of 128-byte rows. A lane has y[0 .. 3] of the first eight columns, two of the
  // upper row and then two of the lower one, and y[4 .. 7] of the other eight. Neighbouring lanes exchange what they have of one eight,
  // so that each has four columns in a word.
  __device__ static void to_slab(uint32_t slab, int column, const float* y, const Divisor& upper, const Divisor& lower) {
    const uint32_t first = pair(upper.divide(y[0]), upper.divide(y[1])) | pair(lower.divide(y[2]), lower.divide(y[3])) << 16;
    const uint32_t second = pair(upper.divide(y[4]), upper.divide(y[5])) | pair(lower.divide(y[6]), lower.divide(y[7])) << 16;
    const int lane = lane_id();
    const bool odd = lane % 2;
    const uint32_t kept = odd ? second : first, others = __shfl_xor_sync(kFullWarp, odd ? first : second, 1);
    const uint32_t left = odd ? others : kept, right = odd ? kept : others;
    const int row = threadIdx.x / 32 % 4 * 16 + lane / 4, in_chunk = (odd ? 8 : 0) + lane % 4 / 2 * 4;
    store_word(slab + swizzled_chunk(row, column / 16) + in_chunk, __byte_perm(left, right, 0x5410));
    store_word(slab + swizzled_chunk(row + 8, column / 16) + in_chunk, __byte_perm(left, right, 0x7632));
  }
};

}  // namespace kernelgen
