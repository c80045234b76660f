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

// tanh(x): relative error 2^-22. From 0.7 up as 1 - 2 / (1 + e^2x), whose absolute error of 2e-7 would be a relative one of
// any size near 0; below as x + x^3 p(x^2), p fitted at Chebyshev nodes. A soft-cap of 20 multiplies the error of a small
// tanh by 20: without the polynomial an LSE was off by up to 2.1 x what torch's tanh gives. tanh.approx.f32 is one
// instruction but has a relative error of 2^-11, which a soft-cap of 50 would turn into a logit error of 0.02.
__device__ inline float tanh_exp(float x) {
  const float large = fmaf(-2.0f, reciprocal_approx(1.0f + exp2_approx(2.0f * kLog2E * x)), 1.0f);
  const float z = x * x;
  float p = fmaf(-0.00558926947f, z, 0.0206071523f);
  p = fmaf(p, z, -0.0537587791f);
  p = fmaf(p, z, 0.133320902f);
  p = fmaf(p, z, -0.333333214f);
  return fabsf(x) < 0.7f ? fmaf(x * z, p, x) : large;
}

}  // namespace kernelgen
