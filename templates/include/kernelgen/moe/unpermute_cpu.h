// out[t] = the sum over slots s, in their order, of weights[t][s] * rows[row_of_slot[t][s]], in float32 (double for double),
// written once. A task owns task_tokens tokens. A slot without a row adds nothing, whatever its weight.
#pragma once

#include "kernelgen/cpu/vec.h"

namespace kernelgen {

struct MoeUnpermuteCpuParams {
  const void* rows;            // (tokens * k, width)
  const int32_t* row_of_slot;  // (tokens, k), -1, or any that is none: no row
  void* out;                   // (tokens, width)
  const void* weights;         // (tokens, k), null: 1
  const void* addend;          // (tokens, width), added last, or null
  int64_t row_stride, out_stride, weight_stride, addend_stride;  // in elements
  int64_t width, k;
  int64_t tokens, task_tokens;
};

// `Options`: Element (of rows), Out, Weight, Addend, kWeighted, kHasAddend.
template <class Options>
struct MoeUnpermuteCpu {
  using T = typename Options::Element;
  using Sum = Accumulator<T>;
  using V = Simd<Sum>;

  // A row that counts.
  struct Part {
    const T* row;
    Sum weight;
  };

  // `scratch`: k parts.
  static void run(const MoeUnpermuteCpuParams& p, int64_t task, void* scratch) {
    Part* parts = static_cast<Part*>(scratch);
    const int64_t all = p.tokens * p.k, first = task * p.task_tokens, end = first + p.task_tokens < p.tokens ? first + p.task_tokens : p.tokens;
    for (int64_t t = first; t < end; ++t) {
      int64_t count = 0;
      for (int64_t s = 0; s < p.k; ++s) {
        const int64_t row = p.row_of_slot[t * p.k + s];
        if (row < 0 || row >= all) continue;
        Part& part = parts[count++];
        part.row = static_cast<const T*>(p.rows) + row * p.row_stride;
        part.weight = 1;
        if constexpr (Options::kWeighted) {
          part.weight = static_cast<Sum>(widen(static_cast<const typename Options::Weight*>(p.weights)[t * p.weight_stride + s]));
        }
      }
      auto* out = static_cast<typename Options::Out*>(p.out) + t * p.out_stride;
      const auto* addend = static_cast<const typename Options::Addend*>(p.addend) + t * p.addend_stride;
      for (int64_t c = 0; c < p.width; c += V::kLanes) {
        const int64_t n = p.width - c;
        typename V::Reg sum = V::zero();
        for (int64_t i = 0; i < count; ++i) sum = V::fma(V::broadcast(parts[i].weight), V::load_first(parts[i].row + c, n), sum);
        if constexpr (Options::kHasAddend) sum = sum + V::load_first(addend + c, n);
        V::store_first(out + c, sum, n);
      }
    }
  }
};

}  // namespace kernelgen
