// The argument of the planned kernels, and what the plan's arrays hold (docs/design/attention_inference.md).
#pragma once

#include <kernelgen/attention/chunk.cuh>

namespace kernelgen {

enum class PageKind { contiguous, pow2, any };

// Strides are in elements. Pointers of features that are off are null.
struct PagedMmaParams {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;
  const int32_t* q_indptr;
  const int32_t* kv_lens;
  const int32_t* page_begin;
  const int32_t* item_indptr;
  const int32_t* chunk;
  float* partial_out;
  float* partial_lse;
  const int32_t* page_indices;
  const void* q_rope;
  const void* k_rope;
  const float* sinks;
  const float* alibi_slopes;
  const uint8_t* mask;
  const int64_t* mask_indptr;
  const int64_t* variant_words;
  const float* q_scale;
  const float* k_scale;  // by request, or by page where kPageScales
  const float* v_scale;
  int64_t q_row, q_head, q_rope_row, q_rope_head;
  int64_t k_page, k_row, k_head;
  int64_t v_page, v_row, v_head;
  int64_t k_rope_page, k_rope_row;
  int64_t out_row, out_head;
  int64_t lse_row, lse_head;
  int64_t alibi_batch, alibi_head;
  int64_t q_scale_batch, q_scale_head, k_scale_batch, k_scale_head, v_scale_batch, v_scale_head;
  int32_t batch, num_q_heads, num_kv_heads, group_size;
  int32_t q_rows;  // of q and out: an update may plan more than a captured run has
  int32_t page_size, page_shift;
  int32_t window_left, window_right;
  uint32_t q_keep, q_flip;
  float logit_scale, cap_scale, v_factor;
  float k_factor;  // of latent keys beside a plain rope part
};

}  // namespace kernelgen
