// Approximate elementary functions with the error they have.
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// 2^x: relative error 2^-22; exp2(-inf) = 0, results below 2^-126 are flushed to 0.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x): absolute error 2^-22; log2(0) = -inf.
__device__ inline float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x: relative error 2^-23.
__device__ inline float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh(x) as 1 - 2 / (1 + e^2x): absolute error 2e-7. tanh.approx.f32 is one instruction but has a relative error of
// 2^-11, which a soft-cap of 50 would turn into a logit error of 0.02.
__device__ inline float tanh_exp(float x) {
  return fmaf(-2.0f, reciprocal_approx(1.0f + exp2_approx(2.0f * kLog2E * x)), 1.0f);
}

}  // namespace kernelgen
