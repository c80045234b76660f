// Cuts a batch whose lengths are on the device: the arrays of a plan by the formulas of kernels/attention/schedule.py.
//
// One block walks the requests kThreads at a time, twice: sums and the longest request first, for the chunk; then prefix sums.
#pragma once

#include <kernelgen/attention/chunk.cuh>
#include <kernelgen/cuda/warp.cuh>

namespace kernelgen {

struct PlanParams {
  const int32_t* starts;         // (batch + 1) query rows
  const int32_t* kv_indptr;      // (batch + 1) and last_page_len (batch), or null and
  const int32_t* last_page_len;
  const int32_t* seq_lens;       // (batch)
  int32_t* q_indptr;             // (size + 1)
  int32_t* kv_lens;              // (size)
  int32_t* page_begin;           // (size)
  int32_t* item_indptr;          // (size + 1)
  int32_t* chunk;                // (1)
  int64_t* mask_indptr;          // (size + 1), or null
  int32_t batch, size;           // requests of the table; of the arrays, which end in empty requests
  int32_t page_size, table_width;
  int32_t group_size, block_rows, slots, min_chunk, fixed_chunk;
  int32_t max_rows, max_keys;    // bounds that memory was made for: what exceeds them is cut off
};

constexpr int kPlanThreads = 1024;

struct PlanBlock {
  static constexpr int kWarps = kPlanThreads / kWarpSize;

  // Inclusive prefix sum over the block's threads; `total` is the sum of all.
  __device__ static int64_t scan(int64_t value, int64_t& total, int64_t (&shared)[kWarps]) {
    const int lane = lane_id(), warp = threadIdx.x / kWarpSize;
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
      const int64_t below = __shfl_up_sync(kFullWarp, value, step);
      if (lane >= step) value += below;
    }
    __syncthreads();  // the previous scan's sums have been read
    if (lane == kWarpSize - 1) shared[warp] = value;
    __syncthreads();  // every warp's sum is there
    int64_t before = 0;
    total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      before += w < warp ? shared[w] : 0;
      total += shared[w];
    }
    return before + value;
  }

  struct Request {
    int q_start, q_len, kv_len, page_begin;
    int64_t tiles;
  };

  __device__ static Request request(const PlanParams& p, int b) {
    Request r{0, 0, 0, 0, 0};
    r.q_start = min(p.starts[min(b, p.batch)], p.max_rows);
    if (b >= p.batch) return r;
    r.q_len = max(min(p.starts[b + 1], p.max_rows) - r.q_start, 0);
    if (p.kv_indptr != nullptr) {
      r.page_begin = p.kv_indptr[b];
      const int pages = p.kv_indptr[b + 1] - r.page_begin;
      r.kv_len = pages > 0 ? (pages - 1) * p.page_size + p.last_page_len[b] : 0;
    } else {
      r.page_begin = b * p.table_width;
      r.kv_len = p.seq_lens[b];
    }
    r.kv_len = min(max(r.kv_len, 0), p.max_keys);
    r.tiles = (int64_t{r.q_len} * p.group_size + p.block_rows - 1) / p.block_rows;
    return r;
  }

  __device__ static void run(const PlanParams& p) {
    __shared__ int64_t shared[kWarps];
    __shared__ int longest;
    if (threadIdx.x == 0) longest = 0;
    __syncthreads();  // the maximum has its start value
    int64_t tiles = 0, work = 0;
    int own_longest = 0;
    for (int b = threadIdx.x; b < p.batch; b += kPlanThreads) {
      const Request r = request(p, b);
      tiles += r.tiles;
      work += r.tiles * r.kv_len;
      own_longest = max(own_longest, r.kv_len);
    }
    atomicMax(&longest, own_longest);
    scan(tiles, tiles, shared);
    scan(work, work, shared);  // its barriers also make `longest` complete
    const int chunk = p.fixed_chunk > 0 ? p.fixed_chunk : chunk_for(tiles, work, longest, p.slots, p.min_chunk);

    int64_t items_before = 0, mask_before = 0;
    for (int first = 0; first < p.size; first += kPlanThreads) {
      const int b = first + threadIdx.x;
      const Request r = request(p, b);
      const int64_t splits = max((int64_t{r.kv_len} + chunk - 1) / chunk, int64_t{1});
      int64_t items, mask;
      const int64_t items_through = items_before + scan(r.tiles * splits, items, shared);
      const int64_t mask_through = mask_before + scan(int64_t{r.q_len} * r.kv_len, mask, shared);
      if (b < p.size) {
        p.q_indptr[b + 1] = r.q_start + r.q_len;
        p.kv_lens[b] = r.kv_len;
        p.page_begin[b] = r.page_begin;
        p.item_indptr[b + 1] = static_cast<int>(items_through);
        if (p.mask_indptr != nullptr) p.mask_indptr[b + 1] = mask_through;
      }
      items_before += items;
      mask_before += mask;
    }
    if (threadIdx.x == 0) {
      p.q_indptr[0] = p.item_indptr[0] = 0;
      *p.chunk = chunk;
      if (p.mask_indptr != nullptr) p.mask_indptr[0] = 0;
    }
  }
};

}  // namespace kernelgen
