// out = activation(scale * (a @ b) + bias) + beta * c on Hopper: TMA, WGMMA, one persistent block per SM.
//
// A warpgroup that only starts copies feeds a ring of stages, each a tile of a and one of b 128 bytes deep; kConsumers warpgroups
// multiply them, kMmaM times 64 rows of the block's tile each, which they take in turn, with one group of products in flight:
//
//   producer   for every tile, for every stage: wait until it is empty; TMA a, TMA b -> shared memory
//   consumer   for every stage: wait until it is full; products of its rows; release the stage before
//              then the epilogue (dense_epilogue.cuh), during which the producer is already filling stages of the next tile
//
// With kPingpong each of two consumers owns every other tile instead of a part of each. They take turns in multiplying, so that
// the epilogue of one runs beside the products of the other: for tiles that are not deep.
//
// The blocks of a cluster own neighbouring tiles: kClusterM of them along M share the tile of b, kClusterN along N that of a. Each
// loads its share and multicasts it to the others. Tiles past the end are computed from zeros and not stored.
//
// With kSplitK the blocks of a cluster have the same tile and a share of K each, and such clusters are not persistent: one tile, of
// which every block finishes a part (split_sums_sm90.cuh). For products whose tiles do not fill the chip. No share is empty: where one
// may be, ptxas spills the sums.
//
// Sums of fp8 products have some 14 bits in the tensor core. With kPromote every 128 of K are added up from zero and then
// added to float32 totals, so that the error does not grow with K; with kBlockScales times the scales of their blocks.
//
// gemm/grouped_sm90 is the same kernel with other tiles (tiles_sm90.cuh). Of a only the boxes with rows of the group are loaded; what
// lies in the rest of the stage is multiplied, and not stored, but for a consumer's second 64 rows, which it leaves out where none of
// them is the group's. A group of k may begin and end inside a stage: there the consumers clear what is not its own, in a and in b,
// as 0 * NaN would be NaN. With kGather rows of a lie anywhere, and two more warps of the copying warpgroup bring them
// (gathered_rows_sm90.cuh). With kDealt blocks take tiles from a counter in memory as they come to them (dealt_tiles_sm90.cuh). With
// kScatter rows are added to rows of out that lie anywhere.
#pragma once

#include <kernelgen/gemm/block_scales_sm90.cuh>
#include <kernelgen/gemm/dealt_tiles_sm90.cuh>
#include <kernelgen/gemm/dense_epilogue.cuh>
#include <kernelgen/gemm/dense_params.cuh>
#include <kernelgen/gemm/gathered_rows_sm90.cuh>
#include <kernelgen/sm90/control.cuh>
#include <kernelgen/sm90/pipeline.cuh>
#include <kernelgen/sm90/smem_tile.cuh>
#include <kernelgen/gemm/split_sums_sm90.cuh>
#include <kernelgen/gemm/tiles_sm90.cuh>
#include <kernelgen/sm90/wgmma.cuh>

