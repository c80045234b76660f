// The argument of both kernels of moe/small_cuda.
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

struct MoeSmallParams {
  const void* x;         // (tokens, width)
  const char* w13;       // (experts, wide, width) elements or codes, K contiguous
  const char* w2;        // (experts, width, inner)
  const void* scale13;   // float32, or null
  const void* scale2;
  const void* bias13;    // (experts, wide) or null
  const void* bias2;     // (experts, width) or null
  const void* weights;   // (tokens, k)
  const void* ids;       // (tokens, k)
  const int32_t* expert_map;  // (mapped) or null
  void* hidden;          // (tokens * k, inner): what the activation gives, of each slot
  void* out;             // (tokens, width)
  int64_t x_row, out_row, weights_row, ids_row, bias13_expert, bias2_expert;  // elements
  int64_t w13_expert, w13_row, w2_expert, w2_row;                             // bytes
  int64_t scale13_expert, scale13_row, scale13_block, scale2_expert, scale2_row, scale2_block;  // elements; 0: one for all
  int64_t first;         // of a range of local ids
  int32_t tokens, k, experts, width, inner, mapped;
  int32_t down_passes;   // over K, where hidden rows are held
  float alpha, limit;
};

}  // namespace kernelgen
