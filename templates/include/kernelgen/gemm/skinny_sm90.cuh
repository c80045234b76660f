// out = activation(scale * (a @ b) + bias) + beta * c on Hopper for few rows of a: a matter of reading b at memory speed. More rows
// are tiles of kTokens: where the columns are few, shares of K are what fills the chip.
//
// The product is computed transposed, b^T a^T, so that the 64 rows of a WGMMA are columns of b and the rows of a, rounded up to
// kTokens, are its N: nothing is multiplied in vain. A block has kMmaM * 64 columns of b and a share of K:
//
//   one warp        fills a ring of stages by TMA, kBlocksK boxes of 128 bytes of K deep
//   kGroups warpgroups take every kGroups-th stage each, with one group of products in flight: a small WGMMA takes as long as the
//                   one before it on the same sums takes to finish, so one warpgroup alone cannot keep up with memory
//   kSplitK blocks  of a cluster share K. Each warpgroup leaves its sums in shared memory; then each block adds up a part of them
//                   all, in a fixed order, and finishes the outputs: eight neighbours of a row per thread
//
// A gated activation has kRows / 2 columns of the gate and as many of the up half in a block, or pairs where they alternate.
#pragma once

#include <kernelgen/activation/activations.cuh>
#include <kernelgen/cuda/ldmatrix.cuh>
#include <kernelgen/cuda/vector_io.cuh>
#include <kernelgen/gemm/gate.cuh>
#include <kernelgen/gemm/skinny_scales_sm90.cuh>
#include <kernelgen/sm90/control.cuh>
#include <kernelgen/sm90/pipeline.cuh>
#include <kernelgen/sm90/smem_tile.cuh>
#include <kernelgen/sm90/tma.cuh>
#include <kernelgen/sm90/wgmma.cuh>

namespace kernelgen {

// Strides are in elements.
struct SkinnySm90Params {
  TensorMap map_a, map_b;  // boxes of one stage
  const void* a;
  const void* b;
  void* out;
  const void* bias;      // (n), null without
  const void* c;         // shape of out, null without
  const float* scale_a;  // (m) or one; blocks: (m, k / 128)
  const float* scale_b;  // (n) or one; blocks: (k / 128, n or n / 128)
  int64_t c_batch, c_row, out_batch, out_row, bias_batch, scale_a_batch, scale_b_batch;
  int32_t m, n, k;            // n of b: twice the outputs of a gated activation
  int32_t stages, per_block;  // stages that K takes, and how many of them a block of a cluster takes at most
  int32_t batched_b;          // 0: one b for all
  int32_t scale_a_row, scale_a_block, scale_b_column, scale_b_block;  // strides: 0 for one scale
  float beta, alpha, limit;  // alpha, limit: of activations that have them
};

// `Options` is the rendered file's struct of compile-time constants: Element (of a, b), Out, Bias, C; kMmaM, kTokens, kStages,
// kBlocksK, kGroups, kSplitK; kRowB (row order of b); kBias, kActivation, kGate, kClamped, kAccumulate, kScales, kPromote, kVectorOut;
// kBlockScales, kScaleColumns (of b, that share a scale of blocks)
template <class Options>
struct SkinnySm90 : Options {
  using T = typename Options::Element;
  using Out = typename Options::Out;
  using Options::kBlocksK;
  using Options::kGroups;
  using Options::kMmaM;
  using Options::kPromote;
  using Options::kSplitK;
  using Options::kStages;
  using Options::kTokens;

  static constexpr int kConsumerThreads = kGroups * kWarpgroupThreads;
  static constexpr int kThreads = kConsumerThreads + (Options::kBlockScales ? 2 : 1) * kWarpSize;
  static constexpr int kRows = kMmaM * kMmaRows;  // columns of b
  static constexpr int kDepth = kSwizzleRowBytes / static_cast<int>(sizeof(T));
  static constexpr bool kMajorK = !Options::kRowB;
  using TileB = SmemTile<T, kRows, kDepth, kMajorK>;
  using TileA = SmemTile<T, kTokens, kDepth, true>;
  using Product = Wgmma<T, kTokens>;
  using Scales = SkinnyBlockScales<Options, SkinnySm90Params>;
  using Ring = Pipeline<kStages, 4, 1, 1 + Scales::kFillers>;
  static_assert(kStages >= 2 * kGroups, "a warpgroup gives a stage back once it has its next one");
  // Waiting names a parity, so only who waited for the last filling of a stage may wait for the next.
  static_assert(kStages % kGroups == 0, "a stage stays with one warpgroup");

