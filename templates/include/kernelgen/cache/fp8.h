// float to fp8 as the contract has it: round to nearest even, saturate at the largest finite code, keep NaN.
//
// Written without branches, so that the compiler vectorises the loop over a block.
#pragma once

#include "kernelgen/cpu/vec.h"

namespace kernelgen {

template <int Exponent, int Mantissa>
struct Fp8 {
  uint8_t bits;
};
using Fp8E4M3 = Fp8<4, 3>;
using Fp8E5M2 = Fp8<5, 2>;

template <class T>
constexpr bool kIsFp8 = false;
template <int Exponent, int Mantissa>
constexpr bool kIsFp8<Fp8<Exponent, Mantissa>> = true;

template <class Code>
struct Fp8Encoder;
template <int Exponent, int Mantissa>
struct Fp8Encoder<Fp8<Exponent, Mantissa>> {
  static constexpr int kBias = (1 << (Exponent - 1)) - 1, kDropped = 23 - Mantissa;
  // e4m3 has no infinity: all exponents but one code (mantissa all ones) are numbers.
  static constexpr float kLargest = Exponent == 4 ? 448.0f : 57344.0f;
  static constexpr uint32_t kLeastNormal = uint32_t(127 + 1 - kBias) << 23;       // bits of 2^(1 - bias)
  static constexpr uint32_t kMagic = uint32_t(127 + 1 - kBias + kDropped) << 23;  // the float whose ulp is a subnormal step

  static KERNELGEN_INLINE uint8_t encode(float x) {
    uint32_t word;
    std::memcpy(&word, &x, sizeof word);
    const uint32_t sign = (word >> 24) & 0x80u;
    uint32_t size = word & 0x7fffffffu;
    const bool nan = size > 0x7f800000u;
    uint32_t largest;
    std::memcpy(&largest, &kLargest, sizeof largest);
    size = size < largest ? size : largest;
    const uint32_t odd = (size >> kDropped) & 1u;
    const uint32_t normal = ((size + (1u << (kDropped - 1)) - 1u + odd) >> kDropped) - (uint32_t(127 - kBias) << Mantissa);
    float small, magic;
    std::memcpy(&small, &size, sizeof small);
    std::memcpy(&magic, &kMagic, sizeof magic);
    small += magic;
    uint32_t subnormal;
    std::memcpy(&subnormal, &small, sizeof subnormal);
    const uint32_t code = size < kLeastNormal ? subnormal - kMagic : normal;
    return static_cast<uint8_t>(sign | (nan ? 0x7fu : code));
  }
};

// out[i] = x[i] / scale as codes; x any type that widens to float.
template <class T, class Code>
KERNELGEN_INLINE void quantize_row(const T* x, Code* out, int64_t width, float scale) {
  using V = Simd<float>;
  constexpr int64_t kBlock = 64;
  alignas(64) float block[kBlock];
  const typename V::Reg divisor = V::broadcast(scale);
  for (int64_t c = 0; c < width; c += kBlock) {
    const int64_t n = width - c < kBlock ? width - c : kBlock;
    for (int64_t i = 0; i < n; i += V::kLanes) {
      V::store(block + i, (n - i >= V::kLanes ? V::load(x + c + i) : V::load_first(x + c + i, n - i)) / divisor);
    }
    uint8_t codes[kBlock];
    for (int64_t i = 0; i < kBlock; ++i) codes[i] = Fp8Encoder<Code>::encode(block[i]);
    std::memcpy(out + c, codes, static_cast<size_t>(n));
  }
}

}  // namespace kernelgen
