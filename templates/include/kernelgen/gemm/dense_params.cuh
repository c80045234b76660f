// Parameters of gemm/dense_sm90 and gemm/grouped_sm90.
#pragma once

#include <kernelgen/sm90/tma.cuh>

namespace kernelgen {

// Strides are in elements. A batch entry is a group where rows or k are grouped.
struct DenseSm90Params {
  // Boxes: a and b of one stage, out 64 rows of 128 bytes, and of what is left of a
  // tile's row, which is not swizzled; scale_a for the rows of a tile.
  TensorMap map_a, map_b, map_out, map_rest, map_scales;
  const void* a;
  const void* b;
  const void* out;
  const void* bias;      // (n), null without
  const void* c;         // shape of out, null without; a user's epilogue: partials of its totals (row_totals.h), written
  const float* scale_a;  // (m) or one; blocks: (m, k / 128)
  const float* scale_b;  // (n) or one; blocks: (k / 128, n or n / 128)
  float* out_scale;      // out of codes: (m, outputs / 128)
  const int32_t* ends;   // grouped: where groups end, or masked: how many rows of each exist
  const int32_t* rows;   // gathered: the row of a for each row of the product; scattered: the row of out
  int32_t* counter;      // tiles dealt out, blocks that are done: both zero between launches
  const float* row_weights;  // scattered: (m), what each row of the product is multiplied by
  int64_t c_batch, c_row, out_batch, out_row, bias_batch, scale_a_batch, scale_b_batch;
  int64_t out_scale_batch, out_scale_row, out_scale_block;
  int32_t m, n, k;           // n of b: twice the outputs of a gated activation
  int32_t tiles_m, tiles_n;  // in clusters
  int32_t tiles;             // of all batch entries; with groups of rows nobody knows
  int32_t groups;
  int32_t batched_a, batched_b;                                         // 0: one for all
  int32_t scale_a_row, scale_a_block, scale_b_column, scale_b_block;  // strides: 0 for one scale
  int32_t scales_by_tma;                                              // map_scales exists
  int32_t a_row;                                                      // gathered: between rows of a, in units of 16 bytes
  float beta, alpha, limit;                                           // alpha, limit: of activations that have them
};

}  // namespace kernelgen
