// What appending to a paged cache is given, and where each token goes: shared by the C++ and the CUDA body.
//
// Included after the integer types of either side. Nothing here reads an entry past a request's pages or yields a slot
// outside the cache, whatever the tables hold: an index that leads nowhere makes the token one that is not written.
#pragma once

namespace kernelgen {

// Bits of AppendParams::wide and RopeParams::wide: which index tensors are int64 instead of int32.
constexpr int kWidePositions = 1, kWideRequests = 2, kWideSlots = 4;

struct AppendParams {
  const void* k;
  const void* v;
  void* k_cache;
  void* v_cache;
  const float* k_scale;  // null: k_factor
  const float* v_scale;
  const void* slot_mapping;   // null: the place comes from the page table
  const void* positions;      // null: the last position of the request's length, less `later`
  const void* requests;       // batch_indices; null: token t belongs to request t
  const int32_t* later;       // tokens of the same request behind this one; null: none
  const int32_t* page_indptr;  // CSR tables; null: a row of page_indices per request
  const int32_t* page_indices;
  const int32_t* lengths;      // CSR: tokens of the last page, else tokens of the request
  const void* q;               // the last three: only with rotation
  void* q_out;
  const void* angles;          // frequencies, or rows of cosines and sines
  int64_t tokens, heads, head_dim, head_dim_v;
  int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
  int64_t k_page_stride, k_row_stride, k_cache_head_stride, v_page_stride, v_row_stride, v_cache_head_stride;
  int64_t k_scale_row_stride, k_scale_head_stride, v_scale_row_stride, v_scale_head_stride;
  int64_t num_pages, page_size;
  int64_t batch, table_width;  // CSR: width is the number of page_indices
  int64_t slot_stride, position_stride, request_stride;
  int64_t q_heads, q_token_stride, q_head_stride, q_out_token_stride, q_out_head_stride;
  int64_t rotary_dim, angle_rows, angle_stride;
  int64_t task_tokens;  // C++ body: tokens of a task
  float k_factor, v_factor;
  int32_t wide;
  int32_t k_scale_by_page, v_scale_by_page;  // rows of a scale: pages, else requests
};

// One of the two streams that are written: keys and values, or latents and rotary keys.
struct AppendSide {
  const void* x;
  void* cache;
  const float* scale;
  int64_t width, token_stride, head_stride, page_stride, row_stride, cache_head_stride, scale_row_stride, scale_head_stride;
  float factor;
  bool scale_by_page;
};

inline AppendSide key_side(const AppendParams& p) {
  return {p.k, p.k_cache, p.k_scale, p.head_dim, p.k_token_stride, p.k_head_stride, p.k_page_stride, p.k_row_stride,
          p.k_cache_head_stride, p.k_scale_row_stride, p.k_scale_head_stride, p.k_factor, p.k_scale_by_page != 0};
}
inline AppendSide value_side(const AppendParams& p) {
  return {p.v, p.v_cache, p.v_scale, p.head_dim_v, p.v_token_stride, p.v_head_stride, p.v_page_stride, p.v_row_stride,
          p.v_cache_head_stride, p.v_scale_row_stride, p.v_scale_head_stride, p.v_factor, p.v_scale_by_page != 0};
}

inline int64_t index_at(const void* indices, int64_t i, bool wide) {
  return wide ? static_cast<const int64_t*>(indices)[i] : static_cast<const int32_t*>(indices)[i];
}

// a / b for a >= 0, b > 0. In 32 bits where both fit: a 64-bit division takes a GPU some 100 instructions.
inline int64_t quotient(int64_t a, int64_t b) {
  if (((a | b) >> 31) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

struct Slot {
  int64_t page, row, request;
  bool live;
};

inline int64_t position_of(const AppendParams& p, int64_t token) {
  return index_at(p.positions, token * p.position_stride, p.wide & kWidePositions);
}

inline Slot slot_of(const AppendParams& p, int64_t token) {
  Slot slot{0, 0, 0, false};
  if (p.slot_mapping) {
    const int64_t at = index_at(p.slot_mapping, token * p.slot_stride, p.wide & kWideSlots);
    if (at < 0) return slot;
    slot.page = quotient(at, p.page_size);
    slot.row = at - slot.page * p.page_size;
    slot.live = slot.page < p.num_pages;
    return slot;
  }
  const int64_t request = p.requests ? index_at(p.requests, token * p.request_stride, p.wide & kWideRequests) : token;
  if (request < 0 || request >= p.batch) return slot;
  int64_t begin, pages, length;
  if (p.page_indptr) {
    begin = p.page_indptr[request];
    pages = p.page_indptr[request + 1] - begin;
    if (begin < 0 || pages <= 0 || begin + pages > p.table_width) return slot;
    length = (pages - 1) * p.page_size + p.lengths[request];
  } else {
    begin = request * p.table_width;
    length = p.lengths[request];
    if (length <= 0) return slot;
    pages = quotient(length + p.page_size - 1, p.page_size);
    if (pages > p.table_width) pages = p.table_width;
  }
  const int64_t position = p.positions ? position_of(p, token) : length - 1 - (p.later ? p.later[token] : 0);
  if (position < 0) return slot;
  const int64_t nth = quotient(position, p.page_size);
  if (nth >= pages) return slot;
  slot.page = p.page_indices[begin + nth];
  slot.row = position - nth * p.page_size;
  slot.request = request;
  slot.live = slot.page >= 0 && slot.page < p.num_pages;
  return slot;
}

// Only for a live slot.
inline float scale_of(const AppendSide& side, const Slot& slot, int64_t head) {
  if (!side.scale) return side.factor;
  return side.scale[(side.scale_by_page ? slot.page : slot.request) * side.scale_row_stride + head * side.scale_head_stride];
}
inline int64_t cache_offset(const AppendSide& side, const Slot& slot, int64_t head) {
  return slot.page * side.page_stride + slot.row * side.row_stride + head * side.cache_head_stride;
}

}  // namespace kernelgen
