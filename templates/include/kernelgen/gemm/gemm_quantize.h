// The last phase of a CPU product whose output is quantised: rows of the float workspace to fp8 codes and scales. With one
// scale for all, a phase before it finds the largest magnitude. Rows that belong to no group are left alone.
#pragma once

#include "kernelgen/gemm/gemm_params.h"
#include "kernelgen/quantize/quantize_rows.h"

namespace kernelgen {

// `Options`: Code, kGrouping, kRecipe.
template <class Options>
struct GemmQuantize {
  using Code = typename Options::Code;
  // Of a batch entry of the output; one at least, which writes a scale for no values.
  static int64_t entry_tasks(const GemmCpuParams& p) { return p.m > 0 ? (p.m + p.quantize_rows - 1) / p.quantize_rows : 1; }

  // each(batch, row, values of the row)
  template <class Each>
  static void for_rows(const GemmCpuParams& p, int64_t task, Each each) {
    const int64_t batch = task / entry_tasks(p), row = task % entry_tasks(p) * p.quantize_rows;
    const int64_t used = rows_in_use<Options::kGrouping>(p, batch);
    for (int64_t r = row; r < row + p.quantize_rows && r < used; ++r) {
      each(batch, r, static_cast<const float*>(p.out) + batch * p.out_batch + r * p.out_row);
    }
  }

  static void find_largest(const GemmCpuParams& p, int64_t task) {
    uint32_t largest = 0;
    for_rows(p, task, [&](int64_t, int64_t, const float* x) { largest = largest_magnitude(x, p.n, largest); });
    static_cast<uint32_t*>(p.out)[p.amax_offset + task] = largest;
  }

  static void quantize(const GemmCpuParams& p, int64_t task) {
    float shared = 0;
    if constexpr (Options::kRecipe == Recipe::kTensor) {
      const auto* found = static_cast<const uint32_t*>(p.out) + p.amax_offset;
      uint32_t largest = 0;
      for (int64_t i = 0; i < p.quantize_tasks; ++i) largest = largest > found[i] ? largest : found[i];
      shared = scale_for<Code>(largest);
      if (task == 0) *static_cast<float*>(p.out_scale) = shared;
    }
    for_rows(p, task, [&](int64_t batch, int64_t r, const float* x) {
      Code* codes = static_cast<Code*>(p.codes) + batch * p.codes_batch + r * p.codes_row;
      float* scale = static_cast<float*>(p.out_scale) + batch * p.out_scale_batch + r * p.out_scale_row;
      if constexpr (Options::kRecipe == Recipe::kTensor) {
        quantize_row(x, codes, p.n, shared);
      } else if constexpr (Options::kRecipe == Recipe::kRow) {
        *scale = quantize_tile(x, 0, codes, 0, 1, p.n);
      } else {
        for (int64_t j = 0; j < p.n; j += kScaleBlock) {
          const int64_t width = p.n - j < kScaleBlock ? p.n - j : kScaleBlock;
          scale[j / kScaleBlock * p.out_scale_block] = quantize_tile(x + j, 0, codes + j, 0, 1, width);
        }
      }
    });
  }
};

}  // namespace kernelgen
