// The one parameter struct of CPU attention, dense, ragged and paged. What a call does not use is 0.
#pragma once

#include <cstdint>

namespace kernelgen {

// Strides in elements. A stride of a dimension that broadcasts, and *_batch of a ragged or paged call, is 0.
struct AttentionCpuParams {
  const void* q;              // [batch][row][head][D]; MLA: D - rope_dim
  const void* k;              // [batch][row][head][D], or pages [page][slot][head][D]
  const void* v;              // the same with Dv
  void* out;                  // [batch][row][head][Dv]
  float* lse;                 // [batch][row][head], natural logarithm
  const int32_t* q_indptr;    // (B + 1) first query row of each request; null: dense
  const int32_t* k_indptr;    // (B + 1) ragged: first key of each request
  const int32_t* kv_lens;     // (B) keys in use
  const float* alibi_slopes;  // [batch][head]
  const float* sinks;         // [head]
  const void* mask;           // bool [batch][head][row][key]; or per request [row][key] as bytes or bits
  const int64_t* mask_indptr; // (B + 1) first byte or bit of each request
  const float* q_scale;       // [batch][head]; null: 1
  const float* k_scale;       // [batch][key head] or [page][key head]; null: 1
  const float* v_scale;
  const int64_t* variant_words;
  // Plans only, but for the partial results.
  const void* q_rope;         // [row][head][rope_dim]
  const void* k_rope;         // pages [page][slot][rope_dim]
  const int32_t* page_begin;  // (B) where a request's pages start in page_indices
  const int32_t* page_indices;
  const int32_t* item_indptr; // (B + 1) first item of each request
  const int32_t* chunk;       // (1) keys per split
  float* partial_out;         // [item][key head][task_rows][Dv]
  float* partial_lse;         // [item][key head][task_rows]

  int64_t q_batch, q_row, q_head;
  int64_t k_batch, k_row, k_head;  // paged: *_batch is the stride of a page
  int64_t v_batch, v_row, v_head;
  int64_t out_batch, out_row, out_head;
  int64_t lse_batch, lse_row, lse_head;
  int64_t mask_batch, mask_head, mask_row, mask_key;
  int64_t alibi_batch, alibi_head, sink_head;
  int64_t q_scale_batch, q_scale_head, k_scale_batch, k_scale_head, v_scale_batch, v_scale_head;  // paged: _batch of a page
  int64_t q_rope_row, q_rope_head, k_rope_page, k_rope_row;
  int64_t batch, seq_q, seq_k;  // ragged: total tokens; paged: seq_q rows of q
  int64_t num_kv_heads, group_size;
  int64_t task_rows;            // a multiple of kWidth
  int64_t page_size, page_shift;
  int64_t split_chunk, splits, slots, min_chunk;  // dense and ragged calls whose keys are split: see split_cpu.h
  int64_t window_left, window_right;
  double scale, soft_cap;
  double v_factor;              // of the output
  double k_factor;              // of the latent part of keys, where the rope part has no scale
};

}  // namespace kernelgen
