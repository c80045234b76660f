// How a persistent block of attention/prefill_sm90 comes by its row tiles, one after the other.
//
// The warp that copies takes the next tile from a counter in memory, finds out what it is, and hands it to the other warps by a ring
// of slots in shared memory. It asks while the tile before is still being loaded, so that the counter's latency is hidden.
//
// Order. A tile under a right bound sees more keys the later it lies: the longest go first, so that the last ones to end are short.
// Dense: `section` heads are taken at a time (their keys and values fit into L2), tile by tile, heads fastest. Ragged: requests in
// turn, tile by tile, heads fastest. kSplit: the parts of a row tile are tiles here.
//
// p.counter are two words, which every launch finds and leaves at zero: the second counts blocks that found no more tiles, and the
// last one clears both. A launch that depends on this one touches them only when it has ended.
#pragma once

#include <kernelgen/cuda/memory.cuh>
#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/sm90/pipeline.cuh>

namespace kernelgen {

// Slots of eight words: first query (-1: no more tiles), head, request, rows of it that q has (paged) or which part of the keys (kSplit),
// lengths and first rows of its queries and keys.
template <int Readers>
struct RowTileSlots : Pipeline<2, Readers> {
  using Base = Pipeline<2, Readers>;
  static constexpr int kWords = 8;
  static constexpr int kBytes = Base::kBytes + 2 * kWords * 4;

  __device__ uint32_t slot(int stage) const { return this->barriers + Base::kBytes + stage * kWords * 4; }
};

// A reader's side, by whole warps: next() until it says no.
template <class Shape, class Rows>
struct RowTileReader {
  using Slots = RowTileSlots<Shape::kReaders>;
  Slots slots;
  int rank;  // of the block in its cluster
  typename Slots::Position at;

  __device__ bool next(typename Rows::Work& work) {
    uint32_t first[4] = {}, second[4] = {};
    slots.wait_full(at);
    __syncwarp();  // no lane waits any more when one gives the slot back: its next phase could end unseen
    // By the lane that gives the slot back: racecheck does not see that __syncwarp orders the others' reads.
    if (lane_id() == 0) {
      load_chunk(first, slots.slot(at.stage));
      load_chunk(second, slots.slot(at.stage) + 16);
    }
    if constexpr (Shape::kBlocks == 1) {
      slots.release(at.stage);
    } else {
      if (lane_id() == 0) barrier_arrive_cluster(slots.empty(at.stage), 0);
    }
    at.advance();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      first[i] = __shfl_sync(kFullWarp, first[i], 0);
      second[i] = __shfl_sync(kFullWarp, second[i], 0);
    }
    work.first_query = static_cast<int>(first[0]);
    work.head_ = static_cast<int>(first[1]);
    work.request = static_cast<int>(first[2]);
    work.seq_q = static_cast<int>(second[0]);
    work.seq_k = static_cast<int>(second[1]);
    work.q_start = static_cast<int>(second[2]);
    work.k_start = static_cast<int>(second[3]);
    work.value_column = 0;
    if constexpr (Rows::kPaged) work.rows = static_cast<int>(first[3]);
    if constexpr (Shape::kSplit) work.split = static_cast<int>(first[3]);
    if (work.first_query < 0) return false;
    if constexpr (Shape::kBlocks > 1) work.first_query += rank * Shape::kBlockQ;
    return true;
  }
};

template <class Shape, class Rows>
struct RowTileDealer {
  using Slots = RowTileSlots<Shape::kReaders>;
  using Params = typename Rows::Params;
  using Work = typename Rows::Work;
  static constexpr int kBlockQ = Shape::kConsumers * Shape::kQueries * Shape::kBlocks;
  Slots slots;
  int index;              // of this tile among all; the first is the block's own, or the cluster's
  int asked = 0;          // of the lane that asks
  int scanned = 0, before = 0;  // ragged: requests that lie behind, and their tiles
  typename Slots::Position at;

