// out[t] = the sum over slots s, in their order, of weights[t][s] * rows[row_of_slot[t][s]], in float32, written once.
//
// A block owns a token and the blocks of grid.y share its columns. Rows of kAhead slots are on their way at a time. A slot
// without a row adds nothing, whatever its weight.
#pragma once

#include <kernelgen/cuda/dependent.cuh>
#include <kernelgen/cuda/vector_io.cuh>

namespace kernelgen {

struct MoeUnpermuteParams {
  const void* rows;            // (tokens * k, width)
  const int32_t* row_of_slot;  // (tokens, k), -1: no row
  void* out;                   // (tokens, width)
  const void* weights;         // (tokens, k), null: 1
  const void* addend;          // (tokens, width), added last, or null
  int64_t row_stride, out_stride, weight_stride, addend_stride;  // in elements
  int64_t width;
  int32_t k;
};

// `Options`: Element (of rows), Out, Weight, Addend, kAccess (elements at a time), kWeighted, kHasAddend, kThreads.
template <class Options>
__device__ void moe_unpermute_cuda(const MoeUnpermuteParams& p) {
  using Element = typename Options::Element;
  constexpr int kAccess = Options::kAccess, kAhead = 4;
  join_previous_kernel();
  const int64_t token = blockIdx.x;
  const int32_t* slots = p.row_of_slot + token * p.k;
  const auto* weights = static_cast<const typename Options::Weight*>(p.weights) + token * p.weight_stride;
  const Element* rows = static_cast<const Element*>(p.rows);

  const int64_t step = static_cast<int64_t>(gridDim.y) * Options::kThreads * kAccess;
  for (int64_t c = (static_cast<int64_t>(blockIdx.y) * Options::kThreads + threadIdx.x) * kAccess; c < p.width; c += step) {
    float sum[kAccess] = {};
    for (int from = 0; from < p.k; from += kAhead) {
      int64_t row[kAhead];
      float value[kAhead][kAccess];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        row[i] = from + i < p.k ? slots[from + i] : -1;
        if (row[i] >= 0) load_elements(value[i], rows + row[i] * p.row_stride + c);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (row[i] < 0) continue;
        const float weight = Options::kWeighted ? to_float(weights[from + i]) : 1.0f;
#pragma unroll
        for (int j = 0; j < kAccess; ++j) sum[j] = fmaf(weight, value[i][j], sum[j]);
      }
    }
    if constexpr (Options::kHasAddend) {
      float addend[kAccess];
      load_elements(addend, static_cast<const typename Options::Addend*>(p.addend) + token * p.addend_stride + c);
#pragma unroll
      for (int j = 0; j < kAccess; ++j) sum[j] += addend[j];
    }
    store_elements(static_cast<typename Options::Out*>(p.out) + token * p.out_stride + c, sum);
  }
}

}  // namespace kernelgen