namespace kernelgen {

// `Options` is the rendered file's struct of compile-time constants: Element (of a, b), Out, Bias, C; kMmaM, kConsumers, kBlockN, kParts,
// kStages, kSlabs, kClusterM, kClusterN, kSplitK, kResident (blocks of an SM), kBandRows, kPingpong; kRowA, kRowB (row order); kTmaOut
// (out goes through shared memory); kBias, kActivation, kGate, kClamped, kAccumulate, kQuantize (out are codes, with a scale for 128 of a
// row), kScales, kPromote, kBlockScales, kScaleColumns (of b, that share a scale of blocks), kGrouping, kGather, kDealt, kScatter
template <class Options>
struct DenseSm90 : Options {
  using T = typename Options::Element;
  using Options::kBlockN;
  using Options::kClusterM;
  using Options::kClusterN;
  using Options::kConsumers;
  using Options::kMmaM;
  using Options::kParts;
  using Options::kPingpong;
  using Options::kPromote;
  using Options::kResident;
  using Options::kSplitK;
  using Options::kStages;
  using Epilogue = DenseEpilogue<Options>;

  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
  static constexpr int kRows = kMmaM * kMmaRows;  // of one consumer
  static constexpr int kTogether = kPingpong ? 1 : kConsumers;  // consumers of a tile, which take 64 rows in turn
  static constexpr int kBlockM = kTogether * kRows;
  static constexpr int kRowStep = kTogether * kMmaRows;  // from a consumer's 64 rows to its next
  // Named barriers: those of the epilogues, of the turns, of all consumers.
  static constexpr int kTurn = 1 + kConsumers, kAllConsumers = kTurn + 2;
  static_assert(!kPingpong || kConsumers == 2, "two take turns");
  static constexpr Grouping kGrouping = Options::kGrouping;
  static constexpr bool kRowGroups = Epilogue::kRowGroups;
  static constexpr int kOutputs = Epilogue::kOutputs;
  using Tiles = typename tiles_of_grouping<DenseSm90<Options>, kGrouping, kRowGroups, Options::kScatter>::type;
  static constexpr int kDepth = kSwizzleRowBytes / static_cast<int>(sizeof(T));
  static constexpr int kAlignedElements = 16 / static_cast<int>(sizeof(T));  // of a copy's first coordinate
  static constexpr bool kMajorKA = Options::kRowA, kMajorKB = !Options::kRowB;
  using TileA = SmemTile<T, kBlockM, kDepth, kMajorKA>;
  using TileB = SmemTile<T, kBlockN, kDepth, kMajorKB>;
  static constexpr int kColumns = kBlockN / kParts;
  using Product = Wgmma<T, kColumns>;
  static_assert(kBlockN % kParts == 0 && (kPromote || kParts == 1), "parts are for promoted sums");

  static constexpr int kSharing = kClusterM * kClusterN;  // blocks that fill each other's stages
  static constexpr int kBlocks = kSharing * kSplitK;      // of the cluster
  static_assert(kGrouping == Grouping::kNone || kSplitK == 1, "K is shared out where nothing is grouped");
  static_assert(!kRowGroups || kBlocks == 1, "neighbouring tiles of groups share nothing");
  static_assert(kSplitK == 1 || (kSharing == 1 && !kPingpong && !Options::kTmaOut), "a cluster that shares K has one tile");
  using Shares = SplitSums<Options>;
  static_assert(kGrouping != Grouping::kDepth || !kPingpong, "each consumer skips as many stages as the other takes");
  static_assert(!Options::kBlockScales || kDepth == 128 && kGrouping != Grouping::kDepth, "a step is a block of k");
  using Scales = typename scales_of_blocks<Options, Epilogue, kBlockM, Options::kBlockScales>::type;
  static constexpr bool kGather = Options::kGather;
  static_assert(!kGather || (kRowGroups && kMajorKA && kBlockM <= 128), "what is gathered are rows, of which a lane has registers for 128");
  using Rows = GatheredRows<kGather ? kBlockM : 16>;
  using Ring = Pipeline<kStages, kPingpong ? 4 : 4 * kConsumers, kSharing, 1 + Scales::kFillers + (kGather ? Rows::kFillers : 0)>;

  // Tiles: the copying warp deals them out, or each warp counts.
  static constexpr bool kDealt = Options::kDealt;
  static_assert(!kDealt || kRowGroups, "tiles that differ are those of groups of rows");
  static_assert(!Options::kScatter || (kDealt && !kGather), "columns of all groups are counted by one warp; p.rows has one meaning");
  static constexpr int kReaders = (kPingpong ? 4 : 4 * kConsumers) + (Options::kBlockScales ? 1 : 0) + (kGather ? Rows::kWarps : 0);
  using Slots = TileSlots<kReaders>;
  static constexpr int kAskAhead = 6;  // steps before the end of a tile that the next one is asked for: some 2 us

  // Registers: 65,536 / 128 = 512 for the warpgroups of an SM together; the producer's addresses need few.
  static_assert(kResident == 1 || (kResident == 2 && kConsumers == 1), "two blocks of an SM have one consumer each");
  static constexpr int kProducerRegisters = kResident == 2 ? 40 : kConsumers == 1 ? 56 : kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kResident == 2 ? 216 : kConsumers == 1 ? 240 : kConsumers == 2 ? 232 : 160;

