// Slots (token, k) grouped by expert: a counting sort that keeps their order within an expert.
//
// A block owns a run of slots, each of its warps a run of that, which it walks 32 slots at a time: match_any tells a lane how
// many slots in front of it have the same expert. Warps count first, each in counters of its own; the sums over experts and
// over the warps in front give every warp the rows where its slots begin; then they walk again and hand rows out. Nothing is
// decided by which thread comes first, so that equal inputs give equal bits.
//
// Where there are several blocks, a launch in front leaves the counts of each in block_counts, and every block adds up all of
// them for itself: a third launch would cost more than these reads, which are of a few KB in the L2 cache.
//
// For a product that adds rows to a token's (kScatters) rows get the weight of their slot, and more blocks clear what will be added to:
// the sort waits for memory, which has nothing else to do meanwhile.
#pragma once

#include <kernelgen/cuda/conversions.cuh>
#include <kernelgen/cuda/dependent.cuh>
#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/moe/expert_map.h>

namespace kernelgen {

struct MoeSortParams {
  const void* ids;            // (tokens, k)
  const int32_t* expert_map;  // (mapped) or null
  int32_t* offsets;           // (experts)
  int32_t* token_of_row;      // (slots)
  int32_t* row_of_slot;       // (slots)
  int32_t* block_counts;      // (blocks, experts), null with one block
  const void* weights;        // (tokens, k), null where rows get none
  float* weight_of_row;       // (slots)
  void* cleared;              // (tokens) rows of cleared_chunks times 16 bytes, or null
  int64_t ids_row;            // elements between tokens
  int64_t first;              // of a range of local ids
  int64_t weights_row, cleared_row;  // elements; bytes
  int32_t slots, k, experts, mapped;
  int32_t chunk, blocks;  // slots of a block, a multiple of 32 kWarps
  int32_t cleared_chunks;
};

// `Options`: Index (of ids), Weight, kMap, kWarps, kScatters.
template <class Options>
struct MoeSortCuda {
  static constexpr int kWarps = Options::kWarps, kThreads = kWarps * kWarpSize;

  // Of the block, in shared memory.
  struct Shared {
    int* counts;  // (kWarps, experts)
    int* total;   // (experts) rows of all blocks
    int* start;   // (experts) the block's first row
    int* used;    // rows of all experts

    __device__ Shared(unsigned char* memory, int experts)
        : counts(reinterpret_cast<int*>(memory)), total(counts + kWarps * experts), start(total + experts), used(start + experts) {}
  };

  __device__ static int expert_of(const MoeSortParams& p, int slot) {
    const int token = slot / p.k;
    const auto id = static_cast<const typename Options::Index*>(p.ids)[token * p.ids_row + (slot - token * p.k)];
    return local_expert<Options::kMap>(id, p.expert_map, p.mapped, p.first, p.experts);
  }

  // visit(slot, expert or -1, counts[expert] before it) for the warp's slots, which are added to its counts. A collective.
  template <class Visit>
  __device__ static void walk(const MoeSortParams& p, int* counts, Visit&& visit) {
    const int run = p.chunk / kWarps, lane = lane_id();
    const int64_t begin = static_cast<int64_t>(blockIdx.x) * p.chunk + threadIdx.x / kWarpSize * run;
    const int64_t end = min(begin + run, static_cast<int64_t>(p.slots));
    for (int64_t from = begin; from < end; from += kWarpSize) {
      const bool exists = from + lane < end;
      const int slot = static_cast<int>(from) + lane;
      const int expert = exists ? expert_of(p, slot) : -1;
      const uint32_t peers = __match_any_sync(kFullWarp, expert);
      const int in_front = __popc(peers & ((1u << lane) - 1));
      const int before = expert >= 0 ? counts[expert] : 0;
      __syncwarp();  // every lane has read the count before the first of its peers raises it
      if (expert >= 0 && in_front == 0) counts[expert] = before + __popc(peers);
      __syncwarp();  // it is raised before the next 32 slots read it
      if (exists) visit(slot, expert, before + in_front);
    }
  }

