// Arguments of the merge_states kernels: shared by the C++ and the CUDA body. Included after the integer types.
#pragma once

namespace kernelgen {

struct MergeParams {
  const void* outs;
  const float* lses;
  void* out;
  float* lse;
  int64_t sides, tokens, heads, head_dim;
  int64_t outs_side_stride, outs_token_stride, outs_head_stride;
  int64_t lses_side_stride, lses_token_stride, lses_head_stride;
  int64_t out_token_stride, out_head_stride, lse_token_stride, lse_head_stride;
  int64_t task_rows;  // C++ body: (token, head) rows of a task
};

}  // namespace kernelgen