  static constexpr Gate kGate = Options::kGate;
  static constexpr bool kGated = kGate != Gate::kNone;
  static constexpr bool kSplit = kGate == Gate::kGateFirst || kGate == Gate::kUpFirst;
  static constexpr int kOutputs = kGated ? kRows / 2 : kRows;

  static constexpr int kStageBytes = kBlocksK * (TileA::kBytes + TileB::kBytes);
  static constexpr int kPitch = kRows + 4;  // of the sums, in floats: the lanes of a warp write to different banks
  static constexpr int kSumBytes = kTokens * kPitch * 4;
  static constexpr int kScalesAt = kStages * kStageBytes;
  static constexpr int kBarriersAt = max_of(kScalesAt + kStages * kBlocksK * Scales::kBytes, round_up(kGroups * kSumBytes, 128));
  static constexpr int kSharedBytes = kBarriersAt + round_up(Ring::kBytes, 128);
  static constexpr int kBoxB = kMajorK ? (kSplit ? kRows / 2 : kRows) : TileB::kRowElements;

  // Of column `row` of the block's tile, as a column of b.
  __device__ static int column_of_b(const SkinnySm90Params& p, int first_output, int row) {
    if constexpr (kSplit) {
      const bool up = row >= kOutputs;
      return first_output + row % kOutputs + (up == (kGate == Gate::kGateFirst) ? p.n / 2 : 0);
    } else {
      return first_output * (kGated ? 2 : 1) + row;
    }
  }

  // Where a block's outputs lie.
  struct Tile {
    int token, output, batch;  // the first of each
  };

  __device__ static void produce(const SkinnySm90Params& p, const Ring& ring, uint32_t shared, const Tile& tile, int begin, int end) {
    typename Ring::Position at;
    for (int step = begin; step < end; ++step) {
      ring.wait_empty(at);
      ring.expect(at, kStageBytes);
      uint32_t target = shared + at.stage * kStageBytes;
#pragma unroll
      for (int block = 0; block < kBlocksK; ++block) {
        const int k = (step * kBlocksK + block) * kDepth;
#pragma unroll
        for (int row = 0; row < kRows; row += kBoxB) {
          const int column = column_of_b(p, tile.output, row), b = p.batched_b ? tile.batch : 0;
          tma_load(target + row * kSwizzleRowBytes, p.map_b, ring.full(at.stage), kMajorK ? k : column, kMajorK ? column : k, b);
        }
        tma_load(target + TileB::kBytes, p.map_a, ring.full(at.stage), k, tile.token, tile.batch);
        target += TileA::kBytes + TileB::kBytes;
      }
      at.advance();
    }
  }

  __device__ static uint32_t scales_of(uint32_t shared, int stage, int block) {
    return shared + kScalesAt + (stage * kBlocksK + block) * Scales::kBytes;
  }

  // By another warp.
  __device__ static void produce_scales(const SkinnySm90Params& p, const Ring& ring, uint32_t shared, const Tile& tile, int begin,
                                        int end) {
    typename Ring::Position at;
    for (int step = begin; step < end; ++step, at.advance()) {
      ring.wait_empty(at);
#pragma unroll
      for (int block = 0; block < kBlocksK; ++block) {
        Scales::copy(scales_of(shared, at.stage, block), p, tile.token, tile.batch, step * kBlocksK + block,
                     [&](int row) { return column_of_b(p, tile.output, row); });
      }
      cp_async_arrive(ring.full(at.stage));
    }
  }

  using Sums = float[kMmaM][kTokens / 2];

