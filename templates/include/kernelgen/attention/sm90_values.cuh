// Values that are inf or NaN in tiles with keys that some row must not see (attention/prefill_sm90).
//
// The warps beside the one that copies look through such a tile while its scores are made: search(). Where they find any, which is rare, all
// consumers add those values to the output of the rows that may see them (it is inf or NaN whatever their weight), and replace them by 0: absorb().
#pragma once

#include <kernelgen/attention/mma_rules.cuh>
#include <kernelgen/attention/sm90_shape.cuh>
#include <kernelgen/sm90/tma.cuh>

namespace kernelgen {

template <class Shape, class Rows>
struct TileValues {
  using T = typename Shape::T;
  using Params = typename Rows::Params;
  using Work = typename Rows::Work;
  static constexpr int kBlockK = Shape::kBlockK;
  static constexpr int kChunks = Shape::kValueBytes / 16;

  // Tells whether one of every `threads` chunks from `thread` on has an inf or NaN.
  __device__ static bool search(uint32_t tile, int thread, int threads) {
    uint32_t found = 0;
#pragma unroll 4
    for (int i = thread; i < kChunks; i += threads) {
      uint32_t w[4];
      load_chunk(w, tile + i * 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) found |= nonfinite_halves<T>(w[j]);
    }
    return found != 0;
  }

  __device__ static void absorb(float (&output)[Shape::kOutputCount], const Params& p, const Work& work, int first_key, uint32_t tile) {
#pragma unroll
    for (int n = 0; n < Shape::kOutputCount / 4; ++n) {
#pragma unroll 1
      for (int key = 0; key < kBlockK; ++key) {
        const uint32_t word =
            load_word(tile + n / 8 * (kBlockK * kSwizzleRowBytes) + swizzled_chunk(key, n % 8) + lane_id() % 4 * 4);
        const uint32_t bad = nonfinite_halves<T>(word);
        if (bad == 0) continue;
        const float2 value = unpack_pair<T>(word & ((bad >> 15) * 0xffffu));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (!Rules<Shape, Rows>::visible(p, work, Shape::row_in_block(work.warp, r), first_key + key)) continue;
          output[4 * n + 2 * r] += value.x;
          output[4 * n + 2 * r + 1] += value.y;
        }
      }
    }
    named_barrier_sync(kAllConsumers, Shape::kMathThreads);  // all have read the tile before anyone clears parts of it
    // By the lane that gives the tile back: racecheck does not see that a barrier of the consumers orders what others store.
    // Unrolled, it spills at D 256 (paged, with LSE).
    if (lane_id() == 0) {
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x) / kWarpSize; i < kChunks; i += Shape::kMathThreads / kWarpSize) {
        uint32_t w[4];
        load_chunk(w, tile + i * 16);
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] &= ~((nonfinite_halves<T>(w[j]) >> 15) * 0xffffu);
        store_chunk(tile + i * 16, w);
      }
    }
    tma_store_fence();  // the tensor cores see it
    named_barrier_sync(kAllConsumers, Shape::kMathThreads);
  }
};

}  // namespace kernelgen
