// How the warps of a persistent block of gemm/dense_sm90 come by its tiles, one after the other.
//
//   for (; source.find(p, tile); source.advance()) ...    by whole warps
//
//   StridedTiles   every warp counts for itself: the grid's tiles in turn, known from the start
//   TileDealer     the copying warp takes the next tile of all from a counter in memory and hands it to the other warps, which are
//   DealtTiles     readers of a ring in shared memory: an SM whose tiles are full takes fewer of them
//
// The counter is asked for a few steps before the tile is needed, so that its latency is hidden and no tile waits long for a block
// that is still busy. p.counter are two words, which every launch finds and leaves at zero: the second counts blocks that found no
// more tiles, and the last one clears both. A launch that depends on this one touches them only when it has ended.
#pragma once

#include <kernelgen/gemm/tiles_sm90.cuh>
#include <kernelgen/sm90/pipeline.cuh>

namespace kernelgen {

template <class Tiles>
struct StridedTiles {
  Tiles tiles;
  int index, step;

  __device__ bool find(const DenseSm90Params& p, OutputTile& tile) { return tiles.find(p, index, tile); }
  __device__ void advance() { index += step; }
  __device__ void ask(const DenseSm90Params&) {}
  __device__ void finish(const DenseSm90Params&) {}

  // Every other tile is this consumer's, `turn` 0 or 1 first.
  __device__ void take_turns(int turn) {
    if (turn == 1) index += step;
    step *= 2;
  }
};

// A slot is (m, n, row_end, group) of a tile; m is negative behind the last one.
template <int Readers>
struct TileSlots : Pipeline<4, Readers> {
  using Base = Pipeline<4, Readers>;
  static constexpr int kSlotsAt = 64;  // behind the barriers
  static constexpr int kBytes = 128;
  static_assert(Base::kBytes == kSlotsAt, "slots begin behind the barriers");

  __device__ uint32_t slot(int stage) const { return this->barriers + kSlotsAt + stage * 16; }
};

template <class Tiles, int Readers>
struct DealtTiles {
  using Slots = TileSlots<Readers>;
  Slots slots;
  typename Slots::Position at;
  bool alternate = false;

  __device__ bool find(const DenseSm90Params& p, OutputTile& tile) {
    int m = 0, n = 0, row_end = 0, group = 0;
    slots.wait_full(at);
    __syncwarp();  // no lane waits any more when one gives the slot back: its next phase could end unseen
    // By the lane that gives the slot back: compute-sanitizer's racecheck does not see that __syncwarp orders the others' reads.
    if (lane_id() == 0) {
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(m), "=r"(n), "=r"(row_end), "=r"(group)
                   : "r"(slots.slot(at.stage))
                   : "memory");
    }
    slots.release(at.stage);
    m = __shfl_sync(kFullWarp, m, 0);
    n = __shfl_sync(kFullWarp, n, 0);
    row_end = __shfl_sync(kFullWarp, row_end, 0);
    group = __shfl_sync(kFullWarp, group, 0);
    if (m < 0) return false;
    Tiles::fill(tile, p, m, n, row_end, group);
    return true;
  }
  __device__ void advance() {
    at.advance();
    if (alternate) at.advance();
  }

  // Slots are an even number, so that each of them stays with one consumer.
  __device__ void take_turns(int turn) {
    if (turn == 1) at.advance();
    alternate = true;
  }
};

// `Ends`: readers that take turns each want an end of their own.
template <class Tiles, int Readers, int Ends>
struct TileDealer {
  using Slots = TileSlots<Readers>;
  Slots slots;
  Tiles tiles;
  int index;     // the first is the block's own
  int next = 0;  // of the lane that asks
  typename Slots::Position at;

  __device__ void hand_out(int m, int n, int row_end, int group) {
    slots.wait_empty(at);
    __syncwarp();
    if (lane_id() == 0) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(slots.slot(at.stage)), "r"(m), "r"(n), "r"(row_end), "r"(group)
                   : "memory");
      barrier_arrive(slots.full(at.stage));
    }
    at.advance();
  }

  __device__ bool find(const DenseSm90Params& p, OutputTile& tile) {
    const bool found = tiles.find(p, index, tile);
    if (found) {
      hand_out(tile.m, tile.n, tile.row_end, tile.batch_b);
    } else {
      for (int i = 0; i < Ends; ++i) hand_out(-1, 0, 0, 0);
    }
    return found;
  }

  // By lane 0, once for each tile, before advance().
  __device__ void ask(const DenseSm90Params& p) { next = static_cast<int>(gridDim.x) + atomicAdd(p.counter, 1); }
  __device__ void advance() { index = __shfl_sync(kFullWarp, next, 0); }

  // Behind the last tile: this block asks no more.
  __device__ void finish(const DenseSm90Params& p) {
    if (lane_id() != 0 || atomicAdd(p.counter + 1, 1) + 1 != static_cast<int>(gridDim.x)) return;
    p.counter[0] = 0;
    p.counter[1] = 0;
  }
};

}  // namespace kernelgen
