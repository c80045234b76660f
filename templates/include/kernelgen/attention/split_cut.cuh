// How a dense or ragged call is cut into items: a tile of kBlockQ packed rows against one chunk of a request's keys.
//
//   tiles_b  = ceil(q_len_b * group_size / kBlockQ)
//   splits_b = max(1, ceil(keys_b / chunk))       keys_b: those in sight of any of the request's rows
//   item     = first_item_b + tile * stride_b + split
//
// The formulas are those of a plan (kernels/attention/schedule.py), but nothing is planned: with lengths that the host knows
// the cut is a few numbers among the arguments, and else every warp works it out from the lengths. That is a pass over few
// of them, since only calls of few requests are split, and saves a kernel in front of each call and arrays that a captured
// graph would have to keep alive.
//
//   requests alike (p.splits > 0)  stride_b = p.splits, chunk = p.chunk: items past a shorter request's chunks do nothing
//   else                           stride_b = splits_b, first_item_b by a prefix sum; chunk = p.chunk, or if that is 0 such
//                                  that about p.slots items result
#pragma once

#include <kernelgen/attention/split_params.cuh>
#include <kernelgen/cuda/warp.cuh>

namespace kernelgen {

template <class Options>
struct SplitCut {
  using Params = SplitMmaParams;
  static constexpr bool kSameLengths = !Options::kRagged && !Options::kKvLens;

  struct Request {
    int q_start, k_start;  // rows in front of it (ragged)
    int seq_q, seq_k;
    int first_key;  // no row sees a key before it; a multiple of kChunkUnit
    int tiles;

    __device__ int splits(int chunk) const { return max((seq_k - first_key + chunk - 1) / chunk, 1); }
  };

  __device__ static int tiles_of(const Params& p, int seq_q) { return (seq_q * p.group_size + Options::kBlockQ - 1) / Options::kBlockQ; }

  __device__ static Request request(const Params& p, int b) {
    Request r{0, 0, p.seq_q, p.seq_k, 0, 0};
    if constexpr (Options::kRagged) {  // boundaries that make no sense stay inside the tensors
      r.q_start = min(max(p.cu_seqlens_q[b], 0), p.seq_q);
      r.k_start = min(max(p.cu_seqlens_k[b], 0), p.seq_k);
      r.seq_q = min(max(p.cu_seqlens_q[b + 1], r.q_start), p.seq_q) - r.q_start;
      r.seq_k = min(max(p.cu_seqlens_k[b + 1], r.k_start), p.seq_k) - r.k_start;
    }
    if constexpr (Options::kKvLens) r.seq_k = min(max(p.kv_lens[b], 0), r.seq_k);
    if constexpr (Options::kBoundedLeft) {
      r.first_key = max(r.seq_k - r.seq_q - p.window_left, 0) / kChunkUnit * kChunkUnit;
    }
    r.tiles = tiles_of(p, r.seq_q);
    return r;
  }

  // Keys of a chunk. A collective of the warp.
  __device__ static int chunk(const Params& p) {
    if (kSameLengths || p.chunk > 0) return p.chunk;
    int64_t tiles = 0, work = 0;
    int longest = 0;
    for (int b = lane_id(); b < p.batch; b += kWarpSize) {
      const Request r = request(p, b);
      const int keys = r.seq_k - r.first_key;
      tiles += r.tiles;
      work += int64_t{r.tiles} * keys;
      longest = max(longest, keys);
    }
    return chunk_for(warp_sum(tiles), warp_sum(work), warp_max(longest), p.slots, p.min_chunk);
  }

  __device__ static bool alike(const Params& p) { return kSameLengths || p.splits > 0; }

  // Items of a tile.
  __device__ static int stride(const Params& p, const Request& r, int chunk) { return alike(p) ? p.splits : r.splits(chunk); }

  // The request that an item belongs to, and its first item; false past the last. A collective of the warp.
  __device__ static bool find(const Params& p, int item, int chunk, int& request_of_item, int& first_item) {
    if (alike(p)) {
      const int items = tiles_of(p, p.seq_q) * p.splits;
      request_of_item = item / items;
      first_item = request_of_item * items;
      return request_of_item < p.batch;
    }
    int before = 0;
    for (int first = 0; first < p.batch; first += kWarpSize) {
      int own = 0;
      if (first + lane_id() < p.batch) {
        const Request r = request(p, first + lane_id());
        own = r.tiles * r.splits(chunk);
      }
      const int through = before + warp_inclusive_scan(own);
      const uint32_t past = __ballot_sync(kFullWarp, through > item);
      if (past != 0) {
        const int lane = __ffs(past) - 1;
        request_of_item = first + lane;
        first_item = __shfl_sync(kFullWarp, through - own, lane);
        return true;
      }
      before = __shfl_sync(kFullWarp, through, kWarpSize - 1);
    }
    return false;
  }

  // The first item of a request. A collective of the warp.
  __device__ static int first_item(const Params& p, int request_of_item, int chunk) {
    if (alike(p)) return request_of_item * tiles_of(p, p.seq_q) * p.splits;
    int items = 0;
    for (int b = lane_id(); b < request_of_item; b += kWarpSize) {
      const Request r = request(p, b);
      items += r.tiles * r.splits(chunk);
    }
    return warp_sum(items);
  }
};

}  // namespace kernelgen