  __device__ static void multiply(Sums& sums, uint32_t stage, int block, bool keep) {
#pragma unroll
    for (int step = 0; step < TileB::kSteps; ++step) {
#pragma unroll
      for (int m = 0; m < kMmaM; ++m) {
        const uint32_t tile = stage + block * (TileA::kBytes + TileB::kBytes);
        Product::template shared<!kMajorK, false>(sums[m], TileB::descriptor(tile, m * kMmaRows, step),
                                                  TileA::descriptor(tile + TileB::kBytes, 0, step), keep || step > 0);
      }
    }
  }

  __device__ static void hold_all(Sums& sums) {
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) hold(sums[m]);
  }

  __device__ static void clear(Sums& sums) {
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) sums[m][i] = 0.0f;
    }
  }

  // The products of every kGroups-th stage of [begin, end).
  __device__ static void accumulate(Sums& totals, const SkinnySm90Params& p, const Ring& ring, uint32_t shared, const Tile& tile,
                                    int group, int begin, int end) {
    const int steps = end - begin;
    typename Ring::Position at;
    at.skip(group);
    if constexpr (kPromote) {
      clear(totals);
      // The tensor core adds fp8 products up with some 14 bits: 128 of K from zero, then to the float32 totals.
      Sums sums;
      for (int step = group; step < steps; step += kGroups) {
        ring.wait_full(at);
#pragma unroll
        for (int block = 0; block < kBlocksK; ++block) {
          hold_all(sums);
          wgmma_fence();
          multiply(sums, shared + at.stage * kStageBytes, block, false);
          wgmma_commit();
          typename Scales::Step scales;
          Scales::load(scales, scales_of(shared, at.stage, block));
          wgmma_wait<0>();
          hold_all(sums);
          Scales::add(totals, sums, scales);
        }
        __syncwarp();  // all lanes have read their scales
        ring.release(at.stage);
        at.skip(kGroups);
      }
    } else {
      int unread = 0;
      for (int step = group; step < steps; step += kGroups) {
        ring.wait_full(at);
        hold_all(totals);
        wgmma_fence();
#pragma unroll
        for (int block = 0; block < kBlocksK; ++block) multiply(totals, shared + at.stage * kStageBytes, block, step > group || block > 0);
        wgmma_commit();
        if (step > group) {
          wgmma_wait<1>();
          ring.release(unread);
        }
        unread = at.stage;
        at.skip(kGroups);
      }
      wgmma_wait<0>();
      hold_all(totals);
      if (steps <= group) clear(totals);  // not before: sums that others define too are waited for, product by product
    }
  }

  // Sums of a warpgroup to shared memory: [token][column of the tile].
  __device__ static void leave_sums(const Sums& sums, uint32_t shared) {
    const int lane = lane_id(), column = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) {
        const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
        const uint32_t target = shared + (token * kPitch + m * kMmaRows + column + i % 4 / 2 * 8) * 4;
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(target), "f"(sums[m][i]) : "memory");
      }
    }
  }

  // Eight neighbouring sums of a token over all warpgroups of the cluster, scaled, with bias.
  __device__ static void collect(float (&x)[8], const SkinnySm90Params& p, uint32_t shared, const Tile& tile, int token, int row,
                                 int column) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = 0.0f;
    const uint32_t source = shared + (token * kPitch + row) * 4;
