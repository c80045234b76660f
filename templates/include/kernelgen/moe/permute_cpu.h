// Each token's row to the rows of its slots, as it is or multiplied by the slot's weight. A task owns task_tokens tokens.
//
// Scales of quantised rows move along; weights multiply them then, so that codes stay what they are.
#pragma once

#include "kernelgen/cpu/vec.h"

namespace kernelgen {

struct MoePermuteCpuParams {
  const void* x;               // (tokens, width)
  const int32_t* row_of_slot;  // (tokens, k), -1, or any that is none: no row
  void* rows;                  // (tokens * k, width)
  const void* weights;         // (tokens, k) or null
  const float* scale;          // (tokens, scales) or null
  float* scale_rows;           // (tokens * k, scales)
  int64_t x_stride, row_stride, weight_stride, scale_token, scale_block, scale_rows_row, scale_rows_block;  // in elements
  int64_t width, k, scales;
  int64_t tokens, task_tokens;
};

// out = x * weight for `width` elements.
template <class T>
void scale_row(const T* x, Accumulator<T> weight, T* out, int64_t width) {
  using V = Simd<Accumulator<T>>;
  for (int64_t c = 0; c < width; c += V::kLanes) {
    V::store_first(out + c, V::load_first(x + c, width - c) * V::broadcast(weight), width - c);
  }
}

// `Options`: Element (an unsigned integer of its size where it is copied), Weight, kCopies, kWeighted, kHasScales.
template <class Options>
void moe_permute_cpu(const MoePermuteCpuParams& p, int64_t task) {
  using T = typename Options::Element;
  const int64_t all = p.tokens * p.k, first = task * p.task_tokens, end = first + p.task_tokens < p.tokens ? first + p.task_tokens : p.tokens;
  for (int64_t t = first; t < end; ++t) {
    const T* x = static_cast<const T*>(p.x) + t * p.x_stride;
    const auto* weights = static_cast<const typename Options::Weight*>(p.weights) + t * p.weight_stride;
    for (int64_t s = 0; s < p.k; ++s) {
      const int64_t row = p.row_of_slot[t * p.k + s];
      if (row < 0 || row >= all) continue;
      T* out = static_cast<T*>(p.rows) + row * p.row_stride;
      if constexpr (Options::kCopies) std::memcpy(out, x, p.width * sizeof(T));
      else scale_row<T>(x, static_cast<Accumulator<T>>(widen(weights[s])), out, p.width);
      if constexpr (Options::kHasScales) {
        for (int64_t i = 0; i < p.scales; ++i) {
          float scale = p.scale[t * p.scale_token + i * p.scale_block];
          if constexpr (Options::kWeighted) scale *= static_cast<float>(widen(weights[s]));
          p.scale_rows[row * p.scale_rows_row + i * p.scale_rows_block] = scale;
        }
      }
    }
  }
}

}  // namespace kernelgen
