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

template <class T, bool Half>
struct SmallOperand {
  using type = T;
};
template <class T>
struct SmallOperand<T, true> {
  using type = fp16;
};

// Code: bf16 or fp16 (then that of x, T), e4m3, e5m2, or e2m1 (mxfp4, beside bf16), whose scales of 32 are one for each lane's chunk:
// a product adds up over the lanes of a quad, so they go into the elements.
// Held: rows of x are those of small_rows.cuh.
template <class T, class Code, bool Held>
struct SmallWeights {
  static constexpr bool kPlain = is_same_v<T, Code>, kFourBit = is_same_v<Code, e2m1>, kHalf = Held && is_fp8_v<Code>;
  using Operand = typename SmallOperand<T, kHalf>::type;  // what is multiplied
  static constexpr int kPerChunk = kPlain ? 8 : kFourBit ? 32 : 16;  // elements of a lane's 16 bytes
  static constexpr int kDepth = 4 * kPerChunk;                       // of a quad
  static constexpr int kProducts = kPerChunk / 4;                    // of 16 of k
  static constexpr int kChunksOfX = kPerChunk / 8;                   // of 16 bytes

  // Four codes to pairs of bf16, NaN included. By way of fp16 and float32 these are 8 instructions where there is one from fp8 to fp16,
  // and 21 where bits are moved.
  __device__ static void widen_to_bf16(uint32_t& first, uint32_t& second, uint32_t word) {
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

  // What a chunk's elements are multiplied by: twice 2^(e - 1), which makes up for the bias of the codes' exponents as well. It ends
  // at 2^127; what a larger e lacks is `rest`.
  struct Factor {
    uint32_t pair, rest;
  };
  __device__ static Factor factor(int e) {
    const int capped = min(e, 128);
    const uint32_t bits = e == 255 ? 0x7fc0u : static_cast<uint32_t>(capped + 126) << 7;
    return {bits * 0x10001u, static_cast<uint32_t>(min(e - capped, 126) + 127) * 0x00800080u};
  }

  // Codes `pair` and `pair` + 4 of a word.
  __device__ static uint32_t scaled(uint32_t word, int pair, const Factor& factor) {
    constexpr int kTo = 12, kMoved = 6;  // where a code's sign goes, and by how much less its other bits
    const uint32_t sign = word << (kTo - 4 * pair) & 0x80008000u;
    const int shift = kTo - kMoved - 4 * pair;
    const uint32_t size = (shift >= 0 ? word << shift : word >> -shift) & 0x01c001c0u;
    return fma_pair<T>(sign | size, factor.pair, kSigns);  // adding -0 changes nothing
  }

  // The A fragment of product `i`, from the chunks of the two rows. Large: some scale needs its rest.
  template <bool Large>
  __device__ static void fragment(uint32_t (&a)[4], const uint32_t (&low)[4], const uint32_t (&high)[4], int i, const Factor& of_low,
                                  const Factor& of_high) {
    if constexpr (kPlain) {
      a[0] = low[2 * i], a[1] = high[2 * i], a[2] = low[2 * i + 1], a[3] = high[2 * i + 1];
    } else if constexpr (kFourBit) {
      const int word = i / 2, pair = i % 2 * 2;
      a[0] = scaled(low[word], pair, of_low), a[2] = scaled(low[word], pair + 1, of_low);
      a[1] = scaled(high[word], pair, of_high), a[3] = scaled(high[word], pair + 1, of_high);
      if constexpr (Large) {
        a[0] = fma_pair<T>(a[0], of_low.rest, kSigns), a[2] = fma_pair<T>(a[2], of_low.rest, kSigns);
        a[1] = fma_pair<T>(a[1], of_high.rest, kSigns), a[3] = fma_pair<T>(a[3], of_high.rest, kSigns);
      }
    } else if constexpr (is_same_v<Operand, fp16>) {
      widen_word_fp16<Code>(a[0], a[2], low[i]);
      widen_word_fp16<Code>(a[1], a[3], high[i]);
    } else {
      widen_to_bf16(a[0], a[2], low[i]);
      widen_to_bf16(a[1], a[3], high[i]);
    }
  }

  // Two words of the B fragment of product `i`, from the chunks of x, in the order in which codes are multiplied.
  __device__ static void columns(uint32_t& b0, uint32_t& b1, const uint32_t (&x)[kChunksOfX][4], int i) {
    if constexpr (kFourBit) {
      const uint32_t low = x[i / 2][i % 2], high = x[i / 2][i % 2 + 2];
      b0 = __byte_perm(low, high, 0x5410);
      b1 = __byte_perm(low, high, 0x7632);
    } else {
      b0 = x[i / 2][i % 2 * 2], b1 = x[i / 2][i % 2 * 2 + 1];
    }
  }
};

}  // namespace kernelgen
