// Each token's row to the rows of its slots: read once, written as often as the token has experts here.
//
// A block owns a token and the blocks of grid.y share its columns. Rows are copied in units of up to 16 bytes, whatever their
// elements are, or multiplied by the slot's weight on the way. Scales of quantised rows move along; weights multiply them then,
// so that codes stay what they are.
#pragma once

#include <kernelgen/cuda/dependent.cuh>
#include <kernelgen/cuda/vector_io.cuh>

namespace kernelgen {

struct MoePermuteParams {
  const void* x;               // (tokens, width)
  const int32_t* row_of_slot;  // (tokens, k), -1, or any that is none: no row
  void* rows;                  // (tokens * k, width)
  const void* weights;         // (tokens, k) or null
  const float* scale;          // (tokens, scales) or null
  float* scale_rows;           // (tokens * k, scales)
  int64_t x_stride, row_stride;  // in units, as is width
  int64_t weight_stride, scale_token, scale_block, scale_rows_row, scale_rows_block;  // in elements
  int64_t width;
  int32_t k, scales;
};

// `Options`: Unit (an element, or what is copied at a time), Weight, kAccess (units at a time), kCopies, kWeighted, kHasScales,
// kThreads.
template <class Options>
__device__ void moe_permute_cuda(const MoePermuteParams& p) {
  using Unit = typename Options::Unit;
  constexpr int kAccess = Options::kAccess;
  join_previous_kernel();
  const int64_t token = blockIdx.x;
  const int32_t* slots = p.row_of_slot + token * p.k;
  const auto* weights = static_cast<const typename Options::Weight*>(p.weights) + token * p.weight_stride;
  const Unit* x = static_cast<const Unit*>(p.x) + token * p.x_stride;
  Unit* rows = static_cast<Unit*>(p.rows);
  const int64_t all = static_cast<int64_t>(gridDim.x) * p.k;  // rows: a sort may be anybody's

  const int64_t step = static_cast<int64_t>(gridDim.y) * Options::kThreads * kAccess;
  for (int64_t c = (static_cast<int64_t>(blockIdx.y) * Options::kThreads + threadIdx.x) * kAccess; c < p.width; c += step) {
    if constexpr (Options::kCopies) {
      const Unit value = x[c];
#pragma unroll 4
      for (int s = 0; s < p.k; ++s) {
        const int64_t row = slots[s];
        if (row >= 0 && row < all) rows[row * p.row_stride + c] = value;
      }
    } else {
      float value[kAccess];
      load_elements(value, x + c);
#pragma unroll 4
      for (int s = 0; s < p.k; ++s) {
        const int64_t row = slots[s];
        if (row < 0 || row >= all) continue;
        const float weight = to_float(weights[s]);
        float scaled[kAccess];
#pragma unroll
        for (int i = 0; i < kAccess; ++i) scaled[i] = value[i] * weight;
        store_elements(rows + row * p.row_stride + c, scaled);
      }
    }
  }
  if constexpr (Options::kHasScales) {
    if (blockIdx.y > 0) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < p.k * p.scales; i += Options::kThreads) {
      const int s = i / p.scales, at = i - s * p.scales;
      const int64_t row = slots[s];
      if (row < 0 || row >= all) continue;
      const float scale = p.scale[token * p.scale_token + at * p.scale_block];
      p.scale_rows[row * p.scale_rows_row + at * p.scale_rows_block] = Options::kWeighted ? scale * to_float(weights[s]) : scale;
    }
  }
}

}  // namespace kernelgen
