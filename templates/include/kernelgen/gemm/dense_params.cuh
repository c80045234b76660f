// Parameters of gemm/dense_sm90, and what the columns of b are to a gated activation.
#pragma once

#include <kernelgen/sm90/tma.cuh>

namespace kernelgen {

// Strides are in elements.
struct DenseSm90Params {
  // Boxes: a and b of one stage, out 64 rows of 128 bytes, and of what is left of a
  // tile's row, which is not swizzled.
  TensorMap map_a, map_b, map_out, map_rest;
  const void* a;
  const void* b;
  const void* out;
  const void* bias;     // (n), null without
  const void* c;        // shape of out, null without
  const float* scale_a;  // (m) or one
  const float* scale_b;  // (n) or one
  int64_t c_batch, c_row, out_batch, out_row, scale_a_batch, scale_b_batch;
  int32_t m, n, k;           // n of b: twice the outputs of a gated activation
  int32_t tiles_m, tiles_n;  // in clusters
  int32_t tiles;             // of all batch entries
  int32_t batched_b;         // 0: one b for all
  int32_t scale_a_row, scale_b_column;  // strides as above: 0 for one scale
  float beta;
};

}  // namespace kernelgen
