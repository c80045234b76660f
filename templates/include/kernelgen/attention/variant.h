// What a variant's functions see of one logit. Host and device code share this file.
#pragma once

#ifdef __CUDACC_RTC__
#include "kernelgen/cuda/types.cuh"
#define KERNELGEN_DEVICE __device__ __forceinline__
#else
#include <cstdint>
#define KERNELGEN_DEVICE inline
#endif

namespace kernelgen {

struct VariantContext {
  int32_t batch, head, kv_head, q_index, q_pos, k_pos, q_len, kv_len;
};

}  // namespace kernelgen
