// Sizes of attention/prefill_sm90: its tiles in shared memory, barriers and registers.
//
// Beside what AttentionShape has (kBlockQ = 64 rows of each consumer, kWarps = 4 of each), `Options` says
//   kPingpong      consumers take turns in multiplying
//   kOutOverQuery  results leave through the queries' memory: there is no room for both
//   kOutParts      2: they leave in two parts through memory of their own for one, so that queries need not wait for them
//   kResident      blocks of an SM: prologue and epilogue of one lie under the products of another
//   kValueStages   slots of the ring of values; kStages those of keys
//   kEarlyKeys     keys are given back before the softmax: see remake_scores
//   kDiagonal      at the ends of what rows see by position: 0 every consumer multiplies every tile, 1 it leaves out tiles that none of its own
//                  rows sees, 2 and makes half of the scores of the last one where they see no more
//   kMulticast     1: two blocks, a cluster, have neighbouring row tiles of a head: each loads half of every tile of keys and values, for both
//   kPageRows      paged: rows of a box that comes from a page, see paged_sm90.cuh; 0: keys are not paged
//   kPackedHeads   query heads of a group that are rows of one tile: see sm90_dense.cuh; 1: a tile has one head
//   kSplit         a row tile's keys are divided over several blocks: see sm90_split.cuh
#pragma once

#include <kernelgen/attention/mma_shape.cuh>
#include <kernelgen/attention/sm90_tiles.cuh>
#include <kernelgen/sm90/smem_tile.cuh>
#include <kernelgen/sm90/wgmma.cuh>

namespace kernelgen {

template <class Options>
struct Sm90Shape : AttentionShape<Options> {
  using Base = AttentionShape<Options>;
  using typename Base::T;
  using Options::kBlockK;
  using Options::kStages;
  using Options::kValueStages;
  static constexpr int kConsumers = Options::kWarps / 4;
  static constexpr int kThreads = kWarpgroupThreads * (kConsumers + 1);
  static constexpr int kMathThreads = kWarpgroupThreads * kConsumers;
  static_assert(Options::kBlockQ == kConsumers * kMmaRows && Base::kWarpRows == 16, "a consumer has 64 rows");
  static constexpr bool kPingpong = Options::kPingpong && kConsumers > 1;

  // Tiles are boxes of 64 columns, one behind the other: rows of 128 bytes. What a box has beyond the tensor's columns is zero.
  static constexpr int kBoxColumns = 64;
  static constexpr int kKeyBoxes = ceil_div(Options::kHeadDim, kBoxColumns);
  static constexpr int kValueBoxes = ceil_div(Options::kHeadDimV, kBoxColumns);
  using QueryBox = SmemTile<T, kMmaRows, kBoxColumns, true>;
  using KeyBox = SmemTile<T, kBlockK, kBoxColumns, true>;
  using Values = SmemTile<T, kValueBoxes * kBoxColumns, kBlockK, false>;

  static constexpr int kQueries = kMmaRows / Options::kPackedHeads;  // of a consumer
  static constexpr int kQueryRows = kQueries * Options::kPackedHeads;  // of its 64 that are used
  static_assert(Options::kPackedHeads == 1 || Options::kMulticast == 0, "a tile has all heads of its group");
  static constexpr bool kBoxesOut = !Options::kRagged && !Options::kSplit;  // results leave by the copy engine
  static_assert(!(Options::kSplit && Options::kOutOverQuery), "partial results leave from registers");

  static constexpr int kOutBoxes = kValueBoxes / Options::kOutParts;           // of a part
  static constexpr int kOutBytes = kOutBoxes * kMmaRows * kSwizzleRowBytes;  // of a consumer
  static_assert(kValueBoxes % Options::kOutParts == 0 && !(Options::kOutOverQuery && Options::kOutParts > 1), "whole boxes");
  static constexpr int kQueryBytes = Options::kOutOverQuery ? max_of(kKeyBoxes * QueryBox::kBytes, kOutBytes) : kKeyBoxes * QueryBox::kBytes;
  static constexpr int kKeyBytes = kKeyBoxes * KeyBox::kBytes;
  static constexpr int kValueBytes = Values::kBytes;
  static constexpr int kOutAt = kConsumers * kQueryBytes;
  static constexpr int kKeysAt = kOutAt + (Options::kOutOverQuery || Options::kSplit ? 0 : kConsumers * kOutBytes);
  static constexpr int kValuesAt = kKeysAt + kStages * kKeyBytes;
  static constexpr int kBarriersAt = kValuesAt + kValueStages * kValueBytes;

