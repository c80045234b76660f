// Plans of paged attention whose lengths are on the host: kernelgen/launch/plan.py calls these with the addresses of int32 arrays.
//
// What is cut and why: docs/design/attention_inference.md. kernels/attention/schedule.py has the same formulas for machines
// without the launcher; a test holds both against each other.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kernelgen {

// Most lengths of most batches fit one block or chunk; a division costs as much as all else that is done for a request.
inline int64_t ceil_div(int64_t value, int64_t unit) {
  return value <= unit ? (value > 0 ? 1 : 0) : (value + unit - 1) / unit;
}

// Lengths of a batch: query rows by their starts (batch + 1), keys in one of the two forms of a page table.
struct BatchLengths {
  const int32_t* starts;
  const int32_t* kv_indptr;      // (batch + 1) and last_page_len (batch), or null and
  const int32_t* last_page_len;
  const int32_t* seq_lens;       // (batch)
  int64_t batch, page_size;

  int64_t q_len(int64_t b) const { return int64_t{starts[b + 1]} - starts[b]; }

  int64_t kv_len(int64_t b) const {
    if (kv_indptr == nullptr) return seq_lens[b];
    const int64_t pages = int64_t{kv_indptr[b + 1]} - kv_indptr[b];
    return pages > 0 ? (pages - 1) * page_size + last_page_len[b] : 0;
  }
};

struct BatchSizes {
  int64_t rows, max_q;     // query rows of all requests, of one
  int64_t longest, keys;   // keys of one request, of all
};

inline BatchSizes sizes_of(const BatchLengths& lengths) {
  BatchSizes sizes{lengths.starts[lengths.batch], 0, 0, 0};
  for (int64_t b = 0; b < lengths.batch; ++b) {
    sizes.max_q = std::max(sizes.max_q, lengths.q_len(b));
    sizes.longest = std::max(sizes.longest, lengths.kv_len(b));
    sizes.keys += lengths.kv_len(b);
  }
  return sizes;
}

struct Division {
  int64_t group_size, block_rows, slots, min_chunk, fixed_chunk;

  int64_t tiles(int64_t q_len) const { return ceil_div(q_len * group_size, block_rows); }
};

inline int64_t round_to_chunk_unit(int64_t keys) {
  constexpr int64_t kChunkUnit = 64;
  return ceil_div(keys, kChunkUnit) * kChunkUnit;
}

inline int64_t chunk_of(const BatchLengths& lengths, const Division& division) {
  if (division.fixed_chunk > 0) return division.fixed_chunk;
  int64_t tiles = 0, work = 0, longest = 1;
  for (int64_t b = 0; b < lengths.batch; ++b) {
    const int64_t own = division.tiles(lengths.q_len(b)), keys = lengths.kv_len(b);
    tiles += own;
    work += own * keys;
    longest = std::max(longest, keys);
  }
  const int64_t whole = round_to_chunk_unit(longest);
  if (tiles >= division.slots) return whole;  // enough items without any split
  const int64_t share = ceil_div(work, division.slots);
  return std::min(whole, std::max(round_to_chunk_unit(share), division.min_chunk));
}

struct Items {
  int64_t count;
  bool split;  // a request has more than one chunk
};

// Fills the int32 arrays of a plan for `size` requests, those past the batch empty: q_indptr (size + 1), kv_lens (size),
// page_begin (size), item_indptr (size + 1), chunk (1). `table_width`: pages in a row of a block table.
inline Items cut_batch(const BatchLengths& lengths, const Division& division, int64_t size, int64_t table_width, int32_t* arrays) {
  int32_t* const q_indptr = arrays;
  int32_t* const kv_lens = q_indptr + size + 1;
  int32_t* const page_begin = kv_lens + size;
  int32_t* const item_indptr = page_begin + size;
  const int64_t chunk = chunk_of(lengths, division);
  Items items{0, false};
  q_indptr[0] = item_indptr[0] = 0;
  for (int64_t b = 0; b < size; ++b) {
    const bool empty = b >= lengths.batch;
    const int64_t keys = empty ? 0 : lengths.kv_len(b);
    const int64_t splits = std::max(ceil_div(keys, chunk), int64_t{1});
    items.count += empty ? 0 : division.tiles(lengths.q_len(b)) * splits;
    items.split |= splits > 1;
    q_indptr[b + 1] = empty ? q_indptr[b] : lengths.starts[b + 1];
    kv_lens[b] = static_cast<int32_t>(keys);
    page_begin[b] = empty ? 0 : lengths.kv_indptr != nullptr ? lengths.kv_indptr[b] : static_cast<int32_t>(b * table_width);
    item_indptr[b + 1] = static_cast<int32_t>(items.count);
  }
  item_indptr[size + 1] = static_cast<int32_t>(chunk);
  return items;
}

inline bool all_within(const int32_t* values, int64_t count, int64_t low, int64_t high) {
  bool within = true;
  for (int64_t i = 0; i < count; ++i) within &= values[i] >= low && values[i] <= high;
  return within;
}

// Cumulative lengths: 0 first, never falling, ending at most at `total`.
inline bool starts_fit(const int32_t* starts, int64_t count, int64_t total) {
  bool rising = true;
  for (int64_t i = 1; i < count; ++i) rising &= starts[i] >= starts[i - 1];
  return rising && count > 0 && starts[0] == 0 && starts[count - 1] <= total;
}

// The last pages of requests that have pages hold 1 to page_size tokens.
inline bool csr_fits(const int32_t* kv_indptr, const int32_t* last_page_len, int64_t batch, int64_t num_indices, int64_t page_size) {
  bool within = starts_fit(kv_indptr, batch + 1, num_indices);
  for (int64_t b = 0; b < batch; ++b)
    within &= kv_indptr[b + 1] == kv_indptr[b] || (last_page_len[b] >= 1 && last_page_len[b] <= page_size);
  return within;
}

// Starts (count + 1) of lengths; false where one is negative or the sum exceeds an int32.
inline bool accumulate_lengths(const int32_t* lengths, int64_t count, int32_t* starts) {
  int64_t sum = 0;
  bool fits = true;
  starts[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    fits &= lengths[i] >= 0;
    sum += lengths[i];
    starts[i + 1] = static_cast<int32_t>(sum);
  }
  return fits && sum <= INT32_MAX;
}

}  // namespace kernelgen
