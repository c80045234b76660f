// What a rendered attention kernel is made of: sizes, shared tiles, fragments, and which thread holds which row.
//
// `Options` is the rendered file's struct of compile-time constants:
//   Element            what the tensor cores multiply: bf16 or fp16
//   QueryElement, KeyElement, OutElement   as stored; fp8 is converted to Element on the way to shared memory
//   kHeadDim, kHeadDimV, kRopeDim          MLA: the last kRopeDim of kHeadDim come from tensors of their own
//   kPlainRope         that part of the keys is of type Element beside fp8 latent rows, and has no scale
//   kRagged, kKvLens, kBoundedLeft, kBoundedRight, kSoftCap, kLse, kAlibi, kSinks, kScales, kPageScales
//   kFlatGrid          dense and ragged: more heads or requests than a grid has in y and z, so all of it lies in x
//   kMask              0 none, or MaskForm;  kVariant: VariantFunctions is defined
//   kSoftmax           false: the scores of a variant are the weights themselves, see mma_weights.cuh
//   kAlignment         bytes
//   kBlockQ, kBlockK, kWarps, kStages, kQueryInRegisters, kValueSplits, kKeyWarps
#pragma once

#include <kernelgen/cuda/types.cuh>  // in front of variant.h, which needs the names of integers
#include <kernelgen/attention/variant.h>
#include <kernelgen/cuda/conversions.cuh>
#include <kernelgen/cuda/cp_async.cuh>
#include <kernelgen/cuda/fp8.cuh>
#include <kernelgen/cuda/ldmatrix.cuh>
#include <kernelgen/cuda/math.cuh>
#include <kernelgen/cuda/memory.cuh>
#include <kernelgen/cuda/mma.cuh>
#include <kernelgen/cuda/shared_tile.cuh>
#include <kernelgen/cuda/warp.cuh>

namespace kernelgen {

// Given masks: bool with four strides; bool or packed little-endian bits, row-major per request.
enum MaskForm { kNoMask = 0, kDenseMask = 1, kFlatMask = 2, kPackedMask = 3 };

// Keys [first, last).
struct Interval {
  int first, last;
};

template <class Options>
struct AttentionShape : Options {
  using T = typename Options::Element;
  using Options::kBlockK;
  using Options::kBlockQ;
  using Options::kHeadDim;
  using Options::kHeadDimV;
  using Options::kKeyWarps;
  using Options::kStages;
  using Options::kValueSplits;
  using Options::kWarps;

  // A group of threads walks one sequence of key tiles. Usually that is the block. With kKeyWarps above 1 each warp is a
  // group of its own, with its own shared memory, and takes every kKeyWarps-th tile; their results are added at the end.
  static constexpr int kThreads = kWarps * kKeyWarps * kWarpSize;
  static constexpr int kGroupThreads = kWarps * kWarpSize;
  static_assert(kKeyWarps == 1 || kWarps == 1, "a group that shares its block is one warp");

  static constexpr int kWarpRows = kBlockQ / kWarps;
  static constexpr int kRowTiles = kWarpRows / 16;
  static constexpr int kDepth = round_up(kHeadDim, 16);
  static constexpr int kSplitColumns = round_up(ceil_div(kHeadDimV, kValueSplits), 16);  // value columns of a block
  static constexpr int kKeyTiles = kBlockK / 8;
  static constexpr int kValueTiles = kSplitColumns / 8;

  static_assert(kBlockQ % (16 * kWarps) == 0, "a warp owns whole 16-row tiles");
  static_assert(kBlockK % 16 == 0, "P is the A operand of k16 steps");
  static_assert(Options::kSoftmax || !(Options::kLse || Options::kSinks), "an LSE and sinks are parts of a softmax");

  // Only a bounded side makes rows of one tile see different keys by position; a given mask or a variant may hide any key.
  static constexpr bool kWindowed = Options::kBoundedLeft || Options::kBoundedRight;
  static constexpr bool kAnyHidden = Options::kMask != kNoMask || Options::kVariant;
  static constexpr bool kMayHide = kWindowed || kAnyHidden;
  // Logits that are more than a factor times the score: they are computed in natural units, one by one.
  static constexpr bool kNatural = Options::kAlibi || Options::kVariant || Options::kScales || Options::kPageScales;