  // Values of keys that a row must not see may be inf or NaN, and 0 * NaN is NaN. Where a tile may have such keys, the warps beside
  // the one that copies look its values through while the scores are being made.
  static constexpr bool kChecks = Base::kMayHide || Options::kRagged || Options::kKvLens;
  static constexpr int kCheckers = kChecks ? 3 : 0;  // warps
  static constexpr int kBlocks = 1 + Options::kMulticast;  // of a cluster
  static_assert(kBlocks == 1 || !(Base::kWindowed || Options::kRagged), "both blocks have the same keys");
  // Keys and values that lanes of the copying warp bring row by row, in place of the copy engine.
  static constexpr bool kGathers = Options::kPageRows % 8 != 0;
  static constexpr int kFillers = kGathers ? kWarpSize : 1;
  using KeyRing = Pipeline<kStages, Options::kWarps, kBlocks, kFillers>;
  using ValueRing = Pipeline<kValueStages, Options::kWarps + kCheckers, kBlocks, kFillers>;
  // Of a cluster the first block's copying warp deals, and the second one's reads.
  static constexpr int kReaders = kBlocks * (Options::kWarps + kCheckers) + kBlocks - 1;
  using Slots = RowTileSlots<kReaders>;
  static constexpr int kValueRingAt = kBarriersAt + KeyRing::kBytes;
  static constexpr int kCheckedAt = kValueRingAt + ValueRing::kBytes;  // barriers: a stage has been looked through
  static constexpr int kQueriesAt = kCheckedAt + kValueStages * 8;     // barriers: full and empty of each consumer
  static constexpr int kSlotsAt = round_up(kQueriesAt + 2 * kConsumers * 8, 16);
  static constexpr int kFlagsAt = kSlotsAt + Slots::kBytes;            // of each stage and checking warp: not finite
  static constexpr int kSharedBytes = round_up(kFlagsAt + kValueStages * 4 * 4, 128);

  // A warpgroup begins with what a launch of kThreads gives each; the copying one leaves most of it to the others.
  static constexpr int kLaunchRegisters = 65536 / (kThreads * Options::kResident) / 8 * 8;
  static constexpr int kProducerRegisters = kGathers ? 40 : kConsumers == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters =
      min_of(240, (min_of(kLaunchRegisters, 240) * (kConsumers + 1) - kProducerRegisters) / kConsumers / 8 * 8);

  static constexpr bool kOwnTiles = Options::kDiagonal > 0 && Base::kWindowed;
  static constexpr bool kHalves = Options::kDiagonal > 1 && Base::kWindowed;
  static constexpr int kHalfK = kHalves ? kBlockK / 2 : kBlockK;
  static_assert(kHalfK % 16 == 0, "half a tile is whole k16 steps");

  static constexpr int kDepthSteps = Base::kDepth / 16;
  static constexpr int kKeySteps = kBlockK / 16;
  static constexpr int kScoreCount = kBlockK / 2;             // of a lane
  static constexpr int kOutputCount = Base::kSplitColumns / 2;  // of a lane
};

// The shape of `Keys` keys of a tile.
template <class Shape, int Keys>
struct PartShape : Shape {
  static constexpr int kKeyTiles = Keys / 8;
  using Scores = float[Shape::kRowTiles][kKeyTiles][4];
};

// Named barriers; 0 is __syncthreads.
enum Sm90Barrier { kAllConsumers = 1, kTurn = 2, kOfConsumer = 5 };

}  // namespace kernelgen
