// out = activation(a @ b + bias) on Hopper for 16-bit rows of a beside a packed 4-bit b: TMA, WGMMA, one persistent block per SM.
//
// The product is computed transposed, b^T a^T: columns of b are the 64 rows of a WGMMA, whose A operand comes from registers, where codes
// become 16-bit floats on their way; rows of a are its N, kTokens of them. So a code is decoded once for all rows of the tile, and
// nothing of it goes back to shared memory:
//
//   producer   for every tile, for every stage: wait until it is empty; TMA rows of a and codes, as they lie in memory -> shared memory
//   consumer   64 columns of b: for every 64 of k decode the next codes while the tensor core has those before; then the epilogue
//              (mixed_epilogue.cuh)
//
// A lane has two columns of b (halves of a fragment), and of 16 neighbours of k four codes of each: byte lane % 4 of two words. Its scales come from global memory two pairs of blocks of 64 ahead, each lane of a quad a part (mixed_scales.cuh).
//
// Which columns the two are is free: those of a gate's two halves, or neighbours, so that gate and up of an output meet in one lane.
#pragma once

#include <kernelgen/gemm/dense_params.cuh>
#include <kernelgen/gemm/mixed_codes.cuh>
#include <kernelgen/gemm/mixed_epilogue.cuh>
#include <kernelgen/gemm/mixed_scales.cuh>
#include <kernelgen/gemm/tiles_sm90.cuh>
#include <kernelgen/sm90/control.cuh>
#include <kernelgen/sm90/pipeline.cuh>
#include <kernelgen/sm90/smem_tile.cuh>
#include <kernelgen/sm90/wgmma.cuh>

namespace kernelgen {

// `Options` is the rendered file's struct of compile-time constants: Element (of a), Code (int4_code or e2m1), ScaleB, Out, Bias; kTokens
// (rows of a tile), kConsumers, kBlocksK (64s of k of a stage: 1 or 2), kStages, kBandRows, kTable (decoding by a table), kApart (products of each 16 of k); kGroup (codes that share a scale), kZero;
// kBias, kActivation, kGate, kClamped, kVectorOut, kGrouping
template <class Options>
struct MixedSm90 : Options {
  using T = typename Options::Element;
  using Options::kBlocksK;
  using Options::kConsumers;
  using Options::kStages;
  using Options::kTokens;
  using Epilogue = MixedEpilogue<Options>;
  using Scales = MixedScales<Options>;
  using Codes = MixedCodes<T, typename Options::Code, Options::kZero, Options::kTable>;

  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
  static constexpr Grouping kGrouping = Options::kGrouping;
  static constexpr bool kRowGroups = kGrouping != Grouping::kNone, kSplit = Epilogue::kSplit;
  static_assert(kGrouping != Grouping::kDepth, "groups of k are not in this kernel");
  // What tiles_sm90.cuh asks for: rows of a along m, columns of b along n.
  static constexpr int kBlockM = kTokens, kRows = kConsumers * kMmaRows, kOutputs = Epilogue::kOutputs;
  static constexpr int kClusterM = 1, kClusterN = 1, kSplitK = 1, kAlignedElements = 8;
  static constexpr bool kDealt = false;  // each block has every so manieth tile
  using Tiles = typename tiles_of_grouping<MixedSm90<Options>, kGrouping, kRowGroups, false>::type;

  static constexpr int kBlock = 64, kDepth = kBlocksK * kBlock;  // of k: 128 bytes of a row of a; of a stage
  using TileA = SmemTile<T, kTokens, kBlock, true>;
  using Product = Wgmma<T, kTokens>;
  using Ring = Pipeline<kStages, 4 * kConsumers>;
  static constexpr int kCodeRowBytes = kDepth / 2, kCodeBytes = kRows * kCodeRowBytes, kBytesA = kBlocksK * TileA::kBytes;
  static constexpr int kStageBytes = kBytesA + kCodeBytes;
  static_assert(sizeof(T) == 2 && (kBlocksK == 1 || kBlocksK == 2), "a stage has rows of 32 or 64 bytes of codes");
  static_assert(kStageBytes % kSwizzleAtomBytes == 0, "tiles begin at whole groups of eight rows");

  // As dense_sm90's: together no more than ptxas gives all threads of the block. (Four consumers, for whom it has 96, hung with 120.)
  static_assert(1 <= kConsumers && kConsumers <= 3, "registers are shared out among three warpgroups at most");
  static constexpr int kProducerRegisters = kConsumers == 1 ? 56 : kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 1 ? 240 : kConsumers == 2 ? 232 : 160;
  static constexpr int kStoreAt = kStages * kStageBytes;
  static constexpr int kTableAt = kStoreAt + kConsumers * Epilogue::kStoreBytes;
  static constexpr int kBarriersAt = kTableAt + Codes::kTableBytes;
  static constexpr int kSharedBytes = kBarriersAt + round_up(Ring::kBytes, 128);

