// Packed rows: the query heads that share a key/value head are rows of one block. Row r of a request is query
// r / group_size of head kv_head * group_size + r % group_size; a block has kBlockQ of them, and a chunk of the keys.
#pragma once

#include <kernelgen/attention/mma_shape.cuh>

namespace kernelgen {

// What a block works on; layouts add where its rows and keys lie.
struct PackedWork {
  int warp;  // of this thread within its group
  int request, kv_head_, value_column;
  int item;            // among all requests
  int first_row;       // packed, of this block
  int num_packed;      // packed rows of the request that are in q
  int seq_q, seq_k;    // queries of the request, keys in use
  int q_start;         // rows in front of the request
  Interval chunk;      // of keys
  bool split;          // the request has more than one chunk
};

template <class Shape, class P>
struct PackedRows {
  using Params = P;
  static constexpr int kBlockQ = Shape::kBlockQ;
  static constexpr int kBlockK = Shape::kBlockK;
  static constexpr bool kPartials = true;

  __device__ static int query(const Params& p, const PackedWork& work, int row) { return (work.first_row + row) / p.group_size; }
  __device__ static int last_query(const Params& p, const PackedWork& work, int end) {
    return (min(work.first_row + end, work.num_packed) - 1) / p.group_size;
  }
  __device__ static int head(const Params& p, const PackedWork& work, int row) {
    return work.kv_head_ * p.group_size + (work.first_row + row) % p.group_size;
  }
  __device__ static int kv_head(const Params&, const PackedWork& work) { return work.kv_head_; }
  __device__ static bool row_exists(const PackedWork& work, int row) { return work.first_row + row < work.num_packed; }
  __device__ static bool is_partial(const PackedWork& work) { return work.split; }
  __device__ static int64_t partial_slot(const Params& p, const PackedWork& work, int row) {
    return (int64_t{work.item} * p.num_kv_heads + work.kv_head_) * kBlockQ + row;
  }

  // Keys of the chunk that the query may attend to by position.
  __device__ static Interval visible_keys(const Params& p, const PackedWork& work, int query) {
    const int position = query + work.seq_k - work.seq_q;
    Interval keys = work.chunk;
    if constexpr (Shape::kBoundedLeft) keys.first = max(keys.first, position - p.window_left);
    if constexpr (Shape::kBoundedRight) keys.last = min(keys.last, position + p.window_right + 1);
    return keys;
  }

  // This block's part of the grid, which is items x (key/value heads x value splits) in one dimension with the heads fastest:
  // the heads of one token lie beside each other in memory, and are read at the same time.
  __device__ static void take_part(const Params& p, PackedWork& work) {
    work.warp = Shape::kKeyWarps > 1 ? 0 : warp_id();
    const int parts = p.num_kv_heads * Shape::kValueSplits, part_of_item = blockIdx.x % parts;
    work.item = blockIdx.x / parts;
    work.kv_head_ = part_of_item / Shape::kValueSplits;
    work.value_column = part_of_item % Shape::kValueSplits * Shape::kSplitColumns;
  }

  // The split-th of `splits` chunks of the keys [first, seq_k).
  __device__ static void take_chunk(PackedWork& work, int first, int chunk, int split, int splits) {
    work.split = splits > 1;
    work.chunk.first = first + split * chunk;
    work.chunk.last = min(work.seq_k - work.chunk.first, chunk) + work.chunk.first;  // never past seq_k, never overflows
  }
};

}  // namespace kernelgen
