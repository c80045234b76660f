#pragma once
#include <kernelgen/cuda/types.cuh>

namespace kernelgen {
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
inline float exp2_approx(float x) { return std::exp2(x); }
inline float add_down(float a, float b) {
  const double sum = static_cast<double>(a) + b;
  const float near = static_cast<float>(sum);
  return near > sum ? std::nextafter(near, -std::numeric_limits<float>::infinity()) : near;
}
inline float max_or_nan(float a, float b) { return a != a || b != b ? std::numeric_limits<float>::quiet_NaN() : std::fmax(a, b); }
inline float log2_approx(float x) { return std::log2(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline float tanh_exp(float x) { return std::fma(-2.0f, 1.0f / (1.0f + std::exp2(2.0f * kLog2E * x)), 1.0f); }
}  // namespace kernelgen
