// What the parts of gemm/gemm_mma and gemm/grouped_mma share: parameters, compile-time sizes, and a block's share of work.
#pragma once

#include <kernelgen/activation/activations.cuh>
#include <kernelgen/cuda/mma.cuh>
#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/gemm/gate.cuh>
#include <kernelgen/gemm/grouping.cuh>
#include <kernelgen/gemm/mma_operand.cuh>
#include <kernelgen/gemm/operand_tile.cuh>

namespace kernelgen {

// Strides of scales, zero points, bias, c and out are in elements, those of a and b in bytes. A batch entry is a group
// where rows or k are grouped; what all share has a batch stride of 0.
struct GemmMmaParams {
  const void* a;
  const void* b;
  const void* bias;  // (n), null without
  const void* c;     // shape of out, null without; a user's epilogue: partials of its totals (row_totals.h), written
  void* out;
  const float* scale_a;
  const void* scale_b;
  const uint8_t* zero_b;
  const int32_t* ends;         // grouped: where groups end, or masked: how many rows of each exist
  int64_t a_batch, a_stride;   // a_stride: along a's non-contiguous dimension, b_stride: along b's
  int64_t b_batch, b_stride;
  int64_t bias_batch;
  int64_t c_batch, c_row;
  int64_t out_batch, out_row;
  int64_t scale_a_batch, scale_a_row, scale_a_block;
  int64_t scale_b_batch, scale_b_block, scale_b_column;
  int64_t zero_batch, zero_block, zero_column;
  int32_t m, n, k;           // n of b: twice the outputs of a gated activation
  int32_t tiles_m, tiles_n;  // of one batch entry
  int32_t groups;
  float beta;
  float alpha, limit;  // of activations that have them
};

// What a block computes: rows from `row` to at most `row_end`, of which those of one tile, and output columns from `column`.
struct MmaWork {
  int64_t batch;
  int row, row_end, column;
  int k_begin, k_end;
};

// `Options` is the rendered file's struct of compile-time constants:
//   ElementA, ElementB, Product (16-bit type of the multiplication), Out, Bias, C, ScaleB; kActivation, kGate, kGrouping;
//   kBlockM, kBlockN, kBlockK, kWarpsM, kWarpsN, kWarpsK, kStages, kRasterRows;
//   kRowA, kRowB (row order); kAccess (alignment of a and b in bytes), kVectorOut (c and out take 16-byte accesses);
//   kBias, kClamped (gate and up), kAccumulate; kRowScales (of rows and columns, in the epilogue);
//   kPromoteEvery: elements of k after which sums move on to a second set, times kBlockScalesA and kBlockScalesB; 0: never
//   kScaleDepth, kScaleColumns: elements of k and columns that share an entry of scale_b; kZero: int4 with zero points
template <class Options>
struct MmaShape : Options {
  using Options::kBlockK;
  using Options::kBlockM;
  using Options::kBlockN;
  using Options::kGate;
  using Options::kPromoteEvery;
  using Options::kStages;
  using Options::kWarpsK;
  using Options::kWarpsM;
  using Options::kWarpsN;

  static constexpr int kBitsA = kBitsOf<typename Options::ElementA>, kBitsB = kBitsOf<typename Options::ElementB>;
  static constexpr int kWarps = kWarpsM * kWarpsN * kWarpsK;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kWarpRows = kBlockM / kWarpsM;
  static constexpr int kWarpColumns = kBlockN / kWarpsN;
  static constexpr int kTilesM = kWarpRows / 16;     // m16 tiles of a warp
  static constexpr int kTilesN = kWarpColumns / 8;   // n8 tiles
  static constexpr bool kGated = kGate != Gate::kNone;
  static constexpr bool kSplit = kGate == Gate::kGateFirst || kGate == Gate::kUpFirst;
  static constexpr int kBlockOutputs = kGated ? kBlockN / 2 : kBlockN;

  static constexpr bool kFromMiddle = Options::kGrouping == Grouping::kDepth;
  using TileA = OperandTile<kBlockM, kBlockK, kBitsA, Options::kRowA, false, kFromMiddle, kThreads, Options::kAccess>;
  using TileB = OperandTile<kBlockN, kBlockK, kBitsB, !Options::kRowB, kSplit, kFromMiddle, kThreads, Options::kAccess>;
  static constexpr bool kOctets = kBitsB == 4;
  using OperandA = MmaOperand<typename TileA::Tile, kBitsA, Options::kRowA, true, kOctets>;
  using OperandB = MmaOperand<typename TileB::Tile, kBitsB, !Options::kRowB, false, kOctets>;

  static constexpr int kStepK = OperandA::kStepK;       // of k that one load of fragments brings
  static constexpr int kProducts = kStepK / 16;         // k16 products in it
  static constexpr int kDepth = kBlockK / kWarpsK;      // a warp's share of a tile
  static constexpr int kSteps = kDepth / kStepK;
  static constexpr int kShares = max_of(1, kSteps - 1);  // of a tile's copies, one in each step but the last
  static_assert(kStepK == OperandB::kStepK, "a and b are multiplied in the same order");
  static_assert(kWarpRows % 16 == 0 && kWarpColumns % 16 == 0, "fragments hold 16 rows and 16 columns");
  static_assert(!kSplit || kWarpColumns % (2 * TileB::kRun) == 0, "a warp owns both halves of its outputs");
  static_assert((kWarpRows & (kWarpRows - 1)) == 0 && (kWarpColumns & (kWarpColumns - 1)) == 0 &&
                (kSteps & (kSteps - 1)) == 0 && kSteps > 0, "swizzled addresses are stepped by powers of two");

  static constexpr bool kPromotes = kPromoteEvery > 0;
  static constexpr int kPromoteK = kPromotes ? min_of(kPromoteEvery, kDepth) : kDepth;  // a warp's k between two promotions
  static constexpr int kPromoteSteps = kPromoteK / kStepK;
  static_assert(kDepth % kPromoteK == 0 && (!kPromotes || kPromoteEvery % kPromoteK == 0), "a warp's share of k ends with a promotion");

  // Product row or column, counted from the warp's first, of an accumulator.
  __device__ static int row_of(int m, int half, int g) { return 16 * m + OperandA::outer_of(half, g); }
  __device__ static int column_of(int n, int c) { return n / 2 * 16 + OperandB::outer_of(n % 2, c); }

  struct WarpPosition {
    int m, n, k;
  };
  __device__ static WarpPosition warp_position() {
    const int warp = warp_id();
    return {warp % kWarpsM, warp / kWarpsM % kWarpsN, warp / (kWarpsM * kWarpsN)};
  }
};

}  // namespace kernelgen
