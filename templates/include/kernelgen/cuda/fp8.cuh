// fp8 (e4m3fn, e5m2) to 16-bit floats, exactly: every fp8 value, NaN and inf included, is one of bf16 and of fp16.
//
// Integer work and one multiplication by a power of two, so that it runs on sm_80 as on later chips: an fp8 number whose
// exponent and mantissa are moved to their place in the wider format is off by the difference of the exponent biases.
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

struct e4m3 {
  uint8_t bits;
};
struct e5m2 {
  uint8_t bits;
};

template <class T>
constexpr bool is_fp8_v = is_same_v<T, e4m3> || is_same_v<T, e5m2>;

// The magnitude from which on an fp8 byte is NaN or inf: 0x7f (NaN) of e4m3fn, 0x7c of e5m2.
template <class F>
constexpr uint32_t kFirstSpecial = is_same_v<F, e4m3> ? 0x7fu : 0x7cu;

// 0x80 in each byte of a word that holds NaN or inf, 0 in the other bits.
template <class F>
__device__ inline uint32_t special_bytes(uint32_t word) {
  return ((word & 0x7f7f7f7fu) + (0x80u - kFirstSpecial<F>) * 0x01010101u) & 0x80808080u;
}

// Two finite fp8 values, each in the upper byte of a half of `halves`, as a pair of T.
template <class F, class T>
__device__ inline uint32_t widen_finite(uint32_t halves) {
  if constexpr (is_same_v<F, e5m2> && is_same_v<T, fp16>) {
    return halves;  // the same exponent
  } else {
    // Mantissa bits of F and T end where they do in the byte shifted by this much; then the bias is made up for.
    constexpr int kShift = is_same_v<T, fp16> ? 1 : is_same_v<F, e4m3> ? 4 : 3;
    const uint32_t moved = (halves & 0x80008000u) | ((halves & 0x7f007f00u) >> kShift);
    uint32_t result;
    if constexpr (is_same_v<T, fp16>) {
      asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(moved), "r"(0x5c005c00u));  // 2^8 = 2^(15 - 7)
    } else {
      constexpr uint32_t kScale = is_same_v<F, e4m3> ? 0x7b80u : 0x7780u;  // 2^120 = 2^(127 - 7), 2^112 = 2^(127 - 15)
      // sm_80 has no bf16 multiplication, only the fused one; adding -0 changes nothing.
      asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(moved), "r"(kScale * 0x10001u), "r"(0x80008000u));
    }
    return result;
  }
}

// The same for any two values: special ones get the exponent of NaN and inf, and of e4m3's NaN a mantissa that says NaN.
template <class F, class T>
__device__ inline uint32_t widen(uint32_t halves) {
  if constexpr (is_same_v<F, e5m2> && is_same_v<T, fp16>) {
    return halves;
  } else {
    constexpr int kMantissa = is_same_v<T, fp16> ? 10 : 7;
    constexpr int kKeep = is_same_v<F, e4m3> ? kMantissa - 1 : kMantissa;  // e4m3: the mantissa's highest bit too
    const uint32_t special = special_bytes<F>(halves) & 0x80008000u;
    return widen_finite<F, T>(halves) | (special - (special >> (15 - kKeep)));
  }
}

// Four fp8 values in the order of memory to two pairs of T.
template <class F, class T, bool Finite = false>
__device__ inline void widen_word(uint32_t& low, uint32_t& high, uint32_t word) {
  const uint32_t first = __byte_perm(word, 0, 0x1404), second = __byte_perm(word, 0, 0x3424);
  low = Finite ? widen_finite<F, T>(first) : widen<F, T>(first);
  high = Finite ? widen_finite<F, T>(second) : widen<F, T>(second);
}

#ifdef __CUDA_ARCH__
// Two bytes of `word` whose top bits are set as 0xff00 in the half that the byte goes to, others as 0.
template <int Selector>
__device__ inline uint32_t spread_signs(uint32_t word) {
  uint32_t result;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(word), "n"(Selector));
  return result;
}
#endif

// Four fp8 values of any kind in the order of memory to two pairs of fp16: by the instruction of sm_89 and later, before by
// widen_finite, over whose results a NaN is written.
template <class F>
__device__ inline void widen_word_fp16(uint32_t& low, uint32_t& high, uint32_t word) {
#ifdef __CUDA_ARCH__
  if constexpr (is_same_v<F, e4m3>) {
#if __CUDA_ARCH__ >= 890
    asm("{.reg .b16 first, second;\n mov.b32 {first, second}, %2;\n cvt.rn.f16x2.e4m3x2 %0, first;\n"
        " cvt.rn.f16x2.e4m3x2 %1, second;}"
        : "=r"(low), "=r"(high)
        : "r"(word));
#else
    const uint32_t nan = (word & 0x7f7f7f7fu) + 0x01010101u;  // top bit of its byte
    widen_word<F, fp16, true>(low, high, word);
    low |= spread_signs<0x9484>(nan);
    high |= spread_signs<0xb4a4>(nan);
#endif
    return;
  }
#endif
  widen_word<F, fp16>(low, high, word);
}

}  // namespace kernelgen
