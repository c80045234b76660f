// 16 bytes of a weight's row in the registers that multiply them, for moe/small_cuda.
//
// A lane has 16 neighbouring bytes of row lane / 4 and of row lane / 4 + 8 of an mma's sixteen, and its quad 64 of each. Sums over k may
// run in any order that both operands share, so the lane's elements are what it multiplies: no exchange between lanes. Of x it
// has the same k of token lane / 4. Only mxfp4, whose scales are of 32 elements, 16 bytes, takes a word of each of the quad's chunks: what
// a product adds up over the quad has then one scale, which goes on the sums.
#pragma once

#include <kernelgen/cuda/conversions.cuh>
#include <kernelgen/cuda/four_bit.cuh>
#include <kernelgen/cuda/fp8.cuh>

namespace kernelgen {

template <class T, bool Half>
struct SmallOperand {
  using type = T;
};
template <class T>
struct SmallOperand<T, true> {
  using type = fp16;
};

// Code: bf16 or fp16 (then that of x, T), e4m3, e5m2, or e2m1 (mxfp4, beside bf16, held rows only).
// Held: rows of x are those of small_rows.cuh.
template <class T, class Code, bool Held>
struct SmallWeights {
  static constexpr bool kPlain = is_same_v<T, Code>, kFourBit = is_same_v<Code, e2m1>, kHalf = Held && !kPlain;
  static_assert(Held || !kFourBit, "mxfp4 beside rows that are held");
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

  // Eight codes of a word as fp16, 2^-14 of each (kFourBitPower): pair j has codes j and j + 4.
  __device__ static void widen_four_bit(uint32_t (&pairs)[4], uint32_t word) {
    // In the upper byte of an fp16 a sign, and where the exponent ends the code's three bits; one mask clears what else is there. Bits are
    // picked by one lop3, and shifts to the left are multiplications: what does them is idle, and lop3 and its like are what is short.
    constexpr uint32_t kSign = 0x80808080u, kCode = 0x8e008e00u;
    const uint32_t odd = merged_bits(word, word >> 3, kSign), even = merged_bits(word << 4, word << 1, kSign);
    pairs[0] = even << 8 & kCode, pairs[1] = odd << 8 & kCode;
    pairs[2] = even & kCode, pairs[3] = odd & kCode;
  }

  // The A fragment of product `i`, from the chunks of the two rows.
  __device__ static void fragment(uint32_t (&a)[4], const uint32_t (&low)[4], const uint32_t (&high)[4], int i) {
    if constexpr (kPlain) {
      a[0] = low[2 * i], a[1] = high[2 * i], a[2] = low[2 * i + 1], a[3] = high[2 * i + 1];
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
    b0 = x[i / 2][i % 2 * 2], b1 = x[i / 2][i % 2 * 2 + 1];
  }
};

}  // namespace kernelgen
