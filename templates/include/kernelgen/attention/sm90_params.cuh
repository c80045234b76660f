// The argument of attention/prefill_sm90.
#pragma once

#include <kernelgen/sm90/tma.cuh>

namespace kernelgen {

// Maps have (columns, rows, heads, requests); ragged: one request; of packed heads those of queries and results have (columns, heads, rows,
// requests). Strides are in elements. Ragged tensors have no batch stride (0). Pointers of features that are off are null.
//
// Keys that are split (sm90_split.cuh): `out` and `lse` are the partial results. The merge has the same argument, but for its pointers: `q` and
// `k` are the partial results, `out` and `lse` the call's.
struct PrefillSm90Params {
  TensorMap map_q, map_k, map_v, map_out;  // map_out: dense
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;                   // null when not asked for
  const int32_t* cu_seqlens_q;  // (batch + 1), null when dense
  const int32_t* cu_seqlens_k;
  const int32_t* kv_lens;       // (batch), null when every key counts
  int32_t* counter;             // see sm90_tiles.cuh
  const float* sinks;           // (heads)
  const float* alibi_slopes;
  const uint8_t* mask;          // see MaskForm
  const int64_t* mask_indptr;   // (batch + 1): first byte or bit of each request's mask
  const int64_t* variant_words;
  int64_t k_batch, k_row, k_head;
  int64_t out_batch, out_row, out_head;
  int64_t lse_batch, lse_row, lse_head;
  int64_t alibi_batch, alibi_head;
  int64_t mask_batch, mask_row, mask_head, mask_key;
  int32_t seq_q, seq_k;  // dense lengths; ragged requests read theirs from cu_seqlens
  int32_t batch;
  int32_t group_size;  // query heads per key/value head
  int32_t num_q_heads;
  int32_t row_tiles;   // of a dense request; times the splits of each
  int32_t tiles;       // in all (dense)
  int32_t section;     // heads whose tiles are dealt out together, so that their keys and values stay in L2 (dense)
  int32_t window_left, window_right;
  uint32_t q_keep, q_flip;  // see PrefillMmaParams
  float logit_scale, cap_scale;
  int32_t splits;  // of each row tile's keys
};

}  // namespace kernelgen
