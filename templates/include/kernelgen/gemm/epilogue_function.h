// What a user's epilogue sees of one element of a product; host and device code share this file. A rendered kernel defines
// `struct EpilogueFunction` (kernelgen/variants/emit.py) with
//
//   static KERNELGEN_DEVICE float value(float x, float y, const EpilogueContext& c, const int64_t* args);
//
// or, where it reduces over rows, that with `float (&terms)[kTotals]` behind it, and RowTotals<float, kTotals, kMaxima> as its base;
// y is what a gate x gates, and `args` a block of 8-byte words (kernelgen/variants/arguments.py) that comes in the place of the bias.
#pragma once

#include "kernelgen/attention/variant_math.h"

namespace kernelgen {

// Of the output: `batch` of all leading dimensions. Elements past the last row or column are computed, too, and stored nowhere.
struct EpilogueContext {
  int32_t batch, row, column;
};

// Bits of kMaxima: what is the largest; the others are sums.
template <class T, int kCount, unsigned kMaxima>
struct RowTotals {
  static constexpr int kTotals = kCount;
  static KERNELGEN_DEVICE T none(int i) { return kMaxima >> i & 1 ? -variant_math::infinity<T>() : static_cast<T>(0); }
  static KERNELGEN_DEVICE T both(int i, T a, T b) { return kMaxima >> i & 1 ? variant_math::maximum(a, b) : a + b; }
};

}  // namespace kernelgen