  static constexpr int kStageBytes = TileA::kBytes + TileB::kBytes;
  static constexpr int kStoreAt = kStages * kStageBytes;
  static constexpr int kStagedAt = kStoreAt + kConsumers * Epilogue::kStoreBytes;
  static constexpr int kScalesAt = kStagedAt + kConsumers * Epilogue::kStagedBytes;
  static constexpr int kRingBytes = kScalesAt + kStages * Scales::kBytes;
  static constexpr int kBarriersAt = kSplitK == 1 ? kRingBytes : max_of(kRingBytes, Shares::kBytes);  // the sums lie where operands lay
  static constexpr int kSlotsAt = kBarriersAt + round_up(Ring::kBytes, 128);
  static constexpr int kSharedBytes = kSlotsAt + (kDealt ? Slots::kBytes : 0);

  // A box: what one TMA instruction brings of an operand. Groups of few rows need few boxes of a.
  static constexpr int kBoxA = !kMajorKA ? TileA::kRowElements : kRowGroups ? min_of(kBlockM, 32) : kBlockM / kClusterN;
  static constexpr int kBoxB = kMajorKB ? kBlockN / max_of(kClusterM, Epilogue::kSplit ? 2 : 1) : TileB::kRowElements;
  static_assert(kBoxA <= 256 && kBoxB <= 256, "a box has at most 256 rows");

  __device__ static uint16_t blocks_along_n(int m) {  // of the cluster, with the same rows
    uint16_t mask = 0;
    for (int n = 0; n < kClusterN; ++n) mask |= 1 << (n * kClusterM + m);
    return mask;
  }
  __device__ static uint16_t blocks_along_m(int n) { return ((1 << kClusterM) - 1) << (n * kClusterM); }

  template <int Blocks>
  __device__ static void load_box(uint32_t target, const TensorMap& map, uint32_t barrier, bool major_k, int k, int mn, int batch,
                                  uint16_t blocks) {
    const int column = major_k ? k : mn, row = major_k ? mn : k;
    if constexpr (Blocks == 1) {
      tma_load(target, map, barrier, column, row, batch);
    } else {
      tma_load_multicast(target, map, barrier, column, row, batch, blocks);
    }
  }

  // By one warp, of which one lane starts the copies.
  template <class Source>
  __device__ static void produce(const DenseSm90Params& p, const Ring& ring, uint32_t shared, Source tiles, int rank_m, int rank_n) {
    const bool leader = kDealt ? lane_id() == 0 : elect_one();
    const uint16_t sharing_a = blocks_along_n(rank_m), sharing_b = blocks_along_m(rank_n);
    constexpr int kBoxesA = kBlockM / kBoxA / kClusterN, kBoxesB = kBlockN / kBoxB / kClusterM;
    typename Ring::Position at;
    OutputTile tile;
    for (; tiles.find(p, tile); tiles.advance()) {
      if (!leader) continue;
      const int boxes_a = kRowGroups ? min(kBoxesA, ceil_div(tile.row_end - tile.m, kBoxA)) : kBoxesA;
      const int bytes_a = kGather ? 0 : kRowGroups ? TileA::kBytes / kBoxesA * boxes_a : TileA::kBytes;
      const int bytes = bytes_a + TileB::kBytes + Scales::row_bytes(p);
      for (int k = tile.k_first; k < tile.k_end; k += kDepth) {
        if constexpr (kDealt) {
          if (k == max(0, ceil_div(p.k, kDepth) - kAskAhead) * kDepth) tiles.ask(p);
        }
        ring.wait_empty(at);
        ring.expect(at, bytes);
        const uint32_t stage_a = shared + at.stage * kStageBytes, stage_b = stage_a + TileA::kBytes;
        Scales::copy_rows(scales_of(shared, at.stage), p, ring.full(at.stage), tile, k / kDepth);
        // In both orders a row of the tile, or what is as much of a box, is 128 bytes.
#pragma unroll
        for (int i = 0; i < kBoxesA; ++i) {
          const int row = (rank_n * kBoxesA + i) * kBoxA;
          if (kGather || (kRowGroups && i >= boxes_a)) break;
          load_box<kClusterN>(stage_a + row * kSwizzleRowBytes, p.map_a, ring.full(at.stage), kMajorKA, k, tile.m + row, tile.batch_a,
                              sharing_a);
        }
#pragma unroll
        for (int i = 0; i < kBoxesB; ++i) {
          const int row = (rank_m * kBoxesB + i) * kBoxB;
          load_box<kClusterM>(stage_b + row * kSwizzleRowBytes, p.map_b, ring.full(at.stage), kMajorKB, k,
                              Epilogue::column_of_b(p, tile.n, row), tile.batch_b, sharing_b);
        }
        at.advance();
      }
    }
    __syncwarp();  // what follows takes whole warps
    tiles.finish(p);
  }

