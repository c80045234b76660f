// Scales of blocks of 128 along k on their way into the sums of gemm/dense_sm90.
//
// Every stage of the ring has a place for the scales of its rows and columns, filled as far ahead as the operands: a consumer that
// loads them itself waits behind the copies of operands in the queue to L2, even two steps ahead (4096 x 4096 x 7168, H200, 2026-11-30:
// 26 % more cycles than without scales). Two ways:
//
//   TMA     rows that lie one behind the other, at 16 bytes, and a scale for 128 columns (p.scales_by_tma): the copying warp brings the
//           rows' by TMA; another one loads those of columns for 32 steps at a time, and writes one step's into each stage
//   rows    of a that are gathered: that other warp loads their scales a step ahead, into registers, and writes them into the stage
//   gather  any order and alignment: that other warp brings all by 4-byte copies. They slow the products down: 320,000 cycles where
//           nothing copied at all takes 268,000, and one such copy a step takes most of the difference
#pragma once

#include <kernelgen/cuda/cp_async.cuh>
#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/gemm/tiles_sm90.cuh>
#include <kernelgen/sm90/barrier.cuh>
#include <kernelgen/sm90/wgmma.cuh>

namespace kernelgen {

constexpr int greatest_common_divisor(int a, int b) { return b == 0 ? a : greatest_common_divisor(b, a % b); }

// `Epilogue` says where the tile's columns are in b; the tile has `BlockM` rows.
template <class Options, class Epilogue, int BlockM>
struct BlockScales {
  static constexpr int kMmaM = Options::kMmaM, kSums = Options::kBlockN / 2;
  static constexpr int kRowStep = BlockM / kMmaM;  // from a consumer's 64 rows to its next
  static constexpr bool kEach = Options::kScaleColumns == 1;  // a scale per column of b, else one per 128
  // Columns of the tile that share a scale wherever it begins: tiles begin at multiples of their width.
  static constexpr int kRun = kEach ? 1 : greatest_common_divisor(Epilogue::kSplit ? Epilogue::kOutputs : Options::kBlockN, 128);
  static constexpr int kRuns = Options::kBlockN / kRun;
  // Rows of groups begin anywhere, a box at a multiple of four.
  static constexpr int kBoxRows = BlockM <= 192 ? BlockM : BlockM / 2, kBoxes = BlockM / kBoxRows, kSlack = Epilogue::kRowGroups && !Options::kGather ? 4 : 0;
  static constexpr int kBoxBytes = round_up((kBoxRows + kSlack) * 4, 128);
  static constexpr int kColumnsAt = (kBoxes - 1) * kBoxBytes + (kBoxRows + kSlack) * 4;
  static constexpr int kBytes = round_up(kColumnsAt + kRuns * 4, 128);  // of a stage: rows, then runs of columns
  static constexpr int kFillers = kWarpSize;                            // arrivals of the warp of scales at the stage's full barrier
  // Scales of all columns are too many for registers: they are read where they lie, and the stage is given back after that.
  static constexpr bool kHoldsStage = kEach;

  static constexpr bool kByTma = !kEach && !Options::kGather;
  static_assert(!Options::kGather || !kEach, "gathered rows stand beside scales of 128 columns");

  __device__ static uint32_t row_at(int row) { return row / kBoxRows * kBoxBytes + row % kBoxRows * 4; }

  // Bytes of copy_rows().
  __device__ static int row_bytes(const DenseSm90Params& p) {
    return kByTma && p.scales_by_tma ? kBoxes * (kBoxRows + kSlack) * 4 : 0;
  }

  // Those of the rows by TMA, by one thread.
  __device__ static void copy_rows(uint32_t target, const DenseSm90Params& p, uint32_t barrier, const OutputTile& tile, int block) {
    if (!kByTma || !p.scales_by_tma) return;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const int row = tile.m + box * kBoxRows;
      tma_load(target + box * kBoxBytes, p.map_scales, barrier, kSlack ? row / 4 * 4 : row, block, tile.batch_a);
    }
  }

  // Scales of columns, for up to 32 steps: a step per lane.
  struct Columns {
    float runs[kRuns];
  };

