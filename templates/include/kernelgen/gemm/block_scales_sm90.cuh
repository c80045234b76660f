// Scales of blocks of 128 along k, from global memory into the sums of gemm/dense_sm90.
//
// A thread reads the scales of its own rows and columns: rows once a step, columns once a step and run of columns that share one,
// a step before they are needed where registers allow it. Neighbouring steps find them in L1 where k is contiguous. No copy of the
// scales in shared memory: they may lie in either order, unaligned.
#pragma once

#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/gemm/tiles_sm90.cuh>
#include <kernelgen/sm90/wgmma.cuh>

namespace kernelgen {

constexpr int greatest_common_divisor(int a, int b) { return b == 0 ? a : greatest_common_divisor(b, a % b); }

// `Epilogue` says where the tile's columns are in b.
template <class Options, class Epilogue>
struct BlockScales {
  static constexpr int kMmaM = Options::kMmaM, kSums = Options::kBlockN / 2;
  static constexpr bool kEach = Options::kScaleColumns == 1;  // a scale per column of b, else one per 128
  // Columns of the tile that share a scale wherever it begins: tiles begin at multiples of their width.
  static constexpr int kRun = kEach ? 8 : greatest_common_divisor(Epilogue::kSplit ? Epilogue::kOutputs : Options::kBlockN, 128);
  static constexpr int kRuns = Options::kBlockN / kRun;

  const float* rows[kMmaM][2];
  const float* columns;
  int column[kRuns];  // of the first of a run, or of this thread's first two of it
  bool whole;         // no column past the end

  __device__ BlockScales(const DenseSm90Params& p, const OutputTile& tile, int first_row)
      : columns(p.scale_b + tile.batch_b * p.scale_b_batch) {
    const float* a = p.scale_a + tile.batch_a * p.scale_a_batch;
    const int row = first_row + threadIdx.x / 32 % 4 * 16 + lane_id() / 4;
#pragma unroll
    for (int i = 0; i < 2 * kMmaM; ++i) {
      rows[i / 2][i % 2] = a + static_cast<int64_t>(min(row + i / 2 * kMmaRows + i % 2 * 8, p.m - 1)) * p.scale_a_row;
    }
    whole = true;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int first = Epilogue::column_of_b(p, tile.n, i * kRun) + (kEach ? lane_id() % 4 * 2 : 0);
      if constexpr (kEach) {
        column[i] = first;
        whole &= first + 1 < p.n;
      } else {
        column[i] = min(first, p.n - 1) / 128;
      }
    }
  }

  // Those of one step.
  struct Step {
    float rows[kMmaM][2];
    float columns[kRuns][kEach ? 2 : 1];
  };

  __device__ void load(Step& step, const DenseSm90Params& p, int block) const {
#pragma unroll
    for (int i = 0; i < 2 * kMmaM; ++i) step.rows[i / 2][i % 2] = rows[i / 2][i % 2][static_cast<int64_t>(block) * p.scale_a_block];
    if constexpr (!kEach) load_columns(step, p, block);
  }

  // What is too much to be kept for two steps.
  __device__ void load_wide(Step& step, const DenseSm90Params& p, int block) const {
    if constexpr (kEach) load_columns(step, p, block);
  }

  __device__ void load_columns(Step& step, const DenseSm90Params& p, int block) const {
    const float* row = columns + static_cast<int64_t>(block) * p.scale_b_block;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
#pragma unroll
      for (int j = 0; j < (kEach ? 2 : 1); ++j) {
        const int at = kEach && !whole ? min(column[i] + j, p.n - 1) : column[i] + j;
        step.columns[i][j] = row[static_cast<int64_t>(at) * p.scale_b_column];
      }
    }
  }

  // totals += sums, scaled, of 64 rows.
  __device__ static void add(float (&totals)[kSums], const float (&sums)[kSums], const Step& step, int m) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const float scale = step.columns[i / 4 * 8 / kRun][kEach ? i % 2 : 0] * step.rows[m][i % 4 / 2];
      totals[i] = fmaf(sums[i], scale, totals[i]);
    }
  }
};

// The same without scales of blocks.
template <class Options, class Epilogue>
struct NoBlockScales {
  struct Step {};
  __device__ NoBlockScales(const DenseSm90Params&, const OutputTile&, int) {}
  __device__ void load(Step&, const DenseSm90Params&, int) const {}
  __device__ void load_wide(Step&, const DenseSm90Params&, int) const {}
  template <int N>
  __device__ static void add(float (&totals)[N], const float (&sums)[N], const Step&, int) {
#pragma unroll
    for (int i = 0; i < N; ++i) totals[i] += sums[i];
  }
};

template <class Options, class Epilogue, bool kScaled>
struct scales_of_blocks {
  using type = NoBlockScales<Options, Epilogue>;
};
template <class Options, class Epilogue>
struct scales_of_blocks<Options, Epilogue, true> {
  using type = BlockScales<Options, Epilogue>;
};

}  // namespace kernelgen
