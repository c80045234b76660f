// What a variant's score and mask see of one logit; host and device code share this file. A rendered kernel defines
// `struct VariantFunctions` (kernelgen/variants) with
//
//   static KERNELGEN_DEVICE float score(float score, const VariantContext& c, const int64_t* args);
//   static KERNELGEN_DEVICE bool visible(const VariantContext& c, const int64_t* args);
//
// where `args` is a block of 8-byte words (kernelgen/variants/arguments.py).
#pragma once

#ifdef __CUDACC_RTC__
#include "kernelgen/cuda/types.cuh"
#define KERNELGEN_DEVICE __device__ __forceinline__
#else
#include <cmath>
#include <cstdint>
#define KERNELGEN_DEVICE inline
#endif

namespace kernelgen {

// Positions count keys of the request: a query's is aligned at the bottom right, q_index + kv_len - q_len.
struct VariantContext {
  int32_t batch, head, kv_head;
  int32_t q_index, q_pos, k_pos;
  int32_t q_len, kv_len;
};

}  // namespace kernelgen
