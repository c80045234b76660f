// Conversions of the processor: round to nearest even.
#pragma once
#include <kernelgen/cuda/types.cuh>

namespace kernelgen {
inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(fp16 x) { return static_cast<float>(bits_as<_Float16>(x.bits)); }

template <class T>
inline T from_float(float x) {
  if constexpr (is_same_v<T, float>) {
    return x;
  } else if constexpr (is_same_v<T, bf16>) {
    uint32_t bits = __float_as_uint(x);
    if (x != x) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
  } else {
    return {bits_as<uint16_t>(static_cast<_Float16>(x))};
  }
}
template <class T>
inline uint32_t pack_pair(float lo, float hi) {
  return from_float<T>(lo).bits | (static_cast<uint32_t>(from_float<T>(hi).bits) << 16);
}
template <class T>
inline float2 unpack_pair(uint32_t packed) {
  return make_float2(to_float(T{static_cast<uint16_t>(packed)}), to_float(T{static_cast<uint16_t>(packed >> 16)}));
}
template <class T>
constexpr uint32_t kExponentBits = is_same_v<T, bf16> ? 0x7f80u : 0x7c00u;
template <class T>
inline uint32_t nonfinite_halves(uint32_t packed) {
  constexpr uint32_t kOne = is_same_v<T, bf16> ? 0x0080u : 0x0400u;
  const uint32_t exponents = packed & (kExponentBits<T> * 0x10001u);
  return (exponents + kOne * 0x10001u) & 0x80008000u;
}
}  // namespace kernelgen