  // By two more warps, where rows of a are gathered.
  template <class Source>
  __device__ static void produce_rows(const DenseSm90Params& p, const Ring& ring, uint32_t shared, Source tiles, int warp) {
    typename Ring::Position at;
    OutputTile tile;
    Rows rows;
    for (; tiles.find(p, tile); tiles.advance()) {
      rows.find(p, tile, warp);
      for (int k = tile.k_first; k < tile.k_end; k += kDepth, at.advance()) {
        ring.wait_empty(at);
        rows.copy(shared + at.stage * kStageBytes, p, k * static_cast<int>(sizeof(T)), p.k * static_cast<int>(sizeof(T)), warp);
        cp_async_arrive(ring.full(at.stage));
      }
    }
  }

  // The stage's operands are there, for the tensor core too.
  __device__ static void wait_operands(const Ring& ring, const typename Ring::Position& at) {
    ring.wait_full(at);
    if constexpr (kGather) tma_store_fence();
  }

  __device__ static uint32_t scales_of(uint32_t shared, int stage) { return shared + kScalesAt + stage * Scales::kBytes; }

  // By another warp.
  template <class Source>
  __device__ static void produce_scales(const DenseSm90Params& p, const Ring& ring, uint32_t shared, Source tiles) {
    typename Ring::Position at;
    OutputTile tile;
    for (; tiles.find(p, tile); tiles.advance()) {
      if constexpr (kGather) {
        typename Scales::Columns columns;
        typename Scales::Rows rows;
        rows.find(p, tile);
        rows.load(p, tile.k_first / kDepth);
        for (int k = tile.k_first, i = 0; k < tile.k_end; k += kDepth, ++i, at.advance()) {
          if (i % kWarpSize == 0) Scales::load_columns(columns, p, tile, k / kDepth);
          ring.wait_empty(at);
          rows.write(scales_of(shared, at.stage));
          Scales::write_columns(scales_of(shared, at.stage), columns, i % kWarpSize, ring.full(at.stage));
          if (k + kDepth < tile.k_end) rows.load(p, k / kDepth + 1);
        }
        continue;
      }
      if constexpr (Scales::kByTma) {
        if (p.scales_by_tma) {
          typename Scales::Columns columns;
          for (int k = tile.k_first, i = 0; k < tile.k_end; k += kDepth, ++i, at.advance()) {
            if (i % kWarpSize == 0) Scales::load_columns(columns, p, tile, k / kDepth);
            ring.wait_empty(at);
            Scales::write_columns(scales_of(shared, at.stage), columns, i % kWarpSize, ring.full(at.stage));
          }
          continue;
        }
      }
      for (int k = tile.k_first; k < tile.k_end; k += kDepth, at.advance()) {
        ring.wait_empty(at);
        Scales::gather(scales_of(shared, at.stage), p, tile, k / kDepth);
        cp_async_arrive(ring.full(at.stage));
      }
    }
  }

  // The products of one stage for 64 of this warpgroup's rows and kColumns columns; `keep` false begins from zero.
  __device__ static void multiply_part(float (&sums)[kColumns / 2], uint32_t stage, int row, int column, int step, bool keep) {
    Product::template shared<!kMajorKA, !kMajorKB>(sums, TileA::descriptor(stage, row, step),
                                                   TileB::descriptor(stage + TileA::kBytes, column, step), keep || step > 0);
  }

  // Rows: of 64, that the tile has of this consumer's.
  template <int Rows>
  __device__ static void multiply(float (&sums)[kMmaM][kBlockN / 2], uint32_t stage, int first_row, bool keep) {
#pragma unroll
    for (int m = 0; m < Rows; ++m) hold(sums[m]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TileA::kSteps; ++step) {
#pragma unroll
      for (int m = 0; m < Rows; ++m) multiply_part(sums[m], stage, first_row + m * kRowStep, 0, step, keep);
    }
    wgmma_commit();
  }