#pragma unroll
    for (int block = 0; block < kSplitK; ++block) {
      const uint32_t remote = cluster_address(source, block);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const float4 low = load_cluster(remote + group * kSumBytes), high = load_cluster(remote + group * kSumBytes + 16);
        x[0] += low.x, x[1] += low.y, x[2] += low.z, x[3] += low.w;
        x[4] += high.x, x[5] += high.y, x[6] += high.z, x[7] += high.w;
      }
    }
    if constexpr (Options::kScales || Options::kBias) {
      const int64_t row_of_a = tile.token + token;
      const float scale_a = Options::kScales ? p.scale_a[tile.batch * p.scale_a_batch + row_of_a * p.scale_a_row] : 1.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int j = min(column + i, p.n - 1);
        if constexpr (Options::kScales) x[i] *= scale_a * p.scale_b[tile.batch * p.scale_b_batch + static_cast<int64_t>(j) * p.scale_b_column];
        if constexpr (Options::kBias) x[i] += to_float(static_cast<const typename Options::Bias*>(p.bias)[tile.batch * p.bias_batch + j]);
      }
    }
  }

  __device__ static void finish(const SkinnySm90Params& p, uint32_t shared, const Tile& tile, int token, int piece) {
    const int column = tile.output + 8 * piece, outputs = kGated ? p.n / 2 : p.n, count = outputs - column;
    if (count <= 0) return;
    float y[8];
    if constexpr (kGated) {
      float first[8], second[8];
      const int row = kSplit ? 8 * piece : 16 * piece, further = kSplit ? row + kOutputs : row + 8;
      collect(first, p, shared, tile, token, row, column_of_b(p, tile.output, row));
      collect(second, p, shared, tile, token, further, column_of_b(p, tile.output, further));
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float gate = kSplit ? first[i] : i < 4 ? first[2 * i % 8] : second[2 * i % 8];
        const float up = kSplit ? second[i] : i < 4 ? first[(2 * i + 1) % 8] : second[(2 * i + 1) % 8];
        y[i] = activate_gate<Options::kActivation, Options::kClamped>(gate, up, p.alpha, p.limit);
      }
    } else {
      collect(y, p, shared, tile, token, 8 * piece, column);
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] = activate<Options::kActivation>(y[i]);
    }
    const int64_t row_of_out = tile.token + token;
    if constexpr (Options::kAccumulate) {
      // A zero beta means that c is not read, as in BLAS: 0 * NaN would be NaN.
      const auto* c = static_cast<const typename Options::C*>(p.c) + tile.batch * p.c_batch + row_of_out * p.c_row + column;
      if (p.beta != 0.0f) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (i < count) y[i] = fmaf(p.beta, to_float(c[i]), y[i]);
        }
      }
    }
    Out* out = static_cast<Out*>(p.out) + tile.batch * p.out_batch + row_of_out * p.out_row + column;
    if (Options::kVectorOut && count >= 8) {
      store_elements(out, y);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < count) out[i] = from_float<Out>(y[i]);
      }
    }
  }

  __device__ static void run(const SkinnySm90Params& p) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    const uint32_t shared = shared_address(dynamic_shared);
    const Ring ring{shared + kBarriersAt};
    const int warp = warp_id(), rank = kSplitK > 1 ? static_cast<int>(cluster_rank()) : 0;
    const int column_tiles = ceil_div(kGated ? p.n / 2 : p.n, kOutputs), index = blockIdx.x / kSplitK;
    const Tile tile{index / column_tiles * kTokens, index % column_tiles * kOutputs, static_cast<int>(blockIdx.y)};
    if (threadIdx.x == 0) {
      ring.init();
      barrier_init_fence();
      tma_prefetch_map(p.map_a);
      tma_prefetch_map(p.map_b);
    }
    __syncthreads();
    wait_for_previous_kernel();
    start_next_kernel();
    const int begin = min(rank * p.per_block, p.stages), end = min(begin + p.per_block, p.stages);
    if (warp == 4 * kGroups) {
      if (elect_one()) produce(p, ring, shared, tile, begin, end);
      __syncwarp();
    } else if (Options::kBlockScales && warp == 4 * kGroups + 1) {
      produce_scales(p, ring, shared, tile, begin, end);
    } else {
      Sums sums;
      accumulate(sums, p, ring, shared, tile, warp / 4, begin, end);
      named_barrier_sync(1, kConsumerThreads);  // all warps have read the last stages, which the sums overwrite
      leave_sums(sums, shared + warp / 4 * kSumBytes);
    }
    if constexpr (kSplitK > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
    constexpr int kPieces = kOutputs / 8;
    for (int i = rank * kThreads + threadIdx.x; i < min(p.m - tile.token, kTokens) * kPieces; i += kSplitK * kThreads) {
      finish(p, shared, tile, i / kPieces, i % kPieces);
    }
    if constexpr (kSplitK > 1) cluster_sync();  // a block stays while others read its sums
  }
};

}  // namespace kernelgen