  __device__ static void load_columns(Columns& columns, const DenseSm90Params& p, const OutputTile& tile, int block) {
    const int64_t mine = min(block + lane_id(), ceil_div(p.k, 128) - 1);
    const float* b = p.scale_b + tile.batch_b * p.scale_b_batch + mine * p.scale_b_block;
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const int column = min(Epilogue::column_of_b(p, tile.n, run * kRun), p.n - 1) / Options::kScaleColumns;
      columns.runs[run] = b[static_cast<int64_t>(column) * p.scale_b_column];
    }
  }

  // Scales of gathered rows, of one step: those of rows lane, lane + 32, ...
  struct Rows {
    uint32_t from[BlockM / kWarpSize];  // where a row's begin
    float scale[BlockM / kWarpSize];

    __device__ void find(const DenseSm90Params& p, const OutputTile& tile) {
#pragma unroll
      for (int i = 0; i < BlockM / kWarpSize; ++i) {
        from[i] = static_cast<uint32_t>(p.rows[min(tile.m + i * kWarpSize + lane_id(), tile.row_end - 1)] * p.scale_a_row);
      }
    }
    __device__ void load(const DenseSm90Params& p, int block) {
      const float* a = p.scale_a + static_cast<int64_t>(block) * p.scale_a_block;
#pragma unroll
      for (int i = 0; i < BlockM / kWarpSize; ++i) scale[i] = a[from[i]];
    }
    __device__ void write(uint32_t target) const {
#pragma unroll
      for (int i = 0; i < BlockM / kWarpSize; ++i) store_float(target + row_at(i * kWarpSize + lane_id()), scale[i]);
    }
  };

  // Those of step `step` of 32 into a stage, and the arrivals.
  __device__ static void write_columns(uint32_t target, const Columns& columns, int step, uint32_t barrier) {
    float mine = 0.0f;
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const float x = __shfl_sync(kFullWarp, columns.runs[run], step);
      if (lane_id() == run) mine = x;
    }
    if (lane_id() < kRuns) store_float(target + kColumnsAt + lane_id() * 4, mine);
    __syncwarp();
    if (lane_id() == 0) barrier_arrive(barrier, kFillers);
  }

  // All of block `block` of k, by one warp.
  __device__ static void gather(uint32_t target, const DenseSm90Params& p, const OutputTile& tile, int block) {
    const float* a = p.scale_a + tile.batch_a * p.scale_a_batch + static_cast<int64_t>(block) * p.scale_a_block;
    const float* b = p.scale_b + tile.batch_b * p.scale_b_batch + static_cast<int64_t>(block) * p.scale_b_block;
    // This warp has 40 registers: its lane is read anew, or ptxas keeps all that follows from it from tile to tile, and spills.
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
#pragma unroll 1
    for (int i = 0; i < BlockM / kWarpSize; ++i) {
      const int row = i * kWarpSize + lane;
      cp_async_4(target + row_at(row), a + static_cast<int64_t>(min(tile.m + row, p.m - 1)) * p.scale_a_row);
    }
#pragma unroll 1
    for (int i = 0; i < ceil_div(kRuns, kWarpSize); ++i) {
      const int run = i * kWarpSize + lane;
      const int column = min(Epilogue::column_of_b(p, tile.n, run * kRun), p.n - 1) / Options::kScaleColumns;
      if (run < kRuns) cp_async_4(target + kColumnsAt + run * 4, b + static_cast<int64_t>(column) * p.scale_b_column);
    }
  }

  // What a thread keeps of a stage.
  struct Step {
    uint32_t columns_at;
    float rows[kMmaM][2];
    float columns[kEach ? 1 : kRuns];
  };

  // `first_row`: of the consumer's.
  __device__ static void load(Step& step, uint32_t source, const DenseSm90Params& p, const OutputTile& tile, int first_row) {
    const int row = first_row + threadIdx.x / 32 % 4 * 16 + lane_id() / 4;
    const uint32_t rows = source + (kSlack && p.scales_by_tma ? tile.m % 4 * 4 : 0);
#pragma unroll
    for (int i = 0; i < 2 * kMmaM; ++i) step.rows[i / 2][i % 2] = load_float(rows + row_at(row + i / 2 * kRowStep + i % 2 * 8));
    step.columns_at = source + kColumnsAt + lane_id() % 4 * 8;
    if constexpr (!kEach) {
#pragma unroll
      for (int i = 0; i < kRuns; ++i) step.columns[i] = load_float(source + kColumnsAt + i * 4);
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

  __device__ static void store_float(uint32_t shared, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared), "f"(x) : "memory"); }

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
  __device__ static int row_bytes(const DenseSm90Params&) { return 0; }
  __device__ static void copy_rows(uint32_t, const DenseSm90Params&, uint32_t, const OutputTile&, int) {}
  __device__ static void load(Step&, uint32_t, const DenseSm90Params&, const OutputTile&, int) {}
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
