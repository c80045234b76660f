// The argument of dense and ragged attention whose keys are split over blocks (split_mma.cuh).
#pragma once

#include <kernelgen/attention/chunk.cuh>

namespace kernelgen {

// Strides are in elements. Ragged tensors have no batch stride (0). Pointers of features that are off are null.
struct SplitMmaParams {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;                   // null when not asked for
  const int32_t* cu_seqlens_q;  // (batch + 1), null when dense
  const int32_t* cu_seqlens_k;
  const int32_t* kv_lens;       // (batch), null when every key counts
  float* partial_out;           // [item][key/value head][kBlockQ][Dv], null where no request is split
  float* partial_lse;           // [item][key/value head][kBlockQ]
  const float* sinks;           // (heads)
  const float* alibi_slopes;
  const uint8_t* mask;          // see MaskForm
  const int64_t* mask_indptr;   // (batch + 1): first byte or bit of each request's mask
  const int64_t* variant_words;
  const float* q_scale;         // scales by request and head, null = 1
  const float* k_scale;
  const float* v_scale;
  int64_t q_batch, q_row, q_head;
  int64_t k_batch, k_row, k_head;
  int64_t v_batch, v_row, v_head;
  int64_t out_batch, out_row, out_head;
  int64_t lse_batch, lse_row, lse_head;
  int64_t alibi_batch, alibi_head;
  int64_t mask_batch, mask_row, mask_head, mask_key;
  int64_t q_scale_batch, q_scale_head, k_scale_batch, k_scale_head, v_scale_batch, v_scale_head;
  int32_t seq_q, seq_k;  // dense lengths; ragged: tokens in all
  int32_t batch;
  int32_t group_size;  // query heads per key/value head
  int32_t window_left, window_right;
  uint32_t q_keep, q_flip;
  int32_t num_q_heads, num_kv_heads;
  // The cut, see split_cut.cuh. chunk 0: blocks work it out from slots and min_chunk. splits 0: requests differ in items.
  int32_t chunk, splits, slots, min_chunk;
  float logit_scale, cap_scale, v_factor;
};

}  // namespace kernelgen
