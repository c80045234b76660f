// Arguments of the rope kernels: shared by the C++ and the CUDA body. Included after the integer types of either side.
#pragma once

namespace kernelgen {

// Token t lies at (t / inner, t % inner) of two leading dimensions, each with a stride of its own per tensor.
struct RopeParams {
  const void* q;
  const void* k;
  void* q_out;
  void* k_out;
  const void* positions;
  const void* angles;  // frequencies (rotary_dim / 2) in double, or rows of cosines and sines
  int64_t tokens, inner;
  int64_t q_heads, k_heads, head_dim, rotary_dim;
  int64_t q_outer_stride, q_inner_stride, q_head_stride;
  int64_t k_outer_stride, k_inner_stride, k_head_stride;
  int64_t q_out_outer_stride, q_out_inner_stride, q_out_head_stride;
  int64_t k_out_outer_stride, k_out_inner_stride, k_out_head_stride;
  int64_t position_outer_stride, position_inner_stride;
  int64_t angle_rows, angle_stride;
  int64_t task_tokens;    // C++ body: tokens of a task
  int32_t wide_positions;  // int64 instead of int32
  int32_t in_place;        // q_out is q and k_out is k: what does not rotate stays
};

}  // namespace kernelgen
