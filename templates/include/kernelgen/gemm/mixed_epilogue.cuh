// From the sums of a warpgroup, 64 columns of b by kTokens rows of a, to the output of gemm/mixed_sm90: bias, activation, gate.
//
// A lane has two columns of b (the halves of a fragment) and, of every eight rows of a, two neighbours. The halves of a gated activation
// are its gate and its up. Results go through shared memory, kSlabTokens rows at a time, which turns them so that columns are
// neighbours; then threads write 16 bytes of a row each, and only what is the tile's.
#pragma once

#include <kernelgen/activation/activations.cuh>
#include <kernelgen/cuda/conversions.cuh>
#include <kernelgen/cuda/memory.cuh>
#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/gemm/gate.cuh>
#include <kernelgen/gemm/tiles_sm90.cuh>
#include <kernelgen/sm90/barrier.cuh>
#include <kernelgen/sm90/stmatrix.cuh>
#include <kernelgen/sm90/wgmma.cuh>

namespace kernelgen {

template <class Options>
struct MixedEpilogue {
  using Out = typename Options::Out;
  static constexpr int kConsumers = Options::kConsumers, kTokens = Options::kTokens;
  static constexpr Gate kGate = Options::kGate;
  static constexpr bool kGated = kGate != Gate::kNone;
  static constexpr bool kSplit = kGate == Gate::kGateFirst || kGate == Gate::kUpFirst;
  static constexpr int kGroupOutputs = kGated ? kMmaRows / 2 : kMmaRows;  // of a warpgroup
  static constexpr int kOutputs = kConsumers * kGroupOutputs;
  static constexpr int kSlabTokens = kTokens % 32 == 0 ? 32 : 16;
  static_assert(kTokens % kSlabTokens == 0, "a tile is whole slabs");
  // 16 bytes more than a row has: eight rows, written or read together, lie in different banks.
  static constexpr int kPitch = kGroupOutputs * static_cast<int>(sizeof(Out)) + 16, kStoreBytes = round_up(kSlabTokens * kPitch, 128);

  uint32_t slab;  // shared address of this warpgroup's
  int group;      // of the block's consumers

  // Of neighbours the lower four lanes of a column's eight have the even one, the gate, first, the others second: else codes of even
  // columns alone would be read together, which lie in half of the banks.
  __device__ static bool exchanged() { return kGate == Gate::kInterleaved && lane_id() / 16 != 0; }

  // The tile's column of b that half `half` of a fragment has in this thread.
  __device__ static int row_of_thread(int group, int half) {
    const int warp = threadIdx.x / 32 % 4, row = lane_id() / 4;
    if constexpr (kSplit) {
      return half * kOutputs + group * kGroupOutputs + warp * 8 + row;
    } else if constexpr (kGated) {
      return group * kMmaRows + warp * 16 + 2 * row + (half ^ static_cast<int>(exchanged()));
    } else {
      return group * kMmaRows + warp * 16 + half * 8 + row;
    }
  }

  // Column `row` of the tile as a column of b. Of a split gate the tile has kOutputs columns of the gate, then the same of the up half.
  __device__ static int column_of_b(const DenseSm90Params& p, int output, int row) {
    if constexpr (kSplit) {
      const bool up = row >= kOutputs;
      return output + row % kOutputs + (up == (kGate == Gate::kGateFirst) ? p.n / 2 : 0);
    } else {
      return output * (kGated ? 2 : 1) + row;
    }
  }

  struct Biases {
    float of[2];
  };

  __device__ static Biases biases_of(const DenseSm90Params& p, const OutputTile& tile, const int (&rows)[2]) {
    Biases biases{{0.0f, 0.0f}};
    if constexpr (Options::kBias) {
      const auto* source = static_cast<const typename Options::Bias*>(p.bias) + tile.batch_bias * p.bias_batch;
#pragma unroll
      for (int half = 0; half < 2; ++half) biases.of[half] = to_float(source[min(column_of_b(p, tile.n, rows[half]), p.n - 1)]);
    }
    return biases;
  }

  // Of eight rows of a, from d[0 .. 3]: two rows of the first output, then, without a gate, of the second.
  __device__ static void outputs(float (&y)[4], const float* d, const DenseSm90Params& p, const Biases& biases) {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = Options::kBias ? d[i] + biases.of[i / 2] : d[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kGated) {
        const float gate = exchanged() ? x[2 + i % 2] : x[i % 2], up = exchanged() ? x[i % 2] : x[2 + i % 2];
        y[i] = i < 2 ? activate_gate<Options::kActivation, Options::kClamped>(gate, up, p.alpha, p.limit) : 0.0f;
      } else {
        y[i] = activate<Options::kActivation>(x[i]);
      }
    }
  }

