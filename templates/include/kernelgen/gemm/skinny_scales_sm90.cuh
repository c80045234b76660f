// Scales of blocks of 128 along k for gemm/skinny_sm90, whose sums have columns of b for rows and rows of a for columns.
//
// They travel through the ring like the operands, brought by a warp of their own (see block_scales_sm90.cuh): for each 128 of k one
// for every column of the tile, whether columns share it or not, and one for every row of a.
#pragma once

#include <kernelgen/cuda/cp_async.cuh>
#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/sm90/wgmma.cuh>

namespace kernelgen {

// Params: scale_a, scale_b and their strides, as in SkinnySm90Params.
template <class Options, class Params>
struct SkinnyBlockScales {
  static constexpr int kMmaM = Options::kMmaM, kTokens = Options::kTokens;
  static constexpr int kRows = kMmaM * kMmaRows;
  static constexpr bool kScaled = Options::kBlockScales;
  static constexpr int kBytes = kScaled ? round_up((kRows + kTokens) * 4, 128) : 0;  // of one block of k
  static constexpr int kFillers = kScaled ? kWarpSize : 0;                          // arrivals at the stage's full barrier

  // Those of block `block`, or of the last one past the end, by one warp. `column_of_b(row)`: of a row of the tile.
  template <class ColumnOfB>
  __device__ static void copy(uint32_t target, const Params& p, int first_token, int batch, int block, ColumnOfB column_of_b) {
    const int64_t at = min(block, ceil_div(p.k, 128) - 1);
    const float* a = p.scale_a + batch * p.scale_a_batch + at * p.scale_a_block;
    const float* b = p.scale_b + batch * p.scale_b_batch + at * p.scale_b_block;
#pragma unroll
    for (int i = 0; i < kRows / kWarpSize; ++i) {
      const int row = i * kWarpSize + lane_id(), column = min(column_of_b(row), p.n - 1) / Options::kScaleColumns;
      cp_async_4(target + row * 4, b + static_cast<int64_t>(column) * p.scale_b_column);
    }
#pragma unroll
    for (int i = 0; i < ceil_div(kTokens, kWarpSize); ++i) {
      const int token = i * kWarpSize + lane_id();
      if (kTokens % kWarpSize != 0 && token >= kTokens) break;
      cp_async_4(target + (kRows + token) * 4, a + static_cast<int64_t>(min(first_token + token, p.m - 1)) * p.scale_a_row);
    }
  }

  // A thread's own.
  struct Step {
    float columns[kMmaM][2];
    float tokens[kTokens / 8][2];
  };

  __device__ static void load(Step& step, uint32_t source) {
    if constexpr (kScaled) {
      const int row = threadIdx.x / 32 % 4 * 16 + lane_id() / 4;
#pragma unroll
      for (int i = 0; i < 2 * kMmaM; ++i) {
        step.columns[i / 2][i % 2] = __uint_as_float(load_word(source + (i / 2 * kMmaRows + row + i % 2 * 8) * 4));
      }
#pragma unroll
      for (int i = 0; i < kTokens / 8; ++i) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(step.tokens[i][0]), "=f"(step.tokens[i][1])
                     : "r"(source + (kRows + i * 8 + lane_id() % 4 * 2) * 4));
      }
    }
  }

  // totals += sums, scaled.
  __device__ static void add(float (&totals)[kMmaM][kTokens / 2], const float (&sums)[kMmaM][kTokens / 2], const Step& step) {
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) {
        if constexpr (kScaled) {
          totals[m][i] = fmaf(sums[m][i], step.columns[m][i % 4 / 2] * step.tokens[i / 4][i % 2], totals[m][i]);
        } else {
          totals[m][i] += sums[m][i];
        }
      }
    }
  }
};

}  // namespace kernelgen