  // A group of k that begins or ends inside the stage which starts at `k`: nothing around it counts.
  __device__ static void clear_others(const DenseSm90Params& p, const OutputTile& tile, uint32_t stage, int k) {
    if constexpr (kGrouping == Grouping::kDepth) {
      const int begin = max(0, tile.k_begin - k);
      const int end = tile.k_end == p.k ? kDepth : min(kDepth, tile.k_end - k);  // the copy engine writes zeros beyond the matrix
      if (begin == 0 && end == kDepth) return;
      TileA::clear_outside(stage, begin, end, threadIdx.x, kConsumers * kWarpgroupThreads);
      TileB::clear_outside(stage + TileA::kBytes, begin, end, threadIdx.x, kConsumers * kWarpgroupThreads);
      tma_store_fence();
      named_barrier_sync(kAllConsumers, kConsumers * kWarpgroupThreads);
    }
  }

  using Sums = float[kMmaM][kBlockN / 2];

  __device__ static void clear(Sums& sums) {
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int i = 0; i < kBlockN / 2; ++i) sums[m][i] = 0.0f;
    }
  }

  // All products of a tile, in the tensor core's own sums.
  template <int Rows>
  __device__ static void accumulate(Sums& sums, const DenseSm90Params& p, const Ring& ring, uint32_t shared, const OutputTile& tile,
                                    typename Ring::Position& at, int first_row, int group) {
    int unread = -1;  // the stage whose products may be in flight
    for (int k = tile.k_first; k < tile.k_end; k += kDepth) {
      const uint32_t stage = shared + at.stage * kStageBytes;
      wait_operands(ring, at);
      clear_others(p, tile, stage, k);
      multiply<Rows>(sums, stage, first_row, unread >= 0);
      if (unread >= 0) {
        wgmma_wait<1>();
        ring.release(unread);
      }
      unread = at.stage;
      at.advance();
    }
    end_turn(at, group, ceil_div(tile.k_end - tile.k_first, kDepth));
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < Rows; ++m) hold(sums[m]);
    if (kGrouping == Grouping::kDepth && unread < 0) {
      clear(sums);  // an empty group
    } else {
      ring.release(unread);
    }
  }

  // Promoted, a step is Rows * kParts units: products of 64 rows by kColumns columns from zero. Their sums lie in two buffers in turn:
  // those in one are added to the totals while the tensor core fills the other, so that it need not wait.
  using Buffers = float[2][kColumns / 2];

  __device__ static void multiply_unit(float (&sums)[kColumns / 2], uint32_t stage, int first_row, int unit) {
    hold(sums);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TileA::kSteps; ++step) {
      multiply_part(sums, stage, first_row + unit / kParts * kRowStep, unit % kParts * kColumns, step, false);
    }
    wgmma_commit();
  }

  // Waits for the stage at `at`, and issues the first unit's products of its step.
  __device__ static void begin_step(float (&sums)[kColumns / 2], typename Scales::Step& step, const DenseSm90Params& p, const Ring& ring,
                                    uint32_t shared, const OutputTile& tile, const typename Ring::Position& at, int first_row, int k) {
    const uint32_t stage = shared + at.stage * kStageBytes;
    wait_operands(ring, at);
    clear_others(p, tile, stage, k);
    multiply_unit(sums, stage, first_row, 0);
    Scales::load(step, scales_of(shared, at.stage), p, tile, first_row);
  }

  // The step at `k`, whose first unit is under way in buffer kFirst; with kMore begins the one behind it, `next`.
  template <int Rows, int kFirst, bool kMore>
  __device__ static void promote(Sums& totals, Buffers& buffers, const typename Scales::Step& step, typename Scales::Step& next,
                                 const DenseSm90Params& p, const Ring& ring, uint32_t shared, const OutputTile& tile,
                                 typename Ring::Position& at, int first_row, int k) {
    constexpr int kUnits = Rows * kParts;
    const int stage = at.stage;
    at.advance();
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      float(&mine)[kColumns / 2] = buffers[(kFirst + unit) % 2];
      float(&other)[kColumns / 2] = buffers[(kFirst + unit + 1) % 2];
      const bool last = unit + 1 == kUnits;
      if (!last) {
        multiply_unit(other, shared + stage * kStageBytes, first_row, unit + 1);
      } else if constexpr (kMore) {
        begin_step(other, next, p, ring, shared, tile, at, first_row, k + kDepth);
      }
      if (kMore || !last) {
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      if (last && !Scales::kHoldsStage) ring.release(stage);
      hold(mine);
      Scales::add(totals[unit / kParts], mine, step, unit / kParts, unit % kParts * kColumns);
      if (last && Scales::kHoldsStage) {
        __syncwarp();
        ring.release(stage);
      }
    }
  }

  // The same as accumulate(), every 128 of K promoted to float32 totals. (Two steps in the loop, and one place for each way to end:
  // with one step ptxas takes sums for unfinished that are not, and waits for each product. A test reads its log.)
  template <int Rows>
  __device__ static void accumulate_promoted(Sums& totals, const DenseSm90Params& p, const Ring& ring, uint32_t shared,
                                             const OutputTile& tile, typename Ring::Position& at, int first_row, int group) {
    clear(totals);
    int k = tile.k_first;
    if (kGrouping == Grouping::kDepth && k == tile.k_end) return;
    Buffers buffers;
    typename Scales::Step even, odd;  // steps 0, 2, ... and 1, 3, ...
    constexpr int kSecond = Rows * kParts % 2;  // the buffer that odd steps begin with
    begin_step(buffers[0], even, p, ring, shared, tile, at, first_row, k);
    for (; k + 2 * kDepth < tile.k_end; k += 2 * kDepth) {
      promote<Rows, 0, true>(totals, buffers, even, odd, p, ring, shared, tile, at, first_row, k);
      promote<Rows, kSecond, true>(totals, buffers, odd, even, p, ring, shared, tile, at, first_row, k + kDepth);
    }
    if (k + kDepth < tile.k_end) {
      promote<Rows, 0, true>(totals, buffers, even, odd, p, ring, shared, tile, at, first_row, k);
      promote<Rows, kSecond, false>(totals, buffers, odd, even, p, ring, shared, tile, at, first_row, k + kDepth);
    } else {
      promote<Rows, 0, false>(totals, buffers, even, odd, p, ring, shared, tile, at, first_row, k);
    }
    end_turn(at, group, ceil_div(tile.k_end - tile.k_first, kDepth));
  }

  template <int Rows>
  __device__ static void accumulate_rows(Sums& sums, const DenseSm90Params& p, const Ring& ring, uint32_t shared, const OutputTile& tile,
                                         typename Ring::Position& at, int first_row, int group) {
    if constexpr (kPromote) {
      accumulate_promoted<Rows>(sums, p, ring, shared, tile, at, first_row, group);
    } else {
      accumulate<Rows>(sums, p, ring, shared, tile, at, first_row, group);
    }
  }

  // All products of a tile are issued: the other consumer may begin, and owns the next stages.
  __device__ static void end_turn(typename Ring::Position& at, int group, int steps) {
    if constexpr (kPingpong) {
      named_barrier_arrive(kTurn + (group ^ 1), 2 * kWarpgroupThreads);
      at.skip(steps);
    }
  }

  // A consumer none of whose rows are the tile's gives the stages back.
  __device__ static void pass(const Ring& ring, const OutputTile& tile, typename Ring::Position& at) {
    for (int k = tile.k_first; k < tile.k_end; k += kDepth, at.advance()) {
      ring.wait_full(at);
      ring.release(at.stage);
    }
  }

  template <class Source>
  __device__ static void consume(const DenseSm90Params& p, const Ring& ring, uint32_t shared, Source tiles, int group, int share) {
    const int first_row = kPingpong ? 0 : group * kMmaRows;
    typename Ring::Position at;
    if (kPingpong && group == 1) named_barrier_arrive(kTurn, 2 * kWarpgroupThreads);  // the first turn is the other's
    if (kPingpong && group == 1) at.skip(ceil_div(p.k, kDepth));
    if constexpr (kPingpong) tiles.take_turns(group);
    Epilogue epilogue{shared + kStoreAt + group * Epilogue::kStoreBytes, shared + kStagedAt + group * Epilogue::kStagedBytes, group};
    Sums sums;
    typename Epilogue::Ahead ahead;
    OutputTile tile;
    for (; tiles.find(p, tile); tiles.advance()) {
      if constexpr (kPingpong) named_barrier_sync(kTurn + group, 2 * kWarpgroupThreads);
      if (kRowGroups && tile.m + first_row >= tile.row_end) {
        pass(ring, tile, at);
        continue;
      }
      Epilogue::template load_ahead<kRowStep>(ahead, p, tile, tile.m + first_row);
      if constexpr (kRowGroups && kMmaM == 2) {
        if (tile.m + first_row + kRowStep >= tile.row_end) {
          accumulate_rows<1>(sums, p, ring, shared, tile, at, first_row, group);
        } else {
          accumulate_rows<2>(sums, p, ring, shared, tile, at, first_row, group);
        }
      } else {
        accumulate_rows<kMmaM>(sums, p, ring, shared, tile, at, first_row, group);
      }
      if constexpr (kSplitK > 1) {
        named_barrier_sync(kAllConsumers, kConsumers * kWarpgroupThreads);  // all have read the operands where sums are left
        Shares::leave(sums, shared, group, share);
        cluster_sync();
        Shares::finish(sums, p, tile, shared, group, tile.m + first_row, share);
        return;  // as the grid has it, too; said here, the sums are not kept for a next tile
      } else {
        epilogue.template run<kRowStep>(p, tile, sums, tile.m + first_row, ahead);
      }
    }
    epilogue.finish();
  }

  // As a warp comes by its tiles, and the one that deals them out.
  __device__ static auto tiles_of_warp(uint32_t shared, int rank_m, int rank_n, int share) {
    const int cluster = blockIdx.x / kBlocks, clusters = gridDim.x / kBlocks;
    if constexpr (kDealt) {
      return DealtTiles<Tiles, kReaders>{{{shared + kSlotsAt}}};
    } else if constexpr (kRowGroups) {
      return StridedTiles<Tiles>{{}, cluster, clusters};
    } else {
      return StridedTiles<Tiles>{{rank_m, rank_n, share}, cluster, clusters};
    }
  }
  template <class Source>
  __device__ static auto tiles_to_deal(uint32_t shared, const Source& tiles) {
    if constexpr (kDealt) {
      return TileDealer<Tiles, kReaders, kPingpong ? 2 : 1>{{{shared + kSlotsAt}}, {}, static_cast<int>(blockIdx.x)};
    } else {
      return tiles;
    }
  }

  __device__ static void run(const DenseSm90Params& p) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    const uint32_t shared = shared_address(dynamic_shared);
    const Ring ring{shared + kBarriersAt};
    const int warp = warp_id(), group = warp / 4;
    if (threadIdx.x == 0) {
      ring.init();
      if constexpr (kDealt) Slots{{shared + kSlotsAt}}.init();
      barrier_init_fence();
    }
    if (threadIdx.x == 32) {
      if constexpr (!kGather) tma_prefetch_map(p.map_a);
      tma_prefetch_map(p.map_b);
    }
    if constexpr (kBlocks > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
    wait_for_previous_kernel();
    start_next_kernel();
    const int rank = kBlocks > 1 ? static_cast<int>(cluster_rank()) : 0;
    const int rank_m = rank % kClusterM, rank_n = rank / kClusterM % kClusterN, share = rank / kSharing;
    const auto tiles = tiles_of_warp(shared, rank_m, rank_n, share);
    if (group == kConsumers) {
      give_registers<kProducerRegisters>();
      if (warp == 4 * kConsumers) produce(p, ring, shared, tiles_to_deal(shared, tiles), rank_m, rank_n);
      if constexpr (Options::kBlockScales) {
        if (warp == 4 * kConsumers + 1) produce_scales(p, ring, shared, tiles);
      }
      if constexpr (kGather) {
        if (warp >= 4 * kConsumers + 2) produce_rows(p, ring, shared, tiles, warp - 4 * kConsumers - 2);
      }
      if constexpr (kSplitK > 1) cluster_sync();  // the consumers' sums are there: all threads of the cluster pass its barrier
    } else {
      take_registers<kConsumerRegisters>();
      consume(p, ring, shared, tiles, group, share);
    }
    // A block stays until no other can still write its shared memory or arrive at its barriers.
    if constexpr (kBlocks > 1) cluster_sync();
  }
};

}  // namespace kernelgen
