// What the registers of PTX hold. A register is an unsigned whole number of its size; an instruction's types say how its bits are read.
#pragma once

#include <cfenv>
#include <limits>
#include <type_traits>

#include <kernelgen/cuda/conversions.cuh>

#include "cuda_fp8.h"

namespace ptx {
// A 16-bit float: computes in float32, or in float64 where that takes two roundings, and rounds once.
template <class Bits>
struct Half {
  uint16_t bits;
  Half() = default;
  explicit Half(float x) : bits(kernelgen::from_float<Bits>(x).bits) {}
  operator float() const { return kernelgen::to_float(Bits{bits}); }
};
using f16 = Half<kernelgen::fp16>;
using bf16 = Half<kernelgen::bf16>;
template <class H>
struct Pair {
  H lo, hi;
};
using f16x2 = Pair<f16>;
using bf16x2 = Pair<bf16>;
struct Sink {};  // "_" as a destination

inline char last_fault[200];
[[noreturn]] inline void fault(int line, const char* what, uint64_t value = 0) {
  std::snprintf(last_fault, sizeof(last_fault), "line %d of the PTX: %s (%#llx)", line, what, static_cast<unsigned long long>(value));
  std::fprintf(stderr, "ptx_emulator: %s\n", last_fault);
  std::abort();
}

template <class T, class X>
inline T as(X x) {
  if constexpr (std::is_same_v<T, bool>) {
    return x != 0;
  } else if constexpr (sizeof(T) <= sizeof(X)) {
    T to;
    std::memcpy(&to, &x, sizeof(T));
    return to;
  } else {
    return static_cast<T>(x);
  }
}
// A narrower value fills a register: with its sign where it has one.
template <class R, class V>
inline void set(R& to, V value) {
  if constexpr (std::is_same_v<R, bool>) {
    to = value;
  } else if constexpr (std::is_same_v<R, Sink>) {
  } else if constexpr (sizeof(V) >= sizeof(R)) {
    std::memcpy(&to, &value, sizeof(R));
  } else if constexpr (std::is_integral_v<V>) {
    to = static_cast<R>(static_cast<std::make_signed_t<R>>(value));
    if constexpr (std::is_unsigned_v<V>) to = value;
  } else {
    to = 0;
    std::memcpy(&to, &value, sizeof(V));
  }
}

template <class T>
inline T fused(T a, T b, T c) {
  return std::fma(a, b, c);
}
template <class B>
inline Half<B> fused(Half<B> a, Half<B> b, Half<B> c) {
  return Half<B>(static_cast<float>(static_cast<double>(float(a)) * float(b) + float(c)));
}
template <class T>
inline T smaller(T a, T b) {
  if constexpr (std::is_integral_v<T>) return a < b ? a : b;
  if (a != a) return b;
  return b != b ? a : b < a || (b == a && std::signbit(static_cast<float>(b))) ? b : a;
}
template <class T>
inline T larger(T a, T b) {
  if constexpr (std::is_integral_v<T>) return a < b ? b : a;
  if (a != a) return b;
  return b != b ? a : a < b || (b == a && std::signbit(static_cast<float>(a))) ? b : a;
}
// With .NaN: one of the operands that is no number is the result.
template <class T>
inline T smaller_nan(T a, T b) {
  return a != a ? a : b != b ? b : smaller(a, b);
}
template <class T>
inline T larger_nan(T a, T b) {
  return a != a ? a : b != b ? b : larger(a, b);
}
template <class T>
inline T negative(T x) {
  if constexpr (std::is_integral_v<T>) return static_cast<T>(0 - x);
  return static_cast<T>(-x);
}
template <class T>
inline T absolute(T x) {
  if constexpr (std::is_integral_v<T>) return x < 0 ? static_cast<T>(0 - x) : x;
  return static_cast<T>(std::fabs(x));
}
#define PTX_PAIR(name, use)                                                 \
  template <class H>                                                        \
  inline Pair<H> name(Pair<H> a, Pair<H> b) {                               \
    return {static_cast<H>(use(a.lo, b.lo)), static_cast<H>(use(a.hi, b.hi))}; \
  }
template <class H> inline float plus(H a, H b) { return float(a) + float(b); }
template <class H> inline float minus(H a, H b) { return float(a) - float(b); }
template <class H> inline float times(H a, H b) { return float(a) * float(b); }
PTX_PAIR(operator+, plus)
PTX_PAIR(operator-, minus)
PTX_PAIR(operator*, times)
PTX_PAIR(smaller, smaller)
PTX_PAIR(larger, larger)
PTX_PAIR(smaller_nan, smaller_nan)
PTX_PAIR(larger_nan, larger_nan)
#undef PTX_PAIR
template <class H>
inline Pair<H> fused(Pair<H> a, Pair<H> b, Pair<H> c) {
  return {fused(a.lo, b.lo, c.lo), fused(a.hi, b.hi, c.hi)};
}
template <class H>
inline Pair<H> negative(Pair<H> x) {
  return {H(-x.lo), H(-x.hi)};
}
template <class H>
inline Pair<H> absolute(Pair<H> x) {
  return {H(std::fabs(x.lo)), H(std::fabs(x.hi))};
}
template <class H>
inline Pair<H> at_least_zero(Pair<H> x) {
  return {larger(x.lo, H(0.0f)), larger(x.hi, H(0.0f))};
}
template <class T>
inline T at_least_zero(T x) {
  return larger(x, static_cast<T>(0.0f));
}
// What `.ftz` makes of a number below 2^-126.
inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

template <class T>
inline T saturated(T x) {
  return x != x ? static_cast<T>(0) : std::min(std::max(x, static_cast<T>(0)), static_cast<T>(1));
}

// Roundings. none and rn: to nearest even.
enum Rounding { none, rn, rz, rm, rp, rna, rni, rzi, rmi, rpi };
template <int R>
inline double whole(double x) {
  return R == rzi ? std::trunc(x) : R == rmi ? std::floor(x) : R == rpi ? std::ceil(x) : std::nearbyint(x);
}
// To a narrower float, given in float64.
template <class D, int R>
inline D narrowed(double x) {
  D near = static_cast<D>(static_cast<float>(x));
  if constexpr (std::is_same_v<D, float>) near = static_cast<float>(x);
  if constexpr (R == rz || R == rm || R == rp) {
    const double got = static_cast<double>(near);
    const bool over = R == rz ? std::fabs(got) > std::fabs(x) : R == rm ? got > x : got < x;
    if (over) {  // one step back
      using U = std::conditional_t<sizeof(D) == 4, uint32_t, uint16_t>;
      U bits;
      std::memcpy(&bits, &near, sizeof(bits));
      bits = static_cast<U>((std::signbit(static_cast<float>(near)) ? got < x : got > x) ? bits - 1 : bits + 1);
      std::memcpy(&near, &bits, sizeof(bits));
    }
  }
  return near;
}
template <class D>
inline D clamped(double x) {
  if (x != x) return 0;
  if (x <= static_cast<double>(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
  if (x >= static_cast<double>(std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
  return static_cast<D>(x);
}
template <class T>
constexpr bool is_whole = std::is_integral_v<T>;
template <class D, class S, int R, bool kSaturate>
inline D convert(S x) {
  if constexpr (is_whole<D> && is_whole<S>) {
    if constexpr (kSaturate) {
      const __int128 wide = x, low = std::numeric_limits<D>::min(), high = std::numeric_limits<D>::max();
      return static_cast<D>(wide < low ? low : wide > high ? high : wide);
    }
    return static_cast<D>(x);
  } else if constexpr (is_whole<D>) {
    return clamped<D>(whole<R>(static_cast<double>(x)));
  } else {
    D result;
    if constexpr (is_whole<S> && std::is_same_v<D, double>) {
      result = static_cast<double>(x);
    } else if constexpr (is_whole<S> && R <= rn) {
      result = static_cast<D>(static_cast<float>(x));
    } else if constexpr (R >= rni) {
      result = static_cast<D>(whole<R>(static_cast<double>(x)));
    } else if constexpr (std::is_same_v<D, double>) {
      result = static_cast<double>(x);
    } else {
      result = narrowed<D, R>(static_cast<double>(x));
    }
    if constexpr (kSaturate) result = static_cast<D>(saturated(static_cast<float>(result)));
    return result;
  }
}
// Two floats as a pair: the first operand is the upper half.
template <class H, int R, bool kRelu>
inline Pair<H> packed(float hi, float lo) {
  Pair<H> both{narrowed<H, R>(lo), narrowed<H, R>(hi)};
  return kRelu ? at_least_zero(both) : both;
}
inline float tf32(float x) { return as<float>((as<uint32_t>(x) + 0x1000u) & 0xffffe000u); }
inline uint16_t packed_fp8(float hi, float lo, __nv_fp8_interpretation_t kind) {
  return __nv_cvt_float2_to_fp8x2(float2{lo, hi}, __NV_SATFINITE, kind);
}
// Of e4m3 (3 bits of mantissa) and e5m2 (2).
inline float fp8_value(uint8_t code, int mantissa) {
  const int bias = mantissa == 3 ? 7 : 15, exponent = (code & 0x7f) >> mantissa, rest = code & ((1 << mantissa) - 1);
  const int top = (1 << (7 - mantissa)) - 1;
  float size = exponent == 0 ? std::ldexp(static_cast<float>(rest), 1 - bias - mantissa)
                             : std::ldexp(static_cast<float>((1 << mantissa) + rest), exponent - bias - mantissa);
  if (mantissa == 3 && (code & 0x7f) == 0x7f) size = NAN;
  if (mantissa == 2 && exponent == top) size = rest == 0 ? INFINITY : NAN;
  return code & 0x80 ? -size : size;
}
template <class H>
inline Pair<H> unpacked_fp8(uint16_t codes, int mantissa) {
  return {H(fp8_value(codes & 0xff, mantissa)), H(fp8_value(codes >> 8, mantissa))};
}

// Whole numbers.
template <class T>
inline T quotient(T a, T b, int line) {
  if (b == 0) fault(line, "a division by zero");
  return static_cast<T>(a / b);
}
template <class T>
inline T high_product(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return static_cast<T>((static_cast<Wide>(a) * static_cast<Wide>(b)) >> (8 * sizeof(T)));
}
template <class T>
inline T shifted_left(T x, uint32_t by) {
  return by >= 8 * sizeof(T) ? static_cast<T>(0) : static_cast<T>(x << by);
}
template <class T>
inline T shifted_right(T x, uint32_t by) {
  return static_cast<T>(by >= 8 * sizeof(T) ? (x < 0 ? -1 : 0) : x >> by);
}
template <class T>
inline T extracted(T x, uint32_t at, uint32_t bits) {
  using U = std::make_unsigned_t<T>;
  constexpr uint32_t kBits = 8 * sizeof(T);
  at &= 0xff, bits &= 0xff;
  if (bits == 0) return 0;
  const U value = at >= kBits ? 0 : static_cast<U>(x) >> at;
  const bool sign = std::is_signed_v<T> && (static_cast<U>(x) >> std::min(at + bits - 1, kBits - 1) & 1);
  const uint32_t have = std::min(bits, at >= kBits ? 0 : kBits - at);
  const U mask = have >= kBits ? ~static_cast<U>(0) : (static_cast<U>(1) << have) - 1;
  return static_cast<T>(sign ? (value & mask) | ~mask : value & mask);
}
template <class T>
inline T inserted(T x, T into, uint32_t at, uint32_t bits) {
  at &= 0xff, bits &= 0xff;
  if (at >= 8 * sizeof(T) || bits == 0) return into;
  const T mask = static_cast<T>((bits >= 8 * sizeof(T) ? ~static_cast<T>(0) : (static_cast<T>(1) << bits) - 1) << at);
  return static_cast<T>((into & ~mask) | (static_cast<T>(x << at) & mask));
}
inline uint32_t funnel(uint32_t low, uint32_t high, uint32_t by, bool left, bool clamp) {
  by = clamp ? std::min(by, 32u) : by & 31;
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  return static_cast<uint32_t>(left ? (both << by) >> 32 : both >> by);
}
inline uint32_t logic3(uint32_t a, uint32_t b, uint32_t c, int table) {
  uint32_t result = 0;
  for (int i = 0; i < 8; ++i) {
    if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return result;
}
// Bytes by the generic mode; bit 3 of a selector copies the sign.
inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t pick = selector >> (4 * i) & 0xf;
    uint32_t byte = static_cast<uint32_t>(both >> ((pick & 7) * 8)) & 0xff;
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}
template <class T>
inline uint32_t leading_zeros(T x) {
  return x == 0 ? 8 * sizeof(T) : sizeof(T) == 8 ? __builtin_clzll(x) : __builtin_clz(x);
}
template <class T>
inline T reversed(T x) {
  T result = 0;
  for (unsigned i = 0; i < 8 * sizeof(T); ++i) result |= static_cast<T>((x >> i & 1) << (8 * sizeof(T) - 1 - i));
  return result;
}

// A register, or several as one: `mov.b64 {lo, hi}, x`.
template <class X, class... R>
inline void split(X x, R&... to) {
  int at = 0;
  ((set(to, as<std::conditional_t<std::is_same_v<R, Sink>, uint8_t, R>>(static_cast<X>(x >> at))),
    at += 8 * sizeof(X) / sizeof...(R)), ...);
}
template <class X, class... R>
inline X joined(R... from) {
  X all = 0;
  int at = 0;
  ((all |= static_cast<X>(from) << at, at += 8 * sizeof(R)), ...);
  return all;
}
}  // namespace ptx
