// Scales of blocks of 128 along k on their way into the sums of gemm/dense_sm90.
//
// Every stage of the ring has a place for the scales of its rows and columns. One warp beside the copying one fills it with 4-byte
// copies, which take scales in either order and at any alignment, as far ahead as the operands: a consumer that loads them itself
// waits behind the copies of operands in the queue to L2, even two steps ahead (4096 x 4096 x 7168, H200, 2026-11-30: 26 % more
// cycles than without scales).
#pragma once

#include <kernelgen/cuda/cp_async.cuh>
#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/gemm/tiles_sm90.cuh>
#include <kernelgen/sm90/wgmma.cuh>

namespace kernelgen {

constexpr int greatest_common_divisor(int a, int b) { return b == 0 ? a : greatest_common_divisor(b, a % b); }

// `Epilogue` says where the tile's columns are in b; the tile has `BlockM` rows.
template <class Options, class Epilogue, int BlockM>
struct BlockScales {
  static constexpr int kMmaM = Options::kMmaM, kSums = Options::kBlockN / 2;
  static constexpr bool kEach = Options::kScaleColumns == 1;  // a scale per column of b, else one per 128
  // Columns of the tile that share a scale wherever it begins: tiles begin at multiples of their width.
  static constexpr int kRun = kEach ? 1 : greatest_common_divisor(Epilogue::kSplit ? Epilogue::kOutputs : Options::kBlockN, 128);
  static constexpr int kRuns = Options::kBlockN / kRun;
  static constexpr int kBytes = round_up((BlockM + kRuns) * 4, 128);  // of a stage: rows, then runs of columns
  static constexpr int kFillers = kWarpSize;                          // arrivals at the stage's full barrier
  // Scales of all columns are too many for registers: they are read where they lie, and the stage is given back after that.
  static constexpr bool kHoldsStage = kEach;

  // Those of block `block` of k, by one warp.
  __device__ static void copy(uint32_t target, const DenseSm90Params& p, const OutputTile& tile, int block) {
    const float* a = p.scale_a + tile.batch_a * p.scale_a_batch + static_cast<int64_t>(block) * p.scale_a_block;
    const float* b = p.scale_b + tile.batch_b * p.scale_b_batch + static_cast<int64_t>(block) * p.scale_b_block;
#pragma unroll
    for (int i = 0; i < BlockM / kWarpSize; ++i) {
      const int row = i * kWarpSize + lane_id();
      cp_async_4(target + row * 4, a + static_cast<int64_t>(min(tile.m + row, p.m - 1)) * p.scale_a_row);
    }
#pragma unroll
    for (int i = 0; i < ceil_div(kRuns, kWarpSize); ++i) {
      const int run = i * kWarpSize + lane_id();
      const int column = min(Epilogue::column_of_b(p, tile.n, run * kRun), p.n - 1) / Options::kScaleColumns;
      if (run < kRuns) cp_async_4(target + (BlockM + run) * 4, b + static_cast<int64_t>(column) * p.scale_b_column);
    }
  }

  // What a thread keeps of a stage.
  struct Step {
    uint32_t columns_at;
    float rows[kMmaM][2];
    float columns[kEach ? 1 : kRuns];
  };

  // `first_row`: of the consumer's.
  __device__ static void load(Step& step, uint32_t source, int first_row) {
    const int row = first_row + threadIdx.x / 32 % 4 * 16 + lane_id() / 4;
#pragma unroll
    for (int i = 0; i < 2 * kMmaM; ++i) step.rows[i / 2][i % 2] = load_float(source + (row + i / 2 * kMmaRows + i % 2 * 8) * 4);
    step.columns_at = source + (BlockM + lane_id() % 4 * 2) * 4;
    if constexpr (!kEach) {
#pragma unroll
      for (int i = 0; i < kRuns; ++i) step.columns[i] = load_float(source + (BlockM + i) * 4);
    }
  }

  // totals += sums, scaled, of 64 rows and the columns from `first` on.
  template <int N>
  __device__ static void add(float (&totals)[kSums], const float (&sums)[N], const Step& step, int m, int first) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const int at = first / 2 + i, column = 2 * at;  // of the eight that these are two of
      float pair[2];
      if constexpr (kEach) {
        load_pair(pair, step.columns_at + column * 4);
      } else {
        pair[0] = pair[1] = step.columns[column / kRun];
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) totals[at + j] = fmaf(sums[i + j], pair[j % 2] * step.rows[m][j / 2], totals[at + j]);
    }
  }

  __device__ static float load_float(uint32_t shared) { return __uint_as_float(load_word(shared)); }

  __device__ static void load_pair(float (&pair)[2], uint32_t shared) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair[0]), "=f"(pair[1]) : "r"(shared) : "memory");
  }
};

// The same without scales of blocks.
struct NoBlockScales {
  static constexpr int kBytes = 0, kFillers = 0;
  static constexpr bool kHoldsStage = false;

  struct Step {};
  __device__ static void copy(uint32_t, const DenseSm90Params&, const OutputTile&, int) {}
  __device__ static void load(Step&, uint32_t, int) {}
  template <int M, int N>
  __device__ static void add(float (&totals)[M], const float (&sums)[N], const Step&, int, int first) {
#pragma unroll
    for (int i = 0; i < N; ++i) totals[first / 2 + i] += sums[i];
  }
};

template <class Options, class Epilogue, int BlockM, bool kScaled>
struct scales_of_blocks {
  using type = NoBlockScales;
};
template <class Options, class Epilogue, int BlockM>
struct scales_of_blocks<Options, Epilogue, BlockM, true> {
  using type = BlockScales<Options, Epilogue, BlockM>;
};

}  // namespace kernelgen
