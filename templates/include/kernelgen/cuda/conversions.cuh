// float <-> bf16 and fp16, one value or a packed pair. Rounds to nearest even; NaN stays NaN.
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
__device__ inline float to_float(fp16 x) { return __half2float(x); }

template <class T>
__device__ inline T from_float(float x) {
  if constexpr (is_same_v<T, bf16>) {
    return __float2bfloat16_rn(x);
  } else if constexpr (is_same_v<T, fp16>) {
    return __float2half_rn(x);
  } else {
    return x;
  }
}

// Two floats as one 32-bit register of two T, `lo` in the low half: the element order of mma fragments and of memory.
// Volatile, so that it happens where it is written: moved down to its use, it keeps two registers alive instead of one
// (attention/prefill_mma holds its weights over a barrier, and spilled).
template <class T>
__device__ inline uint32_t pack_pair(float lo, float hi) {
  static_assert(is_same_v<T, bf16> || is_same_v<T, fp16>, "pack_pair packs 16-bit floats");
  uint32_t packed;
  if constexpr (is_same_v<T, bf16>) {
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  } else {
    asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  }
  return packed;
}

template <class T>
__device__ inline float2 unpack_pair(uint32_t packed) {
  static_assert(is_same_v<T, bf16> || is_same_v<T, fp16>, "unpack_pair unpacks 16-bit floats");
  if constexpr (is_same_v<T, bf16>) {
    return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
  } else {
    __half2 pair;
    *reinterpret_cast<uint32_t*>(&pair) = packed;
    return __half22float2(pair);
  }
}

// Exponent field of T: all ones means inf or NaN.
template <class T>
constexpr uint32_t kExponentBits = is_same_v<T, bf16> ? 0x7f80u : 0x7c00u;

// 0x8000 in each half of `packed` that holds an inf or NaN, 0 in the other bits.
template <class T>
__device__ inline uint32_t nonfinite_halves(uint32_t packed) {
  constexpr uint32_t kOne = is_same_v<T, bf16> ? 0x0080u : 0x0400u;  // lowest exponent bit: all ones + one carries out
  const uint32_t exponents = packed & (kExponentBits<T> * 0x10001u);
  return (exponents + kOne * 0x10001u) & 0x80008000u;
}

}  // namespace kernelgen
