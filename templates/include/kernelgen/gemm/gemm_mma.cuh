// out = activation(a @ b + bias) + beta * c with mma.sync tensor cores (sm_80 and later), float32 sums: 16-bit a and b, fp8
// ones, or a packed 4-bit b.
//
// One block computes kBlockM x kBlockN of the product of one batch entry. The k dimension passes through shared memory
// in tiles of kBlockK, kStages of them in a ring, so that kStages - 1 tiles are in flight while one is multiplied:
//
//   a tile (kBlockM x kBlockK), b tile (kBlockK x kBlockN)   global -> slot of the ring, as they lie (operand_tile.cuh)
//   fragments of one step of k                               ldmatrix, loaded one step ahead of their use (mma_operand.cuh)
//   narrow elements                                          widened exactly in registers, right before they are multiplied
//   accumulators (kWarpRows x kWarpColumns per warp)         float32, in registers until the end
//   epilogue: 16-row slabs of accumulators -> shared memory -> whole rows -> scales, bias, activation, c -> out
//
// kWarpsM x kWarpsN warps divide the block's tile. With kWarpsK > 1 as many such sets each take a share of the depth of
// every tile, and the epilogue adds them up in a fixed order: that keeps four warps busy on a tile of 16 rows.
//
// kPromoteEvery > 0 keeps two sets of accumulators. Every so many elements of k the sums of the first are multiplied by the
// scales of their blocks (mma_scales.cuh) and added to the second, rounding to nearest, which the tensor core does not.
//
// A gated activation makes two columns of the product one output. Gate and up halves are interleaved by columns while
// they are copied (operand_tile.cuh), so a block covers kBlockN / 2 outputs.
#pragma once

#include <kernelgen/gemm/mma_epilogue.cuh>
#include <kernelgen/gemm/mma_scales.cuh>

namespace kernelgen {

template <class Options>
struct GemmMma : MmaEpilogue<Options> {
  using Epilogue = MmaEpilogue<Options>;
  using Shape = MmaShape<Options>;
  using Scales = MmaScales<Shape>;
  using OperandA = typename Shape::OperandA;
  using OperandB = typename Shape::OperandB;
  using TileA = typename Shape::TileA;
  using TileB = typename Shape::TileB;
  using Product = typename Options::Product;
  using Accumulators = typename Epilogue::Accumulators;
  using Options::kBlockK;
  using Options::kBlockM;
  using Options::kGate;
  using Options::kStages;
  using Options::kZero;
  using Shape::kProducts;
  using Shape::kPromotes;
  using Shape::kPromoteSteps;
  using Shape::kShares;
  using Shape::kSplit;
  using Shape::kSteps;
  using Shape::kTilesM;
  using Shape::kTilesN;

  static constexpr int kSlotBytes = TileA::kBytes + TileB::kBytes;
  static constexpr int kScalesBegin = kStages * kSlotBytes;
  static constexpr int kSharedBytes = max_of(kScalesBegin + Scales::kRing, Shape::kWarps * Epilogue::kSlabFloats * 4);
  // Elements that are multiplied as they lie, without a second set of accumulators: one product per load.
  static constexpr bool kDirect = kProducts == 1 && !kPromotes;

  struct Fragments {
    uint32_t a[kTilesM][OperandA::kWords];
    uint32_t b[kTilesN / 2][OperandB::kWords];
  };

  struct Sums {
    Accumulators total;
    float partial[kPromotes ? kTilesM : 1][kTilesN][4];  // since the last promotion
  };

  // Blocks run roughly in order of their index. kRasterRows rows of tiles are walked column by column, so that the blocks
  // in flight share few tiles of a and of b, and L2 serves them. `tile` counts those of one batch entry.
  __device__ static void place_tile(MmaWork& work, int tile, int tiles_m, int tiles_n) {
    const int band = tile / (Options::kRasterRows * tiles_n);
    const int band_rows = min(Options::kRasterRows, tiles_m - band * Options::kRasterRows);
    const int in_band = tile - band * Options::kRasterRows * tiles_n;
    work.row += (band * Options::kRasterRows + in_band % band_rows) * kBlockM;
    work.column = in_band / band_rows * Shape::kBlockOutputs;
  }

