// 16 bytes of a weight's row in the registers that multiply them, for moe/small_cuda.
//
// A lane has 16 neighbouring bytes of row lane / 4 and of row lane / 4 + 8 of an mma's sixteen, and its quad 64 of each. Sums over k may
// run in any order that both operands share, so the lane's elements are what it multiplies: no exchange between lanes. Of x it
// has the same k of token lane / 4.
#pragma once

#include <kernelgen/cuda/conversions.cuh>
#include <kernelgen/cuda/fp8.cuh>
#include <kernelgen/cuda/four_bit.cuh>

namespace kernelgen {

// Code: bf16 or fp16 (then that of x, T), e4m3, e5m2.
template <class T, class Code>
struct SmallWeights {
  static constexpr bool kPlain = is_same_v<T, Code>;
  static constexpr int kPerChunk = kPlain ? 8 : 16;   // elements of a lane's 16 bytes
  static constexpr int kDepth = 4 * kPerChunk;        // of a quad
  static constexpr int kProducts = kPerChunk / 4;     // of 16 of k
  static constexpr int kChunksOfX = kPerChunk / 8;    // of 16 bytes

  // Four codes to pairs of bf16, NaN included. By way of fp16 and float32 these are 8 instructions where there is one from fp8 to fp16,
  // and 21 where bits are moved.
  __device__ static void widen(uint32_t& first, uint32_t& second, uint32_t word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t halves[2];
    widen_word_fp16<Code>(halves[0], halves[1], word);
    const float2 low = unpack_pair<fp16>(halves[0]), high = unpack_pair<fp16>(halves[1]);
    first = pack_pair<T>(low.x, low.y);
    second = pack_pair<T>(high.x, high.y);
#else
    widen_word<Code, T>(first, second, word);
#endif
  }

  // The A fragment of product `i`, from the chunks of the two rows.
  __device__ static void fragment(uint32_t (&a)[4], const uint32_t (&low)[4], const uint32_t (&high)[4], int i) {
    if constexpr (kPlain) {
      a[0] = low[2 * i], a[1] = high[2 * i], a[2] = low[2 * i + 1], a[3] = high[2 * i + 1];
    } else if constexpr (is_same_v<T, fp16>) {
      widen_word_fp16<Code>(a[0], a[2], low[i]);
      widen_word_fp16<Code>(a[1], a[3], high[i]);
    } else {
      widen(a[0], a[2], low[i]);
      widen(a[1], a[3], high[i]);
    }
  }
};

}  // namespace kernelgen