  // The next tile, handed out. False, and the others are told, when there is none.
  __device__ bool next(const Params& p, Work& work) {
    bool found;
    if constexpr (Shape::kRagged) {
      found = find_ragged(p, work);
    } else {
      found = find_dense(p, work);
    }
    if (!found) work.first_query = -1;
    slots.wait_empty(at);
    __syncwarp();
    if (lane_id() < Shape::kBlocks) {
      const uint32_t first[4] = {static_cast<uint32_t>(work.first_query), static_cast<uint32_t>(work.head_), static_cast<uint32_t>(work.request), fourth(work)};
      const uint32_t second[4] = {static_cast<uint32_t>(work.seq_q), static_cast<uint32_t>(work.seq_k), static_cast<uint32_t>(work.q_start),
                                  static_cast<uint32_t>(work.k_start)};
      if constexpr (Shape::kBlocks == 1) {
        store_chunk(slots.slot(at.stage), first);
        store_chunk(slots.slot(at.stage) + 16, second);
        barrier_arrive(slots.full(at.stage));
      } else {
        const int rank = lane_id();
        barrier_arrive_expect_cluster(slots.full(at.stage), rank, 32);
        store_chunk_cluster(slots.slot(at.stage), rank, first, slots.full(at.stage));
        store_chunk_cluster(slots.slot(at.stage) + 16, rank, second, slots.full(at.stage));
      }
    }
    at.advance();
    return found;
  }

  // By the whole warp, once for each tile, before advance().
  __device__ void ask(const Params& p) {
    if (lane_id() == 0) asked = static_cast<int>(gridDim.x) / Shape::kBlocks + atomicAdd(p.counter, 1);
  }
  __device__ void advance() { index = __shfl_sync(kFullWarp, asked, 0); }

  // Behind the last tile: this block asks no more.
  __device__ void finish(const Params& p) {
    if (lane_id() != 0 || atomicAdd(p.counter + 1, 1) + 1 != static_cast<int>(gridDim.x) / Shape::kBlocks) return;
    p.counter[0] = 0;
    p.counter[1] = 0;
  }

  __device__ static uint32_t fourth(const Work& work) {
    if constexpr (Rows::kPaged) return static_cast<uint32_t>(work.rows);
    if constexpr (Shape::kSplit) return static_cast<uint32_t>(work.split);
    return 0;
  }

  // Tile `tile` of a request, of the order in memory.
  __device__ static void place(const Params& p, Work& work, int tile) {
    if constexpr (Shape::kSplit) {
      work.split = tile % p.splits;
      tile /= p.splits;
    }
    work.first_query = tile * kBlockQ;
  }

  __device__ static void cut_keys(const Params& p, Work& work) {
    if constexpr (Shape::kKvLens) work.seq_k = min(max(p.kv_lens[work.request], 0), work.seq_k);
  }

  __device__ bool find_dense(const Params& p, Work& work) {
    if (index >= p.tiles) return false;
    const int all_heads = p.num_q_heads / Shape::kPackedHeads, section_heads = p.section / Shape::kPackedHeads;
    const int of_section = section_heads * p.row_tiles, section = index / of_section, within = index - section * of_section;
    const int heads = min(section_heads, p.batch * all_heads - section * section_heads);
    const int tile = within / heads, head = section * section_heads + within - tile * heads;
    work.request = head / all_heads;
    work.head_ = (head - work.request * all_heads) * Shape::kPackedHeads;
    place(p, work, Shape::kBoundedRight ? p.row_tiles - 1 - tile : tile);
    work.seq_q = p.seq_q;
    work.seq_k = p.seq_k;
    work.q_start = work.k_start = 0;
    cut_keys(p, work);
    return true;
  }

  __device__ static int tiles_of(const Params& p, int request) {
    int tiles = request < p.batch ? ceil_div(Rows::num_queries(p, request), kBlockQ) : 0;
    if constexpr (Shape::kSplit) tiles *= p.splits;
    return tiles;
  }

  // The request is found by a prefix sum of its tiles, 32 requests at a time. Indices of a block rise, so what lies behind stays behind.
  __device__ bool find_ragged(const Params& p, Work& work) {
    const int all_heads = p.num_q_heads / Shape::kPackedHeads;
    int tile = index / all_heads;
    work.head_ = (index - tile * all_heads) * Shape::kPackedHeads;
    for (; scanned < p.batch; scanned += kWarpSize) {
      const int own = tiles_of(p, scanned + lane_id());
      const int through = before + warp_inclusive_scan(own);
      const uint32_t past = __ballot_sync(kFullWarp, through > tile);
      if (past != 0) {
        const int lane = __ffs(past) - 1;
        const int tiles = __shfl_sync(kFullWarp, own, lane);
        tile -= __shfl_sync(kFullWarp, through, lane) - tiles;
        work.request = scanned + lane;
        place(p, work, Shape::kBoundedRight ? tiles - 1 - tile : tile);
        Rows::find_request(p, work);
        cut_keys(p, work);
        return true;
      }
      before = __shfl_sync(kFullWarp, through, kWarpSize - 1);
    }
    return false;
  }
};

}  // namespace kernelgen