  // Rows first .. first + kSlabTokens - 1 of the tile to the slab.
  __device__ void fill(const float (&sums)[kTokens / 2], const DenseSm90Params& p, const Biases& biases, int first) const {
    constexpr int kEights = kSlabTokens / 8;
    const int lane = lane_id(), warp = threadIdx.x / 32 % 4;
    if constexpr (sizeof(Out) == 2) {
      constexpr int kTogether = kGated ? min_of(4, kEights) : 2;  // eights of rows of one stmatrix
#pragma unroll
      for (int eight = 0; eight < kEights; eight += kTogether) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          float y[4];
          outputs(y, sums + (first / 8 + eight + i) * 4, p, biases);
          if constexpr (kGated) {
            words[i] = words[(i + kTogether) % 4] = pack_pair<Out>(y[0], y[1]);
          } else {
            words[2 * i] = pack_pair<Out>(y[0], y[1]);
            words[2 * i + 1] = pack_pair<Out>(y[2], y[3]);
          }
        }
        // Matrix lane / 8: with a gate an eight of rows (two of them twice where there are only two), else half and eight.
        const int matrix = lane / 8, token = 8 * (eight + (kGated ? matrix % kTogether : matrix / 2)) + lane % 8;
        const int column = kGated ? warp * 8 : warp * 16 + matrix % 2 * 8;
        stmatrix_x4_trans(slab + token * kPitch + column * 2, words[0], words[1], words[2], words[3]);
      }
    } else {
      static_assert(sizeof(Out) == 4, "out is 16 or 32 bits wide");
#pragma unroll
      for (int eight = 0; eight < kEights; ++eight) {
        float y[4];
        outputs(y, sums + (first / 8 + eight) * 4, p, biases);
#pragma unroll
        for (int i = 0; i < (kGated ? 2 : 4); ++i) {
          const int token = 8 * eight + lane % 4 * 2 + i % 2, column = kGated ? warp * 8 : warp * 16 + i / 2 * 8;
          store_word(slab + token * kPitch + (column + lane / 4) * 4, __float_as_uint(y[i]));
        }
      }
    }
  }

  // The rows of the slab that are the tile's, 16 bytes of a row per thread.
  __device__ void store(const DenseSm90Params& p, const OutputTile& tile, int first) const {
    constexpr int kPerChunk = 16 / static_cast<int>(sizeof(Out)), kChunks = kGroupOutputs / kPerChunk;
    const int rows = min(kSlabTokens, tile.row_end - tile.m - first), column = tile.n + group * kGroupOutputs;
    const int outputs = kGated ? p.n / 2 : p.n;
    Out* out = static_cast<Out*>(const_cast<void*>(p.out)) + tile.batch * p.out_batch + static_cast<int64_t>(tile.m + first) * p.out_row + column;
    for (int i = threadIdx.x % kWarpgroupThreads; i < rows * kChunks; i += kWarpgroupThreads) {
      const int row = i / kChunks, chunk = i % kChunks, count = outputs - column - chunk * kPerChunk;
      uint32_t words[4];
      load_chunk(words, slab + row * kPitch + chunk * 16);
      Out* target = out + row * p.out_row + chunk * kPerChunk;
      if (Options::kVectorOut && count >= kPerChunk) {
        *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
      } else {
        alignas(16) Out values[kPerChunk];
        *reinterpret_cast<uint4*>(values) = make_uint4(words[0], words[1], words[2], words[3]);
#pragma unroll
        for (int j = 0; j < kPerChunk; ++j) {
          if (j < count) target[j] = values[j];
        }
      }
    }
  }

  // All of the tile. By all threads of the warpgroup.
  __device__ void run(const DenseSm90Params& p, const OutputTile& tile, const float (&sums)[kTokens / 2], const Biases& biases) const {
#pragma unroll
    for (int first = 0; first < kTokens; first += kSlabTokens) {
      if (tile.m + first >= tile.row_end) break;
      named_barrier_sync(1 + group, kWarpgroupThreads);  // the slab has been read
      fill(sums, p, biases, first);
      named_barrier_sync(1 + group, kWarpgroupThreads);
      store(p, tile, first);
    }
  }
};

}  // namespace kernelgen
