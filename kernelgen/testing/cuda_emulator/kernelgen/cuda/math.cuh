#pragma once
#include <kernelgen/cuda/types.cuh>

namespace kernelgen {
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
// `.ftz`: numbers below 2^-126 are 0.
inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
inline float exp2_approx(float x) { return flushed(std::exp2(x)); }
inline float log2_approx(float x) { return std::log2(flushed(x)); }
inline float reciprocal_approx(float x) { return flushed(1.0f / flushed(x)); }
inline float tanh_exp(float x) { return std::fma(-2.0f, reciprocal_approx(1.0f + exp2_approx(2.0f * kLog2E * x)), 1.0f); }
}  // namespace kernelgen
