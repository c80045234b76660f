// 16-bit floating-point storage types and the type each element type accumulates in.
//
// Storage only: arithmetic happens in float (double for double). Conversions to 16 bits round to nearest, ties to
// even, overflow to infinity, and keep a NaN a NaN.
#pragma once

// GCC 12 reports the deliberately undefined registers inside its own intrinsics as uninitialised.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>
#include <cstring>

namespace kernelgen {

struct bf16 {
  uint16_t bits;
};

struct fp16 {
  uint16_t bits;
};

// The type that sums and products of T are kept in.
template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

inline float widen(bf16 x) {
  const uint32_t word = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}
inline float widen(fp16 x) { return _cvtsh_ss(x.bits); }
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }

// narrow<T>(x): x in its accumulator type, rounded to T.
template <class T>
inline T narrow(Accumulator<T> x) {
  return x;
}
template <>
inline bf16 narrow<bf16>(float x) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  // Rounding may carry out of a NaN's mantissa into infinity or zero, so NaNs are truncated and made quiet instead.
  if ((word & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((word >> 16) | 0x40u)};
  return {static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16)};
}
template <>
inline fp16 narrow<fp16>(float x) {
  return {static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
}

}  // namespace kernelgen
