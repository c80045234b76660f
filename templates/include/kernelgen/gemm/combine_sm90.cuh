// The weighted sums of a layer of experts, made beside the products that make their rows (gemm/grouped_sm90 with kCombine).
//
// Tiles are walked column by column, all groups of one column of tiles before the next. Two warps beside the one that starts copies wait
// until all tiles of a column are stored (p.done counts them; all blocks of the grid run at the same time) and then add up that column of
// every token, a token each at a time, while the others are at the next column: the rows are read out of L2, which would not hold all
// columns. Each token's rows come by bulk copies into one of kBuffers buffers; sums are made in the order of the slots in
// float32, as moe/unpermute_cuda makes them, bit for bit.
#pragma once

#include <kernelgen/cuda/conversions.cuh>
#include <kernelgen/cuda/memory.cuh>
#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/gemm/dense_params.cuh>
#include <kernelgen/sm90/barrier.cuh>
#include <kernelgen/sm90/pipeline.cuh>
#include <kernelgen/sm90/tma.cuh>

namespace kernelgen {

template <bool kFirst, class A, class B>
struct conditional {
  using type = A;
};
template <class A, class B>
struct conditional<false, A, B> {
  using type = B;
};
template <bool kFirst, class A, class B>
using conditional_t = typename conditional<kFirst, A, B>::type;

// `Out`: of the rows and of the result, 16 bits; `Weight`: of the slots, float or `Out`; `Columns`: of a tile.
template <class Out, class Weight, int Columns, bool kWeighted>
struct CombineRows {
  static constexpr int kWarps = 2, kBuffers = 3, kSlots = 8, kChunks = Columns / 8;
  static constexpr int kRowBytes = Columns * static_cast<int>(sizeof(Out)), kBufferBytes = kSlots * kRowBytes;
  static constexpr int kSlotsAt = kBuffers * kBufferBytes;             // of each buffer: rows, then weights
  static constexpr int kBarriersAt = kSlotsAt + kBuffers * kSlots * 8;
  static constexpr int kWarpBytes = round_up(kBarriersAt + kBuffers * 8, 128), kBytes = kWarps * kWarpBytes;
  static_assert(sizeof(Out) == 2 && kChunks <= kWarpSize, "a lane adds up eight columns");
  using Position = RingPosition<kBuffers>;

  uint32_t memory;  // shared, of this warp

  struct Slot {
    int row;
    float weight;
  };

  __device__ void init() const {
    for (int i = 0; i < kBuffers; ++i) barrier_init(barrier(i), 1);
  }

  __device__ uint32_t barrier(int buffer) const { return memory + kBarriersAt + buffer * 8; }

  // Slot `lane` of a token.
  __device__ static Slot slot_of(const DenseSm90Params& p, int token) {
    Slot slot{-1, 1.0f};
    if (token < p.tokens && lane_id() < p.slots) {
      slot.row = p.row_of_slot[static_cast<int64_t>(token) * p.slots + lane_id()];
      if constexpr (kWeighted) slot.weight = to_float(static_cast<const Weight*>(p.slot_weights)[token * p.slot_weight_row + lane_id()]);
    }
    return slot;
  }

  // Starts the copies of a token's rows, `bytes` of each from `column` on.
  __device__ void start(const DenseSm90Params& p, const Slot& slot, int buffer, int column, int bytes) const {
    const uint32_t there = __ballot_sync(kFullWarp, slot.row >= 0), words = memory + kSlotsAt + buffer * kSlots * 8;
    if (lane_id() < kSlots) {
      store_word(words + lane_id() * 4, slot.row);
      store_word(words + kSlots * 4 + lane_id() * 4, __float_as_uint(slot.weight));
    }
    if (lane_id() == 0) barrier_arrive_expect(barrier(buffer), __popc(there) * bytes);
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int row = __shfl_sync(kFullWarp, slot.row, s);
      if (lane_id() != 0 || row < 0) continue;
      bulk_load(memory + buffer * kBufferBytes + s * kRowBytes, static_cast<const Out*>(p.out) + row * p.out_row + column, bytes, barrier(buffer));
    }
    __syncwarp();
  }

  __device__ void add_up(const DenseSm90Params& p, const Position& at, int token, int column, int columns) const {
    barrier_wait(barrier(at.stage), at.parity);
    if (lane_id() * 8 < columns) {
      const uint32_t words = memory + kSlotsAt + at.stage * kSlots * 8;
      float sum[8] = {};
      for (int s = 0; s < p.slots; ++s) {
        if (static_cast<int>(load_word(words + s * 4)) < 0) continue;
        const float weight = __uint_as_float(load_word(words + kSlots * 4 + s * 4));
        uint32_t row[4];
        load_chunk(row, memory + at.stage * kBufferBytes + s * kRowBytes + lane_id() * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 pair = unpack_pair<Out>(row[i]);
          sum[2 * i] = fmaf(weight, pair.x, sum[2 * i]);
          sum[2 * i + 1] = fmaf(weight, pair.y, sum[2 * i + 1]);
        }
      }
      const uint32_t result[4] = {pack_pair<Out>(sum[0], sum[1]), pack_pair<Out>(sum[2], sum[3]), pack_pair<Out>(sum[4], sum[5]),
                                  pack_pair<Out>(sum[6], sum[7])};
      store_whole_16(static_cast<Out*>(p.result) + token * p.result_row + column + lane_id() * 8, result);
    }
    __syncwarp();  // the buffer is read by all before it is filled anew
  }

  // `tiles`: that a column counts when it is stored.
  __device__ void run(const DenseSm90Params& p, int warp, int tiles) const {
    const int step = gridDim.x * kWarps, first = blockIdx.x * kWarps + warp;
    Position at;
    for (int column = 0, n = 0; n < p.n; n += Columns, ++column) {
      if (lane_id() == 0) {
        while (load_acquire(p.done + column) < tiles) __nanosleep(100);
        tma_load_fence();
      }
      __syncwarp();
      const int columns = min(Columns, p.n - n), bytes = columns * static_cast<int>(sizeof(Out));
      Slot ahead = slot_of(p, first);
#pragma unroll 1
      for (int i = 0; i < kBuffers; ++i) {
        const Slot slot = ahead;
        ahead = slot_of(p, first + (i + 1) * step);
        if (first + i * step < p.tokens) start(p, slot, (at.stage + i) % kBuffers, n, bytes);
      }
#pragma unroll 1
      for (int token = first; token < p.tokens; token += step) {
        add_up(p, at, token, n, columns);
        const Slot slot = ahead;
        ahead = slot_of(p, token + (kBuffers + 1) * step);
        if (token + kBuffers * step < p.tokens) start(p, slot, at.stage, n, bytes);
        at.advance();
      }
    }
  }
};

}  // namespace kernelgen
