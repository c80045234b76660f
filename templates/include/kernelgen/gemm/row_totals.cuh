// The second pass of reductions over rows (row_totals.h): one total's partials (batch, tiles, m) added up in the order of the tiles.
#pragma once

#include <kernelgen/attention/variant_math.h>
#include <kernelgen/cuda/dependent.cuh>

namespace kernelgen {

struct RowTotalsParams {
  const float* partials;
  float* total;  // (batch, m)
  int32_t m, rows, tiles, maximum;  // rows: of all batch entries
};

// One thread for a row. So many loads are on their way at a time; past the last tile it is that of the last.
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
      if (first + i < p.tiles) total = p.maximum ? variant_math::maximum(total, parts[i]) : total + parts[i];
    }
  }
  p.total[row] = total;
}

}  // namespace kernelgen
