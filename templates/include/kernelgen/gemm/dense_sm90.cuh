// out = activation(scale * (a @ b) + bias) + beta * c on Hopper: TMA, WGMMA, one persistent block per SM.
//
// A warpgroup that only starts copies feeds a ring of stages, each a tile of a and one of b 128 bytes deep; kConsumers warpgroups
// multiply them, kMmaM * 64 rows of the block's tile each, with one group of products in flight:
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
// Sums of fp8 products have some 14 bits in the tensor core. With kPromote every 128 of K are added up from zero and then
// added to float32 totals, so that the error does not grow with K.
#pragma once

#include <kernelgen/gemm/dense_epilogue.cuh>
#include <kernelgen/gemm/dense_params.cuh>
#include <kernelgen/sm90/control.cuh>
#include <kernelgen/sm90/pipeline.cuh>
#include <kernelgen/sm90/smem_tile.cuh>
#include <kernelgen/sm90/tile_walk.cuh>
#include <kernelgen/sm90/wgmma.cuh>

namespace kernelgen {

// `Options` is the rendered file's struct of compile-time constants: Element (of a, b), Out, Bias, C; kMmaM, kConsumers, kBlockN,
// kStages, kSlabs, kClusterM, kClusterN, kBandRows, kPingpong; kRowA, kRowB (row order); kTmaOut (out goes through shared memory); kBias, kActivation,
// kGate, kAccumulate, kScales, kPromote
template <class Options>
struct DenseSm90 : Options {
  using T = typename Options::Element;
  using Options::kBlockN;
  using Options::kClusterM;
  using Options::kClusterN;
  using Options::kConsumers;
  using Options::kMmaM;
  using Options::kPingpong;
  using Options::kPromote;
  using Options::kStages;
  using Epilogue = DenseEpilogue<Options>;

  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
  static constexpr int kRows = kMmaM * kMmaRows;  // of one consumer
  static constexpr int kBlockM = (kPingpong ? 1 : kConsumers) * kRows;
  static constexpr int kTurn = 1 + kConsumers;  // named barriers of the turns, behind those of the epilogues
  static_assert(!kPingpong || kConsumers == 2, "two take turns");
  static constexpr int kDepth = kSwizzleRowBytes / static_cast<int>(sizeof(T));
  static constexpr bool kMajorKA = Options::kRowA, kMajorKB = !Options::kRowB;
  using TileA = SmemTile<T, kBlockM, kDepth, kMajorKA>;
  using TileB = SmemTile<T, kBlockN, kDepth, kMajorKB>;
  using Product = Wgmma<T, kBlockN>;

  static constexpr int kBlocks = kClusterM * kClusterN;
  using Ring = Pipeline<kStages, kPingpong ? 4 : 4 * kConsumers, kBlocks>;

  // Registers: 65,536 / 128 = 512 for the warpgroups together; the producer's addresses need few.
  static constexpr int kProducerRegisters = kConsumers == 1 ? 56 : kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 1 ? 240 : kConsumers == 2 ? 232 : 160;

  static constexpr int kStageBytes = TileA::kBytes + TileB::kBytes;
  static constexpr int kStoreAt = kStages * kStageBytes;
  static constexpr int kBarriersAt = kStoreAt + kConsumers * Epilogue::kStoreBytes;
  static constexpr int kSharedBytes = kBarriersAt + round_up(Ring::kBytes, 128);

  // A box: what one TMA instruction brings of an operand.
  static constexpr int kBoxA = kMajorKA ? kBlockM / kClusterN : TileA::kRowElements;
  static constexpr int kBoxB = kMajorKB ? kBlockN / max_of(kClusterM, Epilogue::kSplit ? 2 : 1) : TileB::kRowElements;
  static_assert(kBoxA <= 256 && kBoxB <= 256, "a box has at most 256 rows");

  __device__ static uint16_t blocks_along_n(int m) {  // of the cluster, with the same rows
    uint16_t mask = 0;
    for (int n = 0; n < kClusterN; ++n) mask |= 1 << (n * kClusterM + m);
    return mask;
  }
  __device__ static uint16_t blocks_along_m(int n) { return ((1 << kClusterM) - 1) << (n * kClusterM); }

  struct Place {
    int m, n, batch;  // first row, first output column
  };

  __device__ static Place place(const DenseSm90Params& p, const TileWalk<Options::kBandRows>& walk, int index, int rank_m, int rank_n) {
    const TilePosition tile = walk.at(index);
    return {(tile.m * kClusterM + rank_m) * kBlockM, (tile.n * kClusterN + rank_n) * Epilogue::kOutputs, tile.batch};
  }

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