  __device__ static MmaWork work_of(const GemmMmaParams& p) {
    const int tiles = p.tiles_m * p.tiles_n;
    MmaWork work;
    work.batch = blockIdx.x / tiles;
    work.row = 0;
    work.row_end = p.m;
    place_tile(work, blockIdx.x % tiles, p.tiles_m, p.tiles_n);
    work.k_begin = 0;
    work.k_end = p.k;
    return work;
  }

  __device__ static void load_fragments(Fragments& f, uint32_t slot, int a_lane, int b_lane, int step) {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) OperandA::load(f.a[m], slot, a_lane, m, step);
#pragma unroll
    for (int n = 0; n < kTilesN / 2; ++n) OperandB::load(f.b[n], slot + TileA::kBytes, b_lane, n, step);
  }

  __device__ static void multiply(Accumulators& sums, const Fragments& f) {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        // Back and forth, so that neighbouring instructions share an operand at the turns too.
        const int n = m % 2 ? kTilesN - 1 - j : j;
        mma_m16n8k16<Product>(sums[m][n], f.a[m], f.b[n / 2][n % 2 * 2], f.b[n / 2][n % 2 * 2 + 1]);
      }
    }
  }

  // One of the products of a load; Fresh: its sums replace those of `sums`.
  template <bool Fresh>
  __device__ static void multiply_widened(float (&sums)[kTilesM][kTilesN][4], const Fragments& f, int product,
                                          const uint32_t (&negative_zero)[kTilesN]) {
    uint32_t a[kTilesM][4];
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) OperandA::template fragment<typename Options::ElementA, Product>(a[m], f.a[m], product);
#pragma unroll
    for (int n = 0; n < kTilesN; n += 2) {
      uint32_t b[4];
      if constexpr (Shape::kOctets) {
        OperandB::template fragment<typename Options::ElementB, Product, kZero>(b, f.b[n / 2], product,
                                                                                {negative_zero[n], negative_zero[n + 1]});
      } else {
        OperandB::template fragment<typename Options::ElementB, Product>(b, f.b[n / 2], product);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < kTilesM; ++j) {
          const int m = half ? kTilesM - 1 - j : j;
          if constexpr (Fresh) {
            mma_m16n8k16_fresh<Product>(sums[m][n + half], a[m], b[2 * half], b[2 * half + 1]);
          } else {
            mma_m16n8k16<Product>(sums[m][n + half], a[m], b[2 * half], b[2 * half + 1]);
          }
        }
      }
    }
  }

  // total += partial, times the scales of the blocks it belongs to.
  __device__ static void promote(Sums& sums, uint32_t scales, int entry, const typename Shape::WarpPosition& warp) {
    const int lane = lane_id();
    float scale_a[kTilesM][2];
#pragma unroll
    for (int i = 0; i < 2 * kTilesM; ++i) {
      const int row = warp.m * Shape::kWarpRows + Shape::row_of(i / 2, i % 2, lane / 4);
      scale_a[i / 2][i % 2] = Options::kBlockScalesA ? Scales::of_a(scales, entry, row) : 1.0f;
    }
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float scale_b = 1.0f;
        if constexpr (Options::kBlockScalesB) {
          scale_b = Scales::of_b(scales, entry, warp.n * Shape::kWarpColumns + Shape::column_of(n, lane % 4 * 2 + c));
        }
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int i = 2 * half + c;
            sums.total[m][n][i] = fmaf(sums.partial[m][n][i], scale_a[m][half] * scale_b, sums.total[m][n][i]);
          }
        }
      }
    }
  }

  // The products of step `step` of a tile, whose scales are in the slot `scales`.
  __device__ static void multiply_step(Sums& sums, const Fragments& f, int step, uint32_t scales,
                                       const typename Shape::WarpPosition& warp) {
    if constexpr (kDirect) {
      multiply(sums.total, f);
    } else {
      const int entry = (warp.k * Shape::kDepth + step * Shape::kStepK) / Scales::kEvery;  // row of k of the slot's scales
      uint32_t negative_zero[kTilesN];
      if constexpr (kZero) {
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
          negative_zero[n] = Scales::zero_of_b(scales, entry, warp.n * Shape::kWarpColumns + 8 * n + lane_id() / 4);
        }
      }
#pragma unroll
      for (int product = 0; product < kProducts; ++product) {
        if constexpr (!kPromotes) {
          multiply_widened<false>(sums.total, f, product, negative_zero);
        } else if (step % kPromoteSteps == 0 && product == 0) {
          multiply_widened<true>(sums.partial, f, product, negative_zero);
        } else {
          multiply_widened<false>(sums.partial, f, product, negative_zero);
        }
      }
      if constexpr (kPromotes) {
        if ((step + 1) % kPromoteSteps == 0) promote(sums, scales, entry, warp);
      }
    }
  }

  // The rings: `slot` is multiplied, `refill` is the slot that the copies go to, kStages - 1 tiles ahead. Scales have a ring
  // of one slot more.
  struct Ring {
    uint32_t begin, slot, refill;
    uint32_t scales, scales_refill;

    __device__ uint32_t next_scales(uint32_t slot) const {
      const uint32_t end = begin + kScalesBegin + Scales::kRing;
      return slot + Scales::kBytes == end ? begin + kScalesBegin : slot + Scales::kBytes;
    }

    __device__ void turn() {
      refill = slot;
      slot = slot + kSlotBytes == begin + kStages * kSlotBytes ? begin : slot + kSlotBytes;
    }

    __device__ void turn_scales() {
      if constexpr (Scales::kAny) {
        scales = next_scales(scales);
        scales_refill = next_scales(scales_refill);
      }
    }
  };

  // What a block works through: the operands, their scales, and what of them a warp multiplies.
  struct Flow {
    TileA a;
    TileB b;
    Scales scales;
    typename Scales::Staged staged;  // of the tile that is copied next
    MmaWork work;
    typename Shape::WarpPosition warp;
    int a_lane, b_lane, gate;

    __device__ void fetch_scales(typename Scales::Staged& to, const GemmMmaParams& p, int k0) const {
      scales.fetch(to, p, work, b, gate, k0);
    }
  };

  // How the next tile is copied: the first two spread over the steps, between the products (OperandTile::copy_share).
  enum class Copies { kWhole, kOuterEdge, kAny };

  // Multiplies the tile in ring.slot while the one kStages - 1 further on, at depth k0, is copied.
  template <Copies copies>
  __device__ static void multiply_tile(Sums& sums, Fragments (&fragments)[2], Flow& flow, Ring& ring, const GemmMmaParams& p,
                                       bool has_next, int k0) {
    if constexpr (Scales::kAny) {
      Scales::store(ring.scales_refill, flow.staged);
      flow.fetch_scales(flow.staged, p, k0 + kBlockK);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (copies != Copies::kAny) {
        if (step < kShares) {
          flow.a.template copy_share<copies == Copies::kWhole>(ring.refill, step, kShares);
          flow.b.template copy_share<copies == Copies::kWhole>(ring.refill + TileA::kBytes, step, kShares);
        }
      } else if (step == 0 && has_next) {
        flow.a.copy(ring.refill, k0);
        flow.b.copy(ring.refill + TileA::kBytes, k0);
      }
      if (step == kSteps - 1) {
        flow.a.advance();
        flow.b.advance();
        ring.turn();
        cp_async_commit();  // also when empty: the number of groups per tile is what cp_async_wait counts
        cp_async_wait<kStages - 2>();
        // The next tile is visible to the block; and every warp has read its last fragments of this tile, whose slot is
        // refilled from now on.
        __syncthreads();
      }
      // After the last tile this reads a stale slot into fragments that nobody uses.
      load_fragments(fragments[(step + 1) % 2], ring.slot, flow.a_lane, flow.b_lane, (step + 1) % kSteps);
      multiply_step(sums, fragments[step % 2], step, ring.scales, flow.warp);
    }
    ring.turn_scales();
    if constexpr (kSteps % 2 == 1) fragments[0] = fragments[1];
  }

  // The scales of the first kStages - 1 tiles: all loads first, so that they are in flight together.
  __device__ static void start_scales(Flow& flow, const GemmMmaParams& p, uint32_t ring, int k0) {
    if constexpr (Scales::kAny) {
      constexpr int kAhead = kStages - 1;
      typename Scales::Staged staged[kAhead];
#pragma unroll
      for (int tile = 0; tile < kAhead; ++tile) flow.fetch_scales(staged[tile], p, k0 + tile * kBlockK);
#pragma unroll
      for (int tile = 0; tile < kAhead; ++tile) Scales::store(ring + kScalesBegin + tile * Scales::kBytes, staged[tile]);
      flow.fetch_scales(flow.staged, p, k0 + kAhead * kBlockK);
    }
  }

  __device__ static void accumulate(Sums& sums, const GemmMmaParams& p, Flow& flow, uint32_t shared) {
    constexpr int kAhead = kStages - 1;
    const int first = Shape::kFromMiddle ? flow.work.k_begin / kBlockK * kBlockK : 0, end = flow.work.k_end;
    const int tiles = ceil_div(end - first, kBlockK);

#pragma unroll 1
    for (int tile = 0; tile < kAhead; ++tile) {
      if (tile < tiles) {
        flow.a.copy(shared + tile * kSlotBytes, first + tile * kBlockK);
        flow.b.copy(shared + tile * kSlotBytes + TileA::kBytes, first + tile * kBlockK);
        flow.a.advance();
        flow.b.advance();
      }
      cp_async_commit();
    }
    start_scales(flow, p, shared, first);
    cp_async_wait<kStages - 2>();
    __syncthreads();  // the first tile, and the scales of all that are on their way, are visible to the whole block

    Fragments fragments[2];
    load_fragments(fragments[0], shared, flow.a_lane, flow.b_lane, 0);
    Ring ring{shared, shared, shared + kAhead * kSlotBytes, shared + kScalesBegin, shared + kScalesBegin + kAhead * Scales::kBytes};
    int tile = 0;
    // While the tile to be copied ends inside k.
    const auto depth = [&] { return first + (tile + kAhead) * kBlockK; };
    const auto inside = [&] { return depth() + kBlockK <= end; };
    if constexpr (Options::kAccess == 16) {
      if (flow.a.whole && flow.b.whole) {
        for (; inside(); ++tile) multiply_tile<Copies::kWhole>(sums, fragments, flow, ring, p, true, depth());
      } else {
        for (; inside(); ++tile) multiply_tile<Copies::kOuterEdge>(sums, fragments, flow, ring, p, true, depth());
      }
    }
#pragma unroll 1
    for (; tile < tiles; ++tile) {
      multiply_tile<Copies::kAny>(sums, fragments, flow, ring, p, tile + kAhead < tiles, depth());
    }
    cp_async_wait<0>();
    __syncthreads();  // every warp is done with the ring: the epilogue reuses it
  }

  __device__ static void compute(const GemmMmaParams& p, const MmaWork& work, unsigned char* shared_memory) {
    const char* a_batch = static_cast<const char*>(p.a) + work.batch * p.a_batch;
    const char* b_batch = static_cast<const char*>(p.b) + work.batch * p.b_batch;
    const int half = p.n / 2, gate = kGate == Gate::kUpFirst ? half : 0;
    const auto warp = Shape::warp_position();
    // An interleaved gate needs no rearranging: its block starts at twice the output column.
    Flow flow{
        TileA(a_batch, p.a_stride, work.row, work.row_end, work.k_begin, work.k_end),
        TileB(b_batch, p.b_stride, kGate == Gate::kInterleaved ? 2 * work.column : work.column, kSplit ? half : p.n, work.k_begin,
              work.k_end, gate, kGate == Gate::kUpFirst ? -half : half),
        Scales(p, work.batch), {}, work, warp,
        OperandA::lane_offset(warp.m * Shape::kWarpRows, warp.k * kSteps),
        OperandB::lane_offset(warp.n * Shape::kWarpColumns, warp.k * kSteps), gate};

    Sums sums;
#pragma unroll
    for (int i = 0; i < kTilesM * kTilesN * 4; ++i) sums.total[i / (kTilesN * 4)][i / 4 % kTilesN][i % 4] = 0.0f;
    accumulate(sums, p, flow, shared_address(shared_memory));
    Epilogue::store(p, work, sums.total, reinterpret_cast<float*>(shared_memory));
  }

  __device__ static void run(const GemmMmaParams& p) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    compute(p, work_of(p), shared_memory);
  }
};

}  // namespace kernelgen
