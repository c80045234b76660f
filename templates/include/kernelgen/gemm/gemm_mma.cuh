// out = activation(a @ b + bias) + beta * c with mma.sync tensor cores (sm_80 and later): 16-bit a and b, float32 sums.
//
// One block computes kBlockM x kBlockN of the product of one batch entry. The k dimension passes through shared memory
// in tiles of kBlockK, kStages of them in a ring, so that kStages - 1 tiles are in flight while one is multiplied:
//
//   a tile (kBlockM x kBlockK), b tile (kBlockK x kBlockN)   global -> slot of the ring, as they lie (operand_tile.cuh)
//   fragments of one k16 step                                ldmatrix, loaded one step ahead of their use
//   accumulators (kWarpRows x kWarpColumns per warp)         float32, in registers until the end
//   epilogue: 16-row slabs of accumulators -> shared memory -> whole rows -> bias, activation, c -> out
//
// kWarpsM x kWarpsN warps divide the block's tile. With kWarpsK > 1 as many such sets each take a share of the k16 steps
// of every tile, and the epilogue adds them up in a fixed order: that keeps four warps busy on a tile of 16 rows.
//
// A gated activation makes two columns of the product one output. Gate and up halves are interleaved by 8 columns while
// they are copied (operand_tile.cuh), so a block covers kBlockN / 2 outputs and every 16 columns hold 8 of them.
#pragma once

#include <kernelgen/activation/activations.cuh>
#include <kernelgen/cuda/mma.cuh>
#include <kernelgen/cuda/vector_io.cuh>
#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/gemm/gate.cuh>
#include <kernelgen/gemm/operand_tile.cuh>

namespace kernelgen {

// Strides are in elements. `a_stride` steps along a's non-contiguous dimension, `b_stride` along b's.
struct GemmMmaParams {
  const void* a;
  const void* b;
  const void* bias;  // (n), null without
  const void* c;     // shape of out, null without
  void* out;
  int64_t a_batch, a_stride;
  int64_t b_batch, b_stride;
  int64_t c_batch, c_row;
  int64_t out_batch, out_row;
  int32_t m, n, k;           // n of b: twice the outputs of a gated activation
  int32_t tiles_m, tiles_n;  // of one batch entry
  float beta;
};

// `Options` is the rendered file's struct of compile-time constants:
//   Element (of a, b), Out, Bias, C; kBlockM, kBlockN, kBlockK, kWarpsM, kWarpsN, kWarpsK, kStages, kRasterRows;
//   kRowA, kRowB (row order); kAccess (alignment of a and b in bytes), kVectorOut (c and out take 16-byte accesses);
//   kBias, kActivation, kGate, kAccumulate
template <class Options>
struct GemmMma : Options {
  using T = typename Options::Element;
  using Out = typename Options::Out;
  using Options::kBlockK;
  using Options::kBlockM;
  using Options::kBlockN;
  using Options::kGate;
  using Options::kStages;
  using Options::kWarpsK;
  using Options::kWarpsM;
  using Options::kWarpsN;

  static constexpr int kWarps = kWarpsM * kWarpsN * kWarpsK;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kWarpRows = kBlockM / kWarpsM;
  static constexpr int kWarpColumns = kBlockN / kWarpsN;
  static constexpr int kTilesM = kWarpRows / 16;          // m16 tiles of a warp
  static constexpr int kTilesN = kWarpColumns / 8;        // n8 tiles
  static constexpr int kSteps = kBlockK / 16 / kWarpsK;   // k16 steps of a warp in one k tile
  static constexpr int kShares = max_of(1, kSteps - 1);   // of a tile's copies, one in each step but the last
  static constexpr bool kGated = kGate != Gate::kNone;
  static constexpr bool kSplit = kGate == Gate::kGateFirst || kGate == Gate::kUpFirst;
  static constexpr int kBlockOutputs = kGated ? kBlockN / 2 : kBlockN;

  static_assert(kWarpRows % 16 == 0 && kWarpColumns % 16 == 0, "ldmatrix.x4 loads 16 rows and 16 columns");
  static_assert((kWarpRows & (kWarpRows - 1)) == 0 && (kWarpColumns & (kWarpColumns - 1)) == 0 &&
                (kSteps & (kSteps - 1)) == 0 && kSteps > 0, "swizzled addresses are stepped by powers of two");

