// The scale of fp8 codes: what is the largest magnitude becomes the largest code.
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

// Magnitudes are compared as integers, which orders floats and puts NaN above infinity: a NaN reaches the scale.
__device__ inline uint32_t larger_magnitude(uint32_t amax, float x) { return max(amax, __float_as_uint(x) & 0x7fffffffu); }

// 1 for zeros; at least the smallest normal float, so that its reciprocal is finite. NaN stays.
__device__ inline float fp8_scale(uint32_t amax, float largest_code) {
  const float scale = __uint_as_float(amax) / largest_code;
  return amax == 0 ? 1.0f : scale < 1.17549435e-38f ? 1.17549435e-38f : scale;
}

// Division of many floats by one, a tenth of a true division's instructions each: the product with the rounded reciprocal, and what is
// missing of the dividend divided once more, give the rounded quotient (Markstein 1990). By infinity, whose reciprocal is 0, they
// would make NaN of finite dividends: there nothing is corrected. What is missing of -0 is +0, so that the sign is set.
struct Divisor {
  float reciprocal, negative;

  __device__ explicit Divisor(float x) : reciprocal(1.0f / x), negative(x == infinity() ? 0.0f : -x) {}
  __device__ float divide(float x) const {
    const float quotient = x * reciprocal;
    return copysignf(fmaf(fmaf(quotient, negative, x), reciprocal, quotient), x);
  }
};

}  // namespace kernelgen