  __device__ static void produce(const DenseSm90Params& p, const Ring& ring, uint32_t shared, int cluster, int clusters, int rank_m,
                                 int rank_n) {
    const TileWalk<Options::kBandRows> walk{p.tiles_m, p.tiles_n, p.tiles};
    const uint16_t sharing_a = blocks_along_n(rank_m), sharing_b = blocks_along_m(rank_n);
    typename Ring::Position at;
    for (int index = cluster; index < p.tiles; index += clusters) {
      const Place tile = place(p, walk, index, rank_m, rank_n);
      for (int k = 0; k < p.k; k += kDepth) {
        ring.wait_empty(at);
        ring.expect(at, kStageBytes);
        const uint32_t stage_a = shared + at.stage * kStageBytes, stage_b = stage_a + TileA::kBytes;
        // In both orders a row of the tile, or what is as much of a box, is 128 bytes.
#pragma unroll
        for (int i = 0; i < kBlockM / kBoxA / kClusterN; ++i) {
          const int row = (rank_n * (kBlockM / kBoxA / kClusterN) + i) * kBoxA;
          load_box<kClusterN>(stage_a + row * kSwizzleRowBytes, p.map_a,
                              ring.full(at.stage), kMajorKA, k, tile.m + row, tile.batch, sharing_a);
        }
#pragma unroll
        for (int i = 0; i < kBlockN / kBoxB / kClusterM; ++i) {
          const int row = (rank_m * (kBlockN / kBoxB / kClusterM) + i) * kBoxB;
          load_box<kClusterM>(stage_b + row * kSwizzleRowBytes, p.map_b,
                              ring.full(at.stage), kMajorKB, k, Epilogue::column_of_b(p, tile.n, row), p.batched_b ? tile.batch : 0,
                              sharing_b);
        }
        at.advance();
      }
    }
  }

  // The products of one stage for this warpgroup's rows; `keep` false begins from zero.
  __device__ static void multiply(float (&sums)[kMmaM][kBlockN / 2], uint32_t stage, int first_row, bool keep) {
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) hold(sums[m]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TileA::kSteps; ++step) {
#pragma unroll
      for (int m = 0; m < kMmaM; ++m) {
        Product::template shared<!kMajorKA, !kMajorKB>(sums[m], TileA::descriptor(stage, first_row + m * kMmaRows, step),
                                                       TileB::descriptor(stage + TileA::kBytes, 0, step), keep || step > 0);
      }
    }
    wgmma_commit();
  }

  // All products of a tile are issued: the other consumer may begin, and owns the next stages.
  __device__ static void end_turn(typename Ring::Position& at, int group, int steps) {
    if constexpr (kPingpong) {
      named_barrier_arrive(kTurn + (group ^ 1), 2 * kWarpgroupThreads);
      at.skip(steps);
    }
  }

  __device__ static void consume(const DenseSm90Params& p, const Ring& ring, uint32_t shared, int cluster, int clusters, int rank_m,
                                 int rank_n, int group) {
    const TileWalk<Options::kBandRows> walk{p.tiles_m, p.tiles_n, p.tiles};
    const int steps = ceil_div(p.k, kDepth), first_row = kPingpong ? 0 : group * kRows;
    typename Ring::Position at;
    if (kPingpong && group == 1) {
      at.skip(steps);
      named_barrier_arrive(kTurn, 2 * kWarpgroupThreads);  // the first turn is the other's
      cluster += clusters;
    }
    if (kPingpong) clusters *= 2;
    Epilogue epilogue{shared + kStoreAt + group * Epilogue::kStoreBytes, group};
    float sums[kMmaM][kBlockN / 2];
    for (int index = cluster; index < p.tiles; index += clusters) {
      const Place tile = place(p, walk, index, rank_m, rank_n);
      if constexpr (kPingpong) named_barrier_sync(kTurn + group, 2 * kWarpgroupThreads);
      if constexpr (kPromote) {
        float totals[kMmaM][kBlockN / 2];
#pragma unroll
        for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
          for (int i = 0; i < kBlockN / 2; ++i) totals[m][i] = 0.0f;
        }
        for (int step = 0; step < steps; ++step) {
          ring.wait_full(at);
          multiply(sums, shared + at.stage * kStageBytes, first_row, false);
          wgmma_wait<0>();
          ring.release(at.stage);
          at.advance();
#pragma unroll
          for (int m = 0; m < kMmaM; ++m) {
            hold(sums[m]);
#pragma unroll
            for (int i = 0; i < kBlockN / 2; ++i) totals[m][i] += sums[m][i];
          }
        }
        end_turn(at, group, steps);
        epilogue.run(p, totals, tile.m + first_row, tile.n, tile.batch);
      } else {
        int unread = 0;  // the stage whose products may be in flight
        for (int step = 0; step < steps; ++step) {
          ring.wait_full(at);
          multiply(sums, shared + at.stage * kStageBytes, first_row, step > 0);
          if (step > 0) {
            wgmma_wait<1>();
            ring.release(unread);
          }
          unread = at.stage;
          at.advance();
        }
        end_turn(at, group, steps);
        wgmma_wait<0>();
        ring.release(unread);
#pragma unroll
        for (int m = 0; m < kMmaM; ++m) hold(sums[m]);
        epilogue.run(p, sums, tile.m + first_row, tile.n, tile.batch);
      }
    }
    epilogue.finish();
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
    if (threadIdx.x == 32) {
      tma_prefetch_map(p.map_a);
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
    const int cluster = blockIdx.x / kBlocks, clusters = gridDim.x / kBlocks;
    const int rank_m = rank % kClusterM, rank_n = rank / kClusterM;
    if (group == kConsumers) {
      give_registers<kProducerRegisters>();
      if (warp == 4 * kConsumers && elect_one()) produce(p, ring, shared, cluster, clusters, rank_m, rank_n);
    } else {
      take_registers<kConsumerRegisters>();
      consume(p, ring, shared, cluster, clusters, rank_m, rank_n, group);
    }
    // A block stays until no other can still write its shared memory or arrive at its barriers.
    if constexpr (kBlocks > 1) cluster_sync();
  }
};

}  // namespace kernelgen
