// Scales of blocks of 128 along k for gemm/skinny_sm90, whose sums have columns of b for rows and rows of a for columns.
//
// A thread reads those of its own columns of b a step before their products are done, and those of few rows of a too. Of many rows
// (kStaged) the block brings its whole share into shared memory at first, [block of k][row]: a thread needs a quarter of them all at
// every step, which read one by one took longer than the products (M = 128, 4096 x 7168: 28.9 us, H200, 2026-11-30).
#pragma once

#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/sm90/wgmma.cuh>

namespace kernelgen {

// Params: scale_a, scale_b and their strides, as in SkinnySm90Params.
template <class Options, class Params>
struct SkinnyBlockScales {
  static constexpr int kMmaM = Options::kMmaM, kTokens = Options::kTokens;
  static constexpr bool kScaled = Options::kBlockScales;
  static constexpr bool kStaged = kScaled && kTokens >= 32;

  // Elements from the scales of block 0, of each column and row of this thread.
  const float *a, *b;
  int column[kMmaM][2];
  int token;  // the first of them
  int last;   // block
  uint32_t staged;  // shared address of the scales of block `first`
  int first;

  // `column_of_b(row)`: of a row of the tile.
  template <class ColumnOfB>
  __device__ SkinnyBlockScales(const Params& p, int batch, uint32_t staged, int first, ColumnOfB column_of_b)
      : staged(staged), first(first) {
    if constexpr (kScaled) {
      a = p.scale_a + batch * p.scale_a_batch;
      b = p.scale_b + batch * p.scale_b_batch;
      token = lane_id() % 4 * 2;
      last = ceil_div(p.k, 128) - 1;
#pragma unroll
      for (int i = 0; i < 2 * kMmaM; ++i) {
        const int row = i / 2 * kMmaRows + threadIdx.x / 32 % 4 * 16 + lane_id() / 4 + i % 2 * 8;
        column[i / 2][i % 2] = min(column_of_b(row), p.n - 1) / Options::kScaleColumns;
      }
    }
  }

  // Blocks [first, end) of all rows of a, by `threads` threads; a barrier must follow.
  __device__ void stage(const Params& p, int end, int thread, int threads) const {
    if constexpr (kStaged) {
#pragma unroll 4
      for (int i = thread; i < (end - first) * kTokens; i += threads) {
        const int row = min(i % kTokens, p.m - 1), block = min(first + i / kTokens, last);
        const float scale = a[static_cast<int64_t>(row) * p.scale_a_row + static_cast<int64_t>(block) * p.scale_a_block];
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(staged + i * 4), "f"(scale) : "memory");
      }
    }
  }

  struct Step {
    float columns[kMmaM][2];
    float tokens[kTokens / 8][2];
  };

  // Blocks past the end have no products, and any scale.
  __device__ void load(Step& step, const Params& p, int block) const {
    if constexpr (kScaled) {
      const int64_t at = min(block, last);
      const float *row_a = a + at * p.scale_a_block, *row_b = b + at * p.scale_b_block;
#pragma unroll
      for (int i = 0; i < 2 * kMmaM; ++i) {
        step.columns[i / 2][i % 2] = row_b[static_cast<int64_t>(column[i / 2][i % 2]) * p.scale_b_column];
      }
      if constexpr (!kStaged) {
#pragma unroll
        for (int i = 0; i < kTokens / 4; ++i) {
          step.tokens[i / 2][i % 2] = row_a[static_cast<int64_t>(min(token + i / 2 * 8 + i % 2, p.m - 1)) * p.scale_a_row];
        }
      }
    }
  }

  // The staged ones, beside the products.
  __device__ void load_staged(Step& step, int block) const {
    if constexpr (kStaged) {
      const uint32_t source = staged + ((block - first) * kTokens + token) * 4;
#pragma unroll
      for (int i = 0; i < kTokens / 8; ++i) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(step.tokens[i][0]), "=f"(step.tokens[i][1]) : "r"(source + i * 32));
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
