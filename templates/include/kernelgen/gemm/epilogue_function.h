// What a user's epilogue sees of one element of a product; host and device code share this file. A rendered kernel defines
// `struct EpilogueFunction` (kernelgen/variants/emit.py) with
//
//   static KERNELGEN_DEVICE float value(float x, float y, const EpilogueContext& c, const int64_t* args);
//
// where y is what a gate x gates, and `args` a block of 8-byte words (kernelgen/variants/arguments.py) that comes in the place of the bias.
#pragma once

#include "kernelgen/attention/variant_math.h"

namespace kernelgen {

// Of the output: `batch` of all leading dimensions. Elements past the last row or column are computed, too, and stored nowhere.
struct EpilogueContext {
  int32_t batch, row, column;
};

}  // namespace kernelgen