  static constexpr int kBoxA = !kRowGroups ? kTokens : kTokens % 32 == 0 ? 32 : 16;  // groups of few rows need few boxes
  static constexpr int kBoxB = kSplit ? kRows / 2 : kRows;
  static_assert(kTokens % kBoxA == 0 && kBoxA % 8 == 0, "a tile of a falls into boxes");

  // By one warp, of which one lane starts the copies.
  __device__ static void produce(const DenseSm90Params& p, const Ring& ring, uint32_t shared, Tiles tiles) {
    const bool leader = elect_one();
    constexpr int kBoxes = kTokens / kBoxA;
    typename Ring::Position at;
    OutputTile tile;
    for (int index = blockIdx.x; tiles.find(p, index, tile); index += gridDim.x) {
      if (!leader) continue;
      const int boxes = kRowGroups ? min(kBoxes, ceil_div(tile.row_end - tile.m, kBoxA)) : kBoxes;
      const int bytes = kBytesA / kBoxes * boxes + kCodeBytes;
      for (int k = 0; k < p.k; k += kDepth) {
        ring.wait_empty(at);
        ring.expect(at, bytes);
        const uint32_t stage = shared + at.stage * kStageBytes, barrier = ring.full(at.stage);
#pragma unroll
        for (int row = 0; row < kRows; row += kBoxB) {
          tma_load(stage + kBytesA + row * kCodeRowBytes, p.map_b, barrier, k / 2, Epilogue::column_of_b(p, tile.n, row), tile.batch_b);
        }
#pragma unroll
        for (int block = 0; block < kBlocksK; ++block) {
#pragma unroll
          for (int i = 0; i < kBoxes; ++i) {
            if (kRowGroups && i >= boxes) break;
            tma_load(stage + block * TileA::kBytes + i * kBoxA * kSwizzleRowBytes, p.map_a, barrier, k + block * kBlock,
                     tile.m + i * kBoxA, tile.batch_a);
          }
        }
        at.advance();
      }
    }
    __syncwarp();  // what follows takes whole warps
  }

  static constexpr int kGroupsOfBlock = Options::kApart ? TileA::kSteps : 1;  // of products
  using Sums = float[kTokens / 2];
  using Fragments = uint32_t[TileA::kSteps][4];

  // Where in the codes of a stage this lane's bytes lie: of each column, by pieces of 16. TMA exchanges those so that the eight columns that
  // are read together lie in different banks (PTX ISA, "Swizzling Modes", 32 and 64 bytes).
  struct Places {
    uint32_t of[2][2 * kBlocksK];

