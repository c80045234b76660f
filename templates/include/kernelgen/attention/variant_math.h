// What the text of a traced variant calls (kernelgen/variants/emit.py): loads of extra tensors, scalars, and the rules of
// torch and Python for division, remainders, NaN and overflow where those of C++ differ. Plain C on both sides: no vector
// unit, no toolkit header.
#pragma once

#include "kernelgen/attention/variant.h"

#ifdef __CUDACC_RTC__
#include <kernelgen/cuda/math.cuh>
#else
#include <cmath>
#include <cstring>
#endif

namespace kernelgen {
namespace variant_math {

#ifdef __CUDACC_RTC__
KERNELGEN_DEVICE float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }
KERNELGEN_DEVICE double double_of_bits(int64_t bits) { return __longlong_as_double(bits); }
// An extra tensor does not change while a kernel runs, so its loads may go through the read-only path.
template <class T>
KERNELGEN_DEVICE T fetch(int64_t address, int64_t offset) {
  return __ldg(reinterpret_cast<const T*>(address) + offset);
}
#else
KERNELGEN_DEVICE float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
KERNELGEN_DEVICE double double_of_bits(int64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T>
KERNELGEN_DEVICE T fetch(int64_t address, int64_t offset) {
  return *(reinterpret_cast<const T*>(address) + offset);
}
#endif

template <class T>
KERNELGEN_DEVICE T infinity() {
  return static_cast<T>(float_of_bits(0x7f800000u));
}
template <class T>
KERNELGEN_DEVICE T nan() {
  return static_cast<T>(float_of_bits(0x7fc00000u));
}

// ---- Elements of extra tensors -------------------------------------------------------------------------------------

KERNELGEN_DEVICE float load_fp32(int64_t address, int64_t offset) { return fetch<float>(address, offset); }
KERNELGEN_DEVICE double load_fp64(int64_t address, int64_t offset) { return fetch<double>(address, offset); }
KERNELGEN_DEVICE float load_bf16(int64_t address, int64_t offset) {
  return float_of_bits(static_cast<uint32_t>(fetch<unsigned short>(address, offset)) << 16);
}
KERNELGEN_DEVICE float load_fp16(int64_t address, int64_t offset) {
  const uint32_t half = fetch<unsigned short>(address, offset);
  const uint32_t exponent = (half >> 10) & 31u, mantissa = half & 0x3ffu, sign = (half & 0x8000u) << 16;
  // Subnormals are counted in units of 2^-24, so that no subnormal float is an input: those may be flushed to zero.
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * (static_cast<float>(mantissa) * 0x1p-24f);
  return float_of_bits(sign | ((exponent == 31 ? 255u : exponent + 112u) << 23) | (mantissa << 13));
}
KERNELGEN_DEVICE int32_t load_int32(int64_t address, int64_t offset) { return fetch<int32_t>(address, offset); }
KERNELGEN_DEVICE int64_t load_int64(int64_t address, int64_t offset) { return fetch<int64_t>(address, offset); }
KERNELGEN_DEVICE int32_t load_uint8(int64_t address, int64_t offset) { return fetch<unsigned char>(address, offset); }
KERNELGEN_DEVICE bool load_bool(int64_t address, int64_t offset) { return fetch<unsigned char>(address, offset) != 0; }

// An index as torch reads it, negative ones from the end. Kernels also evaluate keys and rows that are masked out or lie
// past the end, whose result is dropped: their index is moved to the nearest element instead of leaving the tensor.
KERNELGEN_DEVICE int64_t index_from_start(int64_t i, int64_t size) {
  i = i < size ? i : size - 1;
  return i > 0 ? i : 0;
}
KERNELGEN_DEVICE int64_t index_either_side(int64_t i, int64_t size) { return index_from_start(i < 0 ? i + size : i, size); }

// ---- Integers: floor division and remainders as in Python, wrapping where the range is exceeded -------------------------

KERNELGEN_DEVICE int64_t wrapping_add(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
KERNELGEN_DEVICE int64_t wrapping_sub(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}
KERNELGEN_DEVICE int64_t wrapping_mul(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}
KERNELGEN_DEVICE int64_t wrapping_neg(int64_t a) { return wrapping_sub(0, a); }
KERNELGEN_DEVICE int64_t wrapping_abs(int64_t a) { return a < 0 ? wrapping_neg(a) : a; }

// b > 0.
template <class T>
KERNELGEN_DEVICE T floor_div_positive(T a, T b) {
  return a / b - (a % b < 0 ? 1 : 0);
}
template <class T>
KERNELGEN_DEVICE T floor_mod_positive(T a, T b) {
  const T rest = a % b;
  return rest < 0 ? rest + b : rest;
}
// A divisor of 0 gives 0, where torch raises; -1 is apart because the smallest integer has no counterpart.
template <class T>
KERNELGEN_DEVICE T floor_div(T a, T b) {
  if (b == 0) return 0;
  if (b == -1) return static_cast<T>(wrapping_neg(a));
  return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}
template <class T>
KERNELGEN_DEVICE T floor_mod(T a, T b) {
  if (b == 0 || b == -1) return 0;
  const T rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
// The remainder with the sign of a.
template <class T>
KERNELGEN_DEVICE T truncated_mod(T a, T b) {
  return b == 0 || b == -1 ? 0 : a % b;
}

KERNELGEN_DEVICE int64_t shift_left(int64_t a, int64_t count) {
  return count < 0 || count > 63 ? 0 : static_cast<int64_t>(static_cast<uint64_t>(a) << count);
}
KERNELGEN_DEVICE int64_t shift_right(int64_t a, int64_t count) { return a >> (count < 0 || count > 63 ? 63 : count); }

KERNELGEN_DEVICE int64_t integer_power(int64_t base, int64_t exponent) {
  if (exponent < 0) return base == 1 ? 1 : base == -1 ? (exponent & 1 ? -1 : 1) : 0;
  int64_t result = 1;
  for (; exponent; exponent >>= 1, base = wrapping_mul(base, base))
    if (exponent & 1) result = wrapping_mul(result, base);
  return result;
}

// A float beyond the range of an integer has no defined conversion in C++: these saturate, and NaN gives 0.
template <class T>
KERNELGEN_DEVICE int32_t to_int32(T x) {
  if (x != x) return 0;
  if (x >= static_cast<T>(2147483648.0)) return 2147483647;
  if (x <= static_cast<T>(-2147483648.0)) return -2147483647 - 1;
  return static_cast<int32_t>(x);
}
template <class T>
KERNELGEN_DEVICE int64_t to_int64(T x) {
  if (x != x) return 0;
  if (x >= static_cast<T>(9223372036854775808.0)) return 9223372036854775807ll;
  if (x <= static_cast<T>(-9223372036854775808.0)) return -9223372036854775807ll - 1;
  return static_cast<int64_t>(x);
}

// ---- Floating point ------------------------------------------------------------------------------------------------

// NaN in either argument gives NaN, as torch.minimum and torch.maximum have it; fminf would drop it.
template <class T>
KERNELGEN_DEVICE T minimum(T a, T b) {
  return a != a ? a : (b < a || b != b) ? b : a;
}
template <class T>
KERNELGEN_DEVICE T maximum(T a, T b) {
  return a != a ? a : (a < b || b != b) ? b : a;
}
template <class T>
KERNELGEN_DEVICE T integer_abs(T a) {
  return a < 0 ? -a : a;
}
template <class T>
KERNELGEN_DEVICE T sign(T x) {
  return static_cast<T>((x > 0) - (x < 0));
}

template <class T>
KERNELGEN_DEVICE bool isnan(T x) {
  return x != x;
}
template <class T>
KERNELGEN_DEVICE bool isinf(T x) {
  return x == infinity<T>() || x == -infinity<T>();
}
template <class T>
KERNELGEN_DEVICE bool isfinite(T x) {
  return x - x == 0;
}

#define KERNELGEN_UNARY(name, single, twofold)                       \
  KERNELGEN_DEVICE float name(float x) { return single(x); }         \
  KERNELGEN_DEVICE double name(double x) { return twofold(x); }
#define KERNELGEN_BINARY(name, single, twofold)                                  \
  KERNELGEN_DEVICE float name(float a, float b) { return single(a, b); }         \
  KERNELGEN_DEVICE double name(double a, double b) { return twofold(a, b); }

KERNELGEN_UNARY(absolute, ::fabsf, ::fabs)
KERNELGEN_UNARY(floor, ::floorf, ::floor)
KERNELGEN_UNARY(ceil, ::ceilf, ::ceil)
KERNELGEN_UNARY(trunc, ::truncf, ::trunc)
KERNELGEN_UNARY(round, ::rintf, ::rint)  // half to even
KERNELGEN_UNARY(sqrt, ::sqrtf, ::sqrt)
KERNELGEN_UNARY(exp, ::expf, ::exp)
KERNELGEN_UNARY(exp2, ::exp2f, ::exp2)
KERNELGEN_UNARY(expm1, ::expm1f, ::expm1)
KERNELGEN_UNARY(log, ::logf, ::log)
KERNELGEN_UNARY(log2, ::log2f, ::log2)
KERNELGEN_UNARY(log10, ::log10f, ::log10)
KERNELGEN_UNARY(log1p, ::log1pf, ::log1p)
KERNELGEN_UNARY(sin, ::sinf, ::sin)
KERNELGEN_UNARY(cos, ::cosf, ::cos)
KERNELGEN_UNARY(tan, ::tanf, ::tan)
KERNELGEN_UNARY(atan, ::atanf, ::atan)
KERNELGEN_UNARY(sinh, ::sinhf, ::sinh)
KERNELGEN_UNARY(cosh, ::coshf, ::cosh)
KERNELGEN_UNARY(tanh, ::tanhf, ::tanh)
KERNELGEN_UNARY(erf, ::erff, ::erf)
KERNELGEN_BINARY(power, ::powf, ::pow)
KERNELGEN_BINARY(truncated_mod_real, ::fmodf, ::fmod)
KERNELGEN_BINARY(arctan2, ::atan2f, ::atan2)

#undef KERNELGEN_UNARY
#undef KERNELGEN_BINARY

template <class T>
KERNELGEN_DEVICE T rsqrt(T x) {
  return static_cast<T>(1) / sqrt(x);
}
// 1 / x for x >= 1. On a GPU within a unit in the last place, without the branch that IEEE's quotient has.
KERNELGEN_DEVICE double reciprocal(double x) { return 1 / x; }
#ifdef __CUDACC_RTC__
KERNELGEN_DEVICE float reciprocal(float x) { return reciprocal_approx(x); }
#else
KERNELGEN_DEVICE float reciprocal(float x) { return 1 / x; }
#endif
// Nothing cancels; where the exponential overflows, the sigmoid is below the smallest normal number: 0.
template <class T>
KERNELGEN_DEVICE T sigmoid(T x) {
  return reciprocal(static_cast<T>(1) + exp(-x));
}
// log(1 + e^x); beyond 20 the argument itself, as in torch.
template <class T>
KERNELGEN_DEVICE T softplus(T x) {
  return x > 20 ? x : maximum(x, static_cast<T>(0)) + log1p(exp(-absolute(x)));
}

// The remainder with the sign of b, and the quotient that belongs to it.
template <class T>
KERNELGEN_DEVICE T floor_mod_real(T a, T b) {
  const T rest = truncated_mod_real(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
template <class T>
KERNELGEN_DEVICE T floor_div_real(T a, T b) {
  if (b == 0) return a / b;
  const T rest = truncated_mod_real(a, b);
  T quotient = (a - rest) / b;  // integral up to rounding
  if (rest != 0 && (rest < 0) != (b < 0)) quotient -= 1;
  if (quotient == 0) return a / b < 0 ? -static_cast<T>(0) : static_cast<T>(0);
  const T down = floor(quotient);
  return quotient - down > static_cast<T>(0.5) ? down + 1 : down;
}

}  // namespace variant_math
}  // namespace kernelgen
