// What kernels use of the toolkit's header of the same name.
#pragma once

#include "emulator.h"

struct __nv_fp8_e4m3 {
  unsigned char __x;
};
struct __nv_fp8_e5m2 {
  unsigned char __x;
};
using __nv_fp8_storage_t = unsigned char;
using __nv_fp8x2_storage_t = unsigned short;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t, __nv_fp8_interpretation_t kind) {
  const int mantissa = kind == __NV_E4M3 ? 3 : 2, bias = kind == __NV_E4M3 ? 7 : 15;
  const float largest = kind == __NV_E4M3 ? 448.0f : 57344.0f;
  const unsigned sign = std::signbit(x) ? 0x80u : 0u;
  const float size = std::min(std::fabs(x), largest);
  if (x != x) return static_cast<__nv_fp8_storage_t>(0x7f);
  int exponent = 0;
  std::frexp(size, &exponent);
  exponent = size == 0.0f ? 1 - bias : std::max(exponent - 1, 1 - bias);
  const float steps = std::nearbyint(std::ldexp(size, mantissa - exponent));  // of the value's binade, to nearest even
  const int code = static_cast<int>(steps) + ((exponent - (1 - bias)) << mantissa);
  return static_cast<__nv_fp8_storage_t>(sign | code);
}
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t saturation, __nv_fp8_interpretation_t kind) {
  return static_cast<__nv_fp8x2_storage_t>(
      __nv_cvt_float_to_fp8(x.x, saturation, kind) | (__nv_cvt_float_to_fp8(x.y, saturation, kind) << 8));
}