    __device__ explicit Places(const int (&rows)[2]) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = rows[half], exchange = kBlocksK == 1 ? row / 4 & 1 : row / 2 & 3;
#pragma unroll
        for (int i = 0; i < 2 * kBlocksK; ++i) of[half][i] = kBytesA + row * kCodeRowBytes + (i ^ exchange) * 16 + lane_id() % 4;
        hold(of[half]);  // else they are computed anew for each block
      }
    }
  };

  // Of a thread and 64 of k: codes of its two columns, and their scales.
  struct Codes64 {
    uint32_t bytes[2][8];
    typename Scales::Block scales[2];
  };

  // Those of block `stage_block` of the stage, and of block `block` of the pair that `scales` has. One byte of each eight codes of a column:
  // a load of a byte takes no integer instruction; of a whole word, which the quad would read together, its byte does.
  __device__ static void load(Codes64& codes, uint32_t stage, int stage_block, const typename Scales::Pair& scales, int block,
                              const Places& places) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 8; ++i) codes.bytes[half][i] = load_byte(stage + places.of[half][2 * stage_block + i / 4] + i % 4 * 4);
      codes.scales[half].find(scales, half, block);
    }
  }

  __device__ static void decode(uint32_t (&fragment)[4], const Codes64& codes, int step, uint32_t table) {
    constexpr int kStepsOfGroup = min_of(Options::kGroup, kBlock) / TileA::kStepElements;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const typename Scales::Block& own = codes.scales[i % 2];
      fragment[i] = Codes::decode(codes.bytes[i % 2][2 * step + i / 2], own.scales[step / kStepsOfGroup], own.zeros[step / kStepsOfGroup],
                                  table);
    }
  }

  __device__ static void hold_fragments(Fragments& fragments) {
#pragma unroll
    for (int step = 0; step < TileA::kSteps; ++step) hold(fragments[step]);
  }

  __device__ static void multiply_step(Sums& sums, const Fragments& fragments, uint32_t tile, int step, bool keep) {
    Product::template registers<0>(sums, fragments[step], TileA::descriptor(tile, 0, step), keep || step > 0);
  }

  // The products of 64 of k: one group, or with kApart a group for each step, so that while one runs the codes of the next are decoded. (A
  // warp that issues a product with registers seems to wait until the one before it has taken its own.)
  __device__ static void multiply(Sums& sums, Fragments& fragments, const Codes64& codes, uint32_t tile, uint32_t table, bool keep) {
    if constexpr (Options::kApart) {
#pragma unroll
      for (int step = 0; step < TileA::kSteps; ++step) {
        decode(fragments[step], codes, step, table);
        hold(sums);
        wgmma_fence();
        multiply_step(sums, fragments, tile, step, keep);
        wgmma_commit();
      }
    } else {
#pragma unroll
      for (int step = 0; step < TileA::kSteps; ++step) decode(fragments[step], codes, step, table);
      hold(sums);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < TileA::kSteps; ++step) multiply_step(sums, fragments, tile, step, keep);
      wgmma_commit();
    }
  }

  // All products of a tile. Blocks of k go in pairs, one in each set of fragments; what is in flight has the other set.
  __device__ static void accumulate(Sums& sums, const DenseSm90Params& p, const Ring& ring, uint32_t shared, typename Ring::Position& at,
                                    const Places& places, Scales& scales) {
    Fragments even, odd;
    typename Scales::Pair pair;
    Codes64 codes;
    const uint32_t table = shared + kTableAt + 4 * lane_id();
    const int blocks = ceil_div(p.k, kBlock);
    int unread = -1;  // the stage whose products may be in flight
    int block = 0;
    for (; block + 1 < blocks + (kBlocksK - 1); block += 2) {
      scales.next(pair, p);
      ring.wait_full(at);
      const uint32_t first = shared + at.stage * kStageBytes;
      load(codes, first, 0, pair, 0, places);
      multiply(sums, even, codes, first, table, unread >= 0);
      if (unread >= 0) {
        wgmma_wait<kGroupsOfBlock>();
        hold_fragments(odd);
        ring.release(unread);
      }
      uint32_t second = first + TileA::kBytes;
      int stage = at.stage;
      at.advance();
      if constexpr (kBlocksK == 1) {
        ring.wait_full(at);
        second = shared + at.stage * kStageBytes;
        unread = stage;
        stage = at.stage;
        at.advance();
      }
      load(codes, kBlocksK == 1 ? second : first, kBlocksK - 1, pair, 1, places);
      multiply(sums, odd, codes, second, table, true);
      wgmma_wait<kGroupsOfBlock>();
      hold_fragments(even);
      if constexpr (kBlocksK == 1) ring.release(unread);
      unread = stage;
    }
    if (kBlocksK == 1 && block < blocks) {
      scales.next(pair, p);
      ring.wait_full(at);
      const uint32_t first = shared + at.stage * kStageBytes;
      load(codes, first, 0, pair, 0, places);
      multiply(sums, even, codes, first, table, unread >= 0);
      if (unread >= 0) {
        wgmma_wait<kGroupsOfBlock>();
        hold_fragments(odd);
        ring.release(unread);
      }
      unread = at.stage;
      at.advance();
    }
    wgmma_wait<0>();
    hold(sums);
    ring.release(unread);
  }

  __device__ static void consume(const DenseSm90Params& p, const Ring& ring, uint32_t shared, Tiles tiles, int group) {
    typename Ring::Position at;
    const int rows[2] = {Epilogue::row_of_thread(group, 0), Epilogue::row_of_thread(group, 1)};  // of the tile's columns of b
    const Places places(rows);
    const Epilogue epilogue{shared + kStoreAt + group * Epilogue::kStoreBytes, group};
    Sums sums;
    OutputTile tile, next;
    Scales scales;
    int index = blockIdx.x;
    bool more = tiles.find(p, index, tile);
    if (more) scales.begin(p, tile, rows);
    while (more) {
      const typename Epilogue::Biases biases = Epilogue::biases_of(p, tile, rows);
      accumulate(sums, p, ring, shared, at, places, scales);
      index += gridDim.x;
      more = tiles.find(p, index, next);
      if (more) scales.begin(p, next, rows);  // the next tile's first scales come in behind the epilogue
      epilogue.run(p, tile, sums, biases);
      tile = next;
    }
  }

  __device__ static Tiles first_tiles() {
    if constexpr (kRowGroups) {
      return {};
    } else {
      return {0, 0, 0};
    }
  }

  __device__ static void run(const DenseSm90Params& p) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    const uint32_t shared = shared_address(dynamic_shared);
    const Ring ring{shared + kBarriersAt};
    const int warp = warp_id(), group = warp / 4;
    if (threadIdx.x == 0) {
      ring.init();
      barrier_init_fence();
    }
    Codes::fill(shared + kTableAt, kThreads);
    if (threadIdx.x == 32) {
      tma_prefetch_map(p.map_a);
      tma_prefetch_map(p.map_b);
    }
    __syncthreads();
    wait_for_previous_kernel();
    start_next_kernel();
    if (group == kConsumers) {
      give_registers<kProducerRegisters>();
      if (warp == 4 * kConsumers) produce(p, ring, shared, first_tiles());
    } else {
      take_registers<kConsumerRegisters>();
      consume(p, ring, shared, first_tiles(), group);
    }
  }
};

}  // namespace kernelgen