  __device__ static int* count_block(const MoeSortParams& p, const Shared& shared) {
    for (int i = threadIdx.x; i < kWarps * p.experts; i += kThreads) shared.counts[i] = 0;
    __syncthreads();  // counters are zero before any warp counts
    int* mine = shared.counts + threadIdx.x / kWarpSize * p.experts;
    walk(p, mine, [](int, int, int) {});
    __syncthreads();  // all warps have counted before their counts are added up
    return mine;
  }

  __device__ static void count(const MoeSortParams& p) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    join_previous_kernel();
    const Shared shared(shared_memory, p.experts);
    count_block(p, shared);
    for (int e = threadIdx.x; e < p.experts; e += kThreads) {
      int sum = 0;
      for (int w = 0; w < kWarps; ++w) sum += shared.counts[w * p.experts + e];
      p.block_counts[static_cast<int64_t>(blockIdx.x) * p.experts + e] = sum;
    }
  }

  // Counters become the rows of an expert in front of each warp's, within the block; total and start are made.
  __device__ static void add_up(const MoeSortParams& p, const Shared& shared) {
    for (int e = threadIdx.x; e < p.experts; e += kThreads) {
      int sum = 0;
      for (int w = 0; w < kWarps; ++w) {
        const int own = shared.counts[w * p.experts + e];
        shared.counts[w * p.experts + e] = sum;
        sum += own;
      }
      int before = 0, all = sum;
      if (p.blocks > 1) {
        all = 0;
#pragma unroll 8
        for (int b = 0; b < p.blocks; ++b) {
          const int rows = p.block_counts[static_cast<int64_t>(b) * p.experts + e];
          before += b < static_cast<int>(blockIdx.x) ? rows : 0;
          all += rows;
        }
      }
      shared.total[e] = all;
      shared.start[e] = before;
    }
    __syncthreads();  // totals are there before the first warp adds them up
    if (threadIdx.x < kWarpSize) {
      int carry = 0;
      for (int from = 0; from < p.experts; from += kWarpSize) {
        const int e = from + lane_id();
        const int rows = e < p.experts ? shared.total[e] : 0;
        const int through = carry + warp_inclusive_scan(rows);
        if (e < p.experts) {
          shared.start[e] += through - rows;
          if (blockIdx.x == 0) p.offsets[e] = through;
        }
        carry = __shfl_sync(kFullWarp, through, kWarpSize - 1);
      }
      if (lane_id() == 0) *shared.used = carry;
    }
    __syncthreads();  // starts are there before rows are handed out
  }

  // By the blocks behind those that sort: tokens in turn.
  __device__ static void clear(const MoeSortParams& p) {
    const int first = static_cast<int>(blockIdx.x) - p.blocks, step = static_cast<int>(gridDim.x) - p.blocks, tokens = p.slots / p.k;
    for (int token = first; token < tokens; token += step) {
      uint4* row = reinterpret_cast<uint4*>(static_cast<char*>(p.cleared) + token * p.cleared_row);
      for (int i = threadIdx.x; i < p.cleared_chunks; i += kThreads) row[i] = make_uint4(0, 0, 0, 0);
    }
  }

  __device__ static void place(const MoeSortParams& p) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    join_previous_kernel();
    if (Options::kScatters && static_cast<int>(blockIdx.x) >= p.blocks) {
      clear(p);
      return;
    }
    const Shared shared(shared_memory, p.experts);
    int* mine = count_block(p, shared);
    add_up(p, shared);
    walk(p, mine, [&](int slot, int expert, int before) {
      const int row = expert < 0 ? -1 : shared.start[expert] + before;
      p.row_of_slot[slot] = row;
      const int token = slot / p.k;
      if (row >= 0) p.token_of_row[row] = token;
      if constexpr (Options::kScatters) {
        if (row >= 0) p.weight_of_row[row] = to_float(static_cast<const typename Options::Weight*>(p.weights)[token * p.weights_row + (slot - token * p.k)]);
      }
    });
    // Rows behind the last expert's belong to no slot.
    const int64_t begin = static_cast<int64_t>(blockIdx.x) * p.chunk, end = min(begin + p.chunk, static_cast<int64_t>(p.slots));
    for (int64_t row = max(begin, static_cast<int64_t>(*shared.used)) + threadIdx.x; row < end; row += kThreads) p.token_of_row[row] = -1;
  }
};

}  // namespace kernelgen
