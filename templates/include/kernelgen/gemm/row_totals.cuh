// Reductions over rows on a GPU (row_totals.h): what a thread and the lanes of its row have, and the second pass.
#pragma once

#include <kernelgen/cuda/dependent.cuh>
#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/gemm/row_totals.h>

namespace kernelgen {

// Of a user's function and kRows rows of a thread.
template <class Function, int kRows, int kCount = TotalsOf<Function>::kCount>
struct RowParts {
  float of[kCount][kRows];

  __device__ RowParts() {
#pragma unroll
    for (int i = 0; i < kCount * kRows; ++i) of[i / kRows][i % kRows] = Function::none(i / kRows);
  }
  // What the function makes of an element, whose terms count if it exists.
  __device__ float value(float x, float y, int batch, int row, int column, const void* args, bool exists, int r = 0) {
    float terms[kCount];
    const float made = Function::value(x, y, {batch, row, column}, static_cast<const int64_t*>(args), terms);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (exists) of[i][r] = Function::both(i, of[i][r], terms[i]);
    }
    return made;
  }
  // Partials of kLanes lanes of one row, by all lanes of a warp, to `memory` + `at`; `step`: from one total's to the next.
  template <int kLanes>
  __device__ void leave(const void* memory, int64_t at, int64_t step, bool exists, int r = 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i, at += step) {
#pragma unroll
      for (int lanes = 1; lanes < kLanes; lanes *= 2) of[i][r] = Function::both(i, of[i][r], __shfl_xor_sync(kFullWarp, of[i][r], lanes));
      if (exists && lane_id() % kLanes == 0) static_cast<float*>(const_cast<void*>(memory))[at] = of[i][r];
    }
  }
};

template <class Function, int kRows>
struct RowParts<Function, kRows, 0> {
  __device__ float value(float x, float y, int batch, int row, int column, const void* args, bool, int = 0) {
    return Function::value(x, y, {batch, row, column}, static_cast<const int64_t*>(args));
  }
};

struct RowTotalsParams {
  const float* partials;
  float* total;                     // (rows)
  int32_t m, rows, tiles, maximum;  // rows: of all batch entries
};

// One total's partials (batch, tiles, m) in the order of the tiles, by one thread for a row. So many loads are on their way at a time; past
// the last tile it is that of the last.
__device__ inline void add_up_row(const RowTotalsParams& p) {
  join_previous_kernel();
  constexpr int kAhead = 16;
  const int row = blockIdx.x * 128 + threadIdx.x;
  if (row >= p.rows) return;
  const float* partials = p.partials + static_cast<int64_t>(row / p.m) * p.tiles * p.m + row % p.m;
  float total = p.maximum ? -infinity() : 0.0f;
#pragma unroll 1
  for (int first = 0; first < p.tiles; first += kAhead) {
    float parts[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) parts[i] = partials[static_cast<int64_t>(min(first + i, p.tiles - 1)) * p.m];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= p.tiles) break;
      total = !p.maximum ? total + parts[i] : total != total || total > parts[i] ? total : parts[i];  // a NaN stays
    }
  }
  p.total[row] = total;
}

}  // namespace kernelgen