  // fp8 keys and values arrive in a ring of bytes and are widened into one 16-bit tile each.
  static constexpr bool kStaged = is_fp8_v<typename Options::KeyElement>;
  static constexpr int kTileSlots = kStaged ? 1 : kStages;

  // Columns of keys in KeyTile. A plain rope part is of no use to the widening: it has tiles of its own, in a ring of its own.
  static constexpr bool kPlainRope = Options::kPlainRope;
  static constexpr int kKeyColumns = kHeadDim - (kPlainRope ? Options::kRopeDim : 0);
  static constexpr int kKeyDepth = round_up(kKeyColumns, 16);
  static_assert(!kPlainRope || (kStaged && kKeyColumns % 16 == 0), "the rope part begins at a k16 step");

  using QueryTile = SharedTile<kBlockQ, kDepth>;
  using KeyTile = SharedTile<kBlockK, kKeyDepth>;
  using RopeTile = SharedTile<kBlockK, round_up(max_of(Options::kRopeDim, 8), 16)>;
  using ValueTile = SharedTile<kBlockK, kSplitColumns>;
  using OutTile = SharedTile<kBlockQ, kSplitColumns>;

  // Shared memory of a group: Q, then key tiles, then value tiles, then the bytes of fp8 keys and values, then scales of
  // keys and of values, then plain rope tiles. The output tile, or what the warps of a block exchange at the end, reuses the front.
  static constexpr int kKeyBase = QueryTile::kBytes;
  static constexpr int kValueBase = kKeyBase + kTileSlots * KeyTile::kBytes;
  static constexpr int kBytesBase = kValueBase + kTileSlots * ValueTile::kBytes;
  static constexpr int kKeyStageBytes = kBlockK * kKeyDepth;
  static constexpr int kStageBytes = kStaged ? kKeyStageBytes + kBlockK * kSplitColumns : 0;
  static constexpr int kScaleBase = kBytesBase + kStages * kStageBytes;
  // One slot more than stages: a slot of bytes is free once it is widened, its scales and rope only after the tile's product.
  static constexpr int kScaleSlots = Options::kPageScales ? kStages + 1 : 0;
  static constexpr int kScaleSlotBytes = 2 * kBlockK * 4;
  static constexpr int kRopeBase = kScaleBase + kScaleSlots * kScaleSlotBytes;
  static constexpr int kRopeSlots = kPlainRope ? kStages + 1 : 0;
  static constexpr int kGroupBytes = kRopeBase + kRopeSlots * RopeTile::kBytes;

  // A lane holds two rows of each 16-row tile: row_half 0 is row lane / 4, row_half 1 is 8 below.
  static constexpr int kLaneRows = 2 * kRowTiles;
  static constexpr int kExchangeFloats = kRowTiles * kValueTiles * 4 + 2 * kLaneRows;  // of one lane
  static constexpr int kExchangeBytes = (kKeyWarps - 1) * kExchangeFloats * kWarpSize * 4;
  static constexpr int kSharedBytes = max_of(max_of(kKeyWarps * kGroupBytes, OutTile::kBytes), kExchangeBytes);

  using Scores = float[kRowTiles][kKeyTiles][4];
  using Weights = uint32_t[kRowTiles][kBlockK / 16][4];  // P as A fragments
  using Output = float[kRowTiles][kValueTiles][4];

  // The row of the block that `lane_row` of this lane is; `warp` is that of this thread within its group.
  __device__ static int row_in_block(int warp, int lane_row) {
    return warp * kWarpRows + (lane_row / 2) * 16 + (lane_row % 2) * 8 + lane_id() / 4;
  }

  // Unsigned: divisions by constants are shifts.
  __device__ static unsigned thread_in_group() {
    if constexpr (kKeyWarps == 1) return threadIdx.x;
    return lane_id();
  }
  __device__ static void group_sync() {
    if constexpr (kKeyWarps == 1) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }
  // The barrier, and whether any thread of the group says so.
  __device__ static bool group_sync_or(bool flag) {
    if constexpr (kKeyWarps == 1) return __syncthreads_or(flag);
    __syncwarp();
    return __any_sync(kFullWarp, flag);
  }
};

}  // namespace kernelgen
