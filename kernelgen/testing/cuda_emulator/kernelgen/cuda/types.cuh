#pragma once
#include "emulator.h"

namespace kernelgen {
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};
constexpr int kWarpSize = 32;

template <class A, class B>
struct is_same {
  static constexpr bool value = false;
};
template <class A>
struct is_same<A, A> {
  static constexpr bool value = true;
};
template <class A, class B>
constexpr bool is_same_v = is_same<A, B>::value;
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
template <class T>
constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}
inline float infinity() { return __int_as_float(0x7f800000); }
}  // namespace kernelgen

using __nv_bfloat16 = kernelgen::bf16;
using __half = kernelgen::fp16;