  using TileA = OperandTile<kBlockM, kBlockK, Options::kRowA, false, kThreads, Options::kAccess>;
  using TileB = OperandTile<kBlockN, kBlockK, !Options::kRowB, kSplit, kThreads, Options::kAccess>;
  static constexpr int kSlotBytes = TileA::kBytes + TileB::kBytes;

  // Epilogue slab of a warp: 16 rows of float32. 8 floats of padding keep a quad's row apart from the next in the banks.
  static constexpr int kSlabPitch = kWarpColumns + 8;
  static constexpr int kSlabFloats = 16 * kSlabPitch;
  static constexpr int kSharedBytes = max_of(kStages * kSlotBytes, kWarps * kSlabFloats * 4);

  using Accumulators = float[kTilesM][kTilesN][4];

  struct Fragments {
    uint32_t a[kTilesM][4];
    uint32_t b[kTilesN / 2][4];
  };

  // What this block computes.
  struct Work {
    int64_t batch;
    int row, column;  // first row of the product and first output column
  };

  // Blocks run roughly in order of their index. kRasterRows rows of tiles are walked column by column, so that the blocks
  // in flight share few tiles of a and of b, and L2 serves them.
  __device__ static Work work_of(const GemmMmaParams& p) {
    const int tiles = p.tiles_m * p.tiles_n;
    Work work;
    work.batch = blockIdx.x / tiles;
    const int tile = blockIdx.x % tiles;
    const int band = tile / (Options::kRasterRows * p.tiles_n);
    const int band_rows = min(Options::kRasterRows, p.tiles_m - band * Options::kRasterRows);
    const int in_band = tile - band * Options::kRasterRows * p.tiles_n;
    work.row = (band * Options::kRasterRows + in_band % band_rows) * kBlockM;
    work.column = in_band / band_rows * kBlockOutputs;
    return work;
  }

  struct WarpPosition {
    int m, n, k;
  };
  __device__ static WarpPosition warp_position() {
    const int warp = warp_id();
    return {warp % kWarpsM, warp / kWarpsM % kWarpsN, warp / (kWarpsM * kWarpsN)};
  }

  __device__ static void load_fragments(Fragments& f, uint32_t slot, int a_lane, int b_lane, int step) {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) TileA::load_fragment(f.a[m], slot, a_lane, m, step);
#pragma unroll
    for (int n = 0; n < kTilesN / 2; ++n) TileB::load_fragment(f.b[n], slot + TileA::kBytes, b_lane, n, step);
  }

