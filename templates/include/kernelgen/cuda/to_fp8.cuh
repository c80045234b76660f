// float to fp8 as the contract has it: to nearest even, saturated at the largest finite code, NaN kept.
//
// The toolkit's header does this by an instruction from sm_89 on. Before, it goes through float64 and 64-bit integers, some 50
// operations where these need 12.
#pragma once

#include <cuda_fp8.h>

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

template <class Code>
constexpr bool kIsE4M3 = is_same_v<Code, __nv_fp8_e4m3>;

template <class Code>
__device__ inline uint8_t fp8_bits(float x) {
  constexpr int kMantissa = kIsE4M3<Code> ? 3 : 2, kBias = kIsE4M3<Code> ? 7 : 15, kDropped = 23 - kMantissa;
  constexpr uint32_t kLargest = kIsE4M3<Code> ? 0x43e00000u : 0x47600000u;         // 448, 57344
  constexpr uint32_t kLeastNormal = static_cast<uint32_t>(127 + 1 - kBias) << 23;  // 2^(1 - bias)
  constexpr uint32_t kMagic = kLeastNormal + (kDropped << 23);                     // the float whose ulp is a subnormal step
  const uint32_t word = __float_as_uint(x), magnitude = word & 0x7fffffffu, size = min(magnitude, kLargest);
  const uint32_t odd = size >> kDropped & 1u;
  const uint32_t normal = ((size + (1u << (kDropped - 1)) - 1u + odd) >> kDropped) - (static_cast<uint32_t>(127 - kBias) << kMantissa);
  const uint32_t subnormal = __float_as_uint(__uint_as_float(size) + __uint_as_float(kMagic)) - kMagic;
  const uint32_t code = size < kLeastNormal ? subnormal : normal;
  return static_cast<uint8_t>((word >> 24 & 0x80u) | (magnitude > 0x7f800000u ? 0x7fu : code));
}

// Two neighbouring codes, the first in the low byte.
template <class Code>
__device__ inline uint32_t fp8_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, kIsE4M3<Code> ? __NV_E4M3 : __NV_E5M2);
#else
  return fp8_bits<Code>(first) | static_cast<uint32_t>(fp8_bits<Code>(second)) << 8;
#endif
}

}  // namespace kernelgen