  __device__ static void multiply(Accumulators& sums, const Fragments& f) {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        // Back and forth, so that neighbouring instructions share an operand at the turns too.
        const int n = m % 2 ? kTilesN - 1 - j : j;
        mma_m16n8k16<T>(sums[m][n], f.a[m], f.b[n / 2][n % 2 * 2], f.b[n / 2][n % 2 * 2 + 1]);
      }
    }
  }

  // The ring: `slot` is multiplied, `refill` is the slot that the copies go to, kStages - 1 tiles ahead.
  struct Ring {
    uint32_t begin, slot, refill;

    __device__ void turn() {
      refill = slot;
      slot = slot + kSlotBytes == begin + kStages * kSlotBytes ? begin : slot + kSlotBytes;
    }
  };

  // How the next tile is copied: the first two spread over the steps, between the products (OperandTile::copy_share).
  enum class Copies { kWhole, kOuterEdge, kAny };

  // Multiplies the tile in ring.slot while the one kStages - 1 further on, at depth k0, is copied.
  template <Copies copies>
  __device__ static void multiply_tile(Accumulators& sums, Fragments (&fragments)[2], TileA& a, TileB& b, Ring& ring,
                                       int a_lane, int b_lane, bool has_next, int k0) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (copies != Copies::kAny) {
        if (step < kShares) {
          a.template copy_share<copies == Copies::kWhole>(ring.refill, step, kShares);
          b.template copy_share<copies == Copies::kWhole>(ring.refill + TileA::kBytes, step, kShares);
        }
      } else if (step == 0 && has_next) {
        a.copy(ring.refill, k0);
        b.copy(ring.refill + TileA::kBytes, k0);
      }
      if (step == kSteps - 1) {
        a.advance();
        b.advance();
        ring.turn();
        cp_async_commit();  // also when empty: the number of groups per tile is what cp_async_wait counts
        cp_async_wait<kStages - 2>();
        // The next tile is visible to the block; and every warp has read its last fragments of this tile, whose slot is
        // refilled from now on.
        __syncthreads();
      }
      // After the last tile this reads a stale slot into fragments that nobody uses.
      load_fragments(fragments[(step + 1) % 2], ring.slot, a_lane, b_lane, (step + 1) % kSteps);
      multiply(sums, fragments[step % 2]);
    }
    if constexpr (kSteps % 2 == 1) fragments[0] = fragments[1];
  }

  __device__ static void accumulate(Accumulators& sums, const GemmMmaParams& p, TileA& a, TileB& b, uint32_t shared) {
    constexpr int kAhead = kStages - 1;
    const int tiles = ceil_div(p.k, kBlockK);
    const WarpPosition warp = warp_position();
    const int a_lane = TileA::template lane_offset<true>(warp.m * kWarpRows, warp.k * kSteps);
    const int b_lane = TileB::template lane_offset<false>(warp.n * kWarpColumns, warp.k * kSteps);

#pragma unroll 1
    for (int tile = 0; tile < kAhead; ++tile) {
      if (tile < tiles) {
        a.copy(shared + tile * kSlotBytes, tile * kBlockK);
        b.copy(shared + tile * kSlotBytes + TileA::kBytes, tile * kBlockK);
        a.advance();
        b.advance();
      }
      cp_async_commit();
    }
    cp_async_wait<kStages - 2>();
    __syncthreads();  // the first tile is visible to the whole block

    Fragments fragments[2];
    load_fragments(fragments[0], shared, a_lane, b_lane, 0);
    Ring ring{shared, shared, shared + kAhead * kSlotBytes};
    int tile = 0;
    // While the tile to be copied ends inside k.
    const auto inside = [&] { return (tile + kAhead + 1) * kBlockK <= p.k; };
    if constexpr (Options::kAccess == 16) {
      if (a.whole && b.whole) {
        for (; inside(); ++tile) multiply_tile<Copies::kWhole>(sums, fragments, a, b, ring, a_lane, b_lane, true, 0);
      } else {
        for (; inside(); ++tile) multiply_tile<Copies::kOuterEdge>(sums, fragments, a, b, ring, a_lane, b_lane, true, 0);
      }
    }
#pragma unroll 1
    for (; tile < tiles; ++tile) {
      multiply_tile<Copies::kAny>(sums, fragments, a, b, ring, a_lane, b_lane, tile + kAhead < tiles, (tile + kAhead) * kBlockK);
    }
    cp_async_wait<0>();
    __syncthreads();  // every warp is done with the ring: the epilogue reuses it
  }

  // 8 outputs of one row from the 8 (16 when gated) neighbouring sums they come from. `column` is the first output's,
  // `count` how many of the 8 exist.
  template <int Sums>
  __device__ static void finish(const GemmMmaParams& p, float (&sums)[Sums], int64_t batch, int64_t row, int column, int count) {
    float values[8];
    const auto* bias = static_cast<const typename Options::Bias*>(p.bias);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kGated) {
        const int gate_sum = kGate == Gate::kInterleaved ? 2 * i : i;
        const int up_sum = kGate == Gate::kInterleaved ? 2 * i + 1 : i + 8;
        float gate = sums[gate_sum], up = sums[up_sum];
        if (Options::kBias && i < count) {
          const int half = p.n / 2, j = column + i;
          gate += to_float(bias[kGate == Gate::kInterleaved ? 2 * j : kGate == Gate::kGateFirst ? j : j + half]);
          up += to_float(bias[kGate == Gate::kInterleaved ? 2 * j + 1 : kGate == Gate::kGateFirst ? j + half : j]);
        }
        values[i] = activate<Options::kActivation>(gate) * up;
      } else {
        if (Options::kBias && i < count) sums[i] += to_float(bias[column + i]);
        values[i] = activate<Options::kActivation>(sums[i]);
      }
    }
    if constexpr (Options::kAccumulate) {
      // A zero beta means that c is not read, as in BLAS: 0 * NaN would be NaN.
      const auto* c = static_cast<const typename Options::C*>(p.c) + batch * p.c_batch + row * p.c_row + column;
      if (p.beta != 0.0f) {
        if (Options::kVectorOut && count == 8) {
          float addend[8];
          load_elements(addend, c);
#pragma unroll
          for (int i = 0; i < 8; ++i) values[i] = fmaf(p.beta, addend[i], values[i]);
        } else {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if (i < count) values[i] = fmaf(p.beta, to_float(c[i]), values[i]);
          }
        }
      }
    }
    Out* out = static_cast<Out*>(p.out) + batch * p.out_batch + row * p.out_row + column;
    if (Options::kVectorOut && count == 8) {
      store_elements(out, values);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < count) out[i] = from_float<Out>(values[i]);
      }
    }
  }

  // A quad of lanes holds 8 columns of a row in pieces of two. Through shared memory a lane gets 8 neighbouring outputs,
  // stores them with one instruction, and the lanes of a warp fill whole rows.
  __device__ static void store(const GemmMmaParams& p, const Work& work, const Accumulators& sums, float* slabs) {
    constexpr int kSums = kGated ? 16 : 8;
    constexpr int kPieces = kWarpColumns / kSums;  // of 8 outputs in a row of the slab
    // Unrolling this loop only pays where several loads of c can be in flight; elsewhere it only costs compile time
    // (1.8 s instead of 0.9 s with bias and silu).
    constexpr int kPiecesAhead = Options::kAccumulate ? 4 : 1;
    const WarpPosition warp = warp_position();
    const int lane = lane_id(), outputs = kGated ? p.n / 2 : p.n;
    // Slabs of the kWarpsK warps of one position lie behind each other in the order in which they are added.
    float* position = slabs + (warp.n * kWarpsM + warp.m) * kWarpsK * kSlabFloats;
    float* mine = position + warp.k * kSlabFloats + lane / 4 * kSlabPitch + lane % 4 * 2;
    auto sync = [] {
      if constexpr (kWarpsK == 1) {
        __syncwarp();
      } else {
        __syncthreads();
      }
    };
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
      for (int n = 0; n < kTilesN; ++n) {
        *reinterpret_cast<float2*>(mine + 8 * n) = make_float2(sums[m][n][0], sums[m][n][1]);
        *reinterpret_cast<float2*>(mine + 8 * kSlabPitch + 8 * n) = make_float2(sums[m][n][2], sums[m][n][3]);
      }
      sync();  // the slab (all slabs of the position) is written before its rows are read
#pragma unroll kPiecesAhead
      for (int first = 0; first < 16 * kPieces; first += kWarpSize * kWarpsK) {
        const int piece = first + warp.k * kWarpSize + lane;
        const int r = piece / kPieces, in_row = piece % kPieces;
        const int64_t row = work.row + warp.m * kWarpRows + m * 16 + r;
        const int column = work.column + (warp.n * kPieces + in_row) * 8;
        if (piece < 16 * kPieces && row < p.m && column < outputs) {
          float total[kSums];
          const float* part = position + r * kSlabPitch + in_row * kSums;
#pragma unroll
          for (int i = 0; i < kSums; ++i) total[i] = part[i];
#pragma unroll
          for (int k = 1; k < kWarpsK; ++k) {
#pragma unroll
            for (int i = 0; i < kSums; ++i) total[i] += part[k * kSlabFloats + i];
          }
          finish(p, total, work.batch, row, column, min(8, outputs - column));
        }
      }
      sync();  // every lane has read the slab before the next 16 rows overwrite it
    }
  }

  __device__ static void run(const GemmMmaParams& p) {
    extern __shared__ __align__(128) char shared_memory[];
    const Work work = work_of(p);
    const auto* a_batch = static_cast<const uint16_t*>(p.a) + work.batch * p.a_batch;
    const auto* b_batch = static_cast<const uint16_t*>(p.b) + work.batch * p.b_batch;
    const int half = p.n / 2;
    TileA a(a_batch, p.a_stride, work.row, p.m, p.k);
    // An interleaved gate needs no rearranging: its block starts at twice the output column.
    TileB b(b_batch, p.b_stride, kGate == Gate::kInterleaved ? 2 * work.column : work.column, kSplit ? half : p.n, p.k,
            kGate == Gate::kUpFirst ? half : 0, kGate == Gate::kUpFirst ? -half : half);

    Accumulators sums;
#pragma unroll
    for (int i = 0; i < kTilesM * kTilesN * 4; ++i) sums[i / (kTilesN * 4)][i / 4 % kTilesN][i % 4] = 0.0f;
    accumulate(sums, p, a, b, shared_address(shared_memory));
    store(p, work, sums, reinterpret_cast<float*>(shared_memory));
  }
};

}  // namespace kernelgen
