// Shares of K of gemm/dense_sm90: the blocks of a cluster have sums of the same tile, and each finishes a part of it.
//
// A part is a run of pieces, 64 rows of 16 outputs. A warpgroup leaves the sums of the pieces that are others' in its own shared
// memory, where its operands lay; behind the cluster's barrier each block reads what the others left of its own pieces and adds it to
// its registers, in the order of the shares whoever adds: the bits do not depend on where a piece is finished. What scales, bias,
// activation and c make of a sum is done once, with the whole of it. Pieces are known at compile time for each rank, as sums that
// lie in registers have to be.
#pragma once

#include <kernelgen/gemm/dense_epilogue.cuh>

namespace kernelgen {

template <class Options>
struct SplitSums {
  using Epilogue = DenseEpilogue<Options>;
  using Out = typename Options::Out;
  static constexpr int kShares = Options::kSplitK, kMmaM = Options::kMmaM;
  static constexpr int kSums = Epilogue::kSums, kOutputs = Epilogue::kOutputs;
  static constexpr int kPieceOutputs = 16;
  static constexpr int kPieces = (kOutputs + kPieceOutputs - 1) / kPieceOutputs;  // of 64 rows
  static constexpr int kFours = Epilogue::kGated ? 4 : 2;                         // sums of a thread in a piece, four at a time
  static constexpr int kFourBytes = kWarpgroupThreads * 16, kPieceBytes = kFours * kFourBytes;
  static constexpr int kBytes = Options::kConsumers * kMmaM * kPieces * kPieceBytes;
  using Sums = float[kMmaM][kSums];

  // Rank's pieces of all kMmaM * kPieces.
  __device__ static constexpr int first_piece(int rank) { return kMmaM * kPieces * rank / kShares; }

  // The first of four sums, which are of eight product columns and two rows; -1 where the last piece has only eight outputs.
  __device__ static constexpr int sum_of(int piece, int four) {
    const int eight = 2 * piece + (Epilogue::kGated && !Epilogue::kSplit ? four / 2 : four % 2);
    if (8 * eight >= kOutputs) return -1;
    if (Epilogue::kSplit) return 4 * eight + four / 2 * (kSums / 2);
    return Epilogue::kGated ? 8 * eight + four % 2 * 4 : 4 * eight;
  }

  __device__ static uint32_t address(uint32_t shared, int group, int m, int piece) {
    return shared + ((group * kMmaM + m) * kPieces + piece) * kPieceBytes + threadIdx.x % kWarpgroupThreads * 16;
  }

  // What others finish, to the block's own shared memory.
  __device__ static void leave(const Sums& sums, uint32_t shared, int group, int rank) {
    const int begin = first_piece(rank), end = first_piece(rank + 1);
#pragma unroll
    for (int at = 0; at < kMmaM * kPieces; ++at) {
      if (at >= begin && at < end) continue;
      const uint32_t target = address(shared, group, at / kPieces, at % kPieces);
#pragma unroll
      for (int four = 0; four < kFours; ++four) {
        const int first = sum_of(at % kPieces, four);
        if (first < 0) continue;
        const float* d = sums[at / kPieces] + first;
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(target + four * kFourBytes), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3])
                     : "memory");
      }
    }
  }

  // The other shares' sums of a piece, added in the order of the shares.
  template <int kRank>
  __device__ static void add_others(float (&sums)[kSums], uint32_t address, int piece) {
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      const int first = sum_of(piece, four);
      if (first < 0) continue;
      float4 parts[kShares];
#pragma unroll
      for (int share = 0; share < kShares; ++share) {
        float* d = sums + first;
        parts[share] = share == kRank ? make_float4(d[0], d[1], d[2], d[3]) : load_cluster(cluster_address(address + four * kFourBytes, share));
      }
      float4 total = parts[0];
#pragma unroll
      for (int share = 1; share < kShares; ++share) {
        total.x += parts[share].x, total.y += parts[share].y, total.z += parts[share].z, total.w += parts[share].w;
      }
      sums[first] = total.x, sums[first + 1] = total.y, sums[first + 2] = total.z, sums[first + 3] = total.w;
    }
  }

  // Sixteen outputs of the warp's 16 rows to global memory, 16-bit ones through shared memory that nobody else uses: the warp's own place
  // for the piece, which the block itself finishes.
  __device__ static void store(const float (&y)[2][4], const DenseSm90Params& p, const OutputTile& tile, int warp_row, int column,
                               uint32_t scratch) {
    const int lane = lane_id(), outputs = min(Epilogue::kGated ? p.n / 2 : p.n, tile.n + kOutputs);  // the next tile's are not ours
    if constexpr (sizeof(Out) == 2) {
      stmatrix_x4(scratch + lane % 16 * 32 + lane / 16 * 16, pack_pair<Out>(y[0][0], y[0][1]), pack_pair<Out>(y[0][2], y[0][3]),
                  pack_pair<Out>(y[1][0], y[1][1]), pack_pair<Out>(y[1][2], y[1][3]));
      __syncwarp();
      const int row = warp_row + lane / 2, first = column + lane % 2 * 8;
      uint32_t words[4];
      load_chunk(words, scratch + lane * 16);
      Out* target = Epilogue::out_of(p, tile) + row * p.out_row + first;
      const int count = row < tile.row_end ? outputs - first : 0;
      if (count >= 8) {
        *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
      } else if (count > 0) {
        alignas(16) Out values[8];
        *reinterpret_cast<uint4*>(values) = make_uint4(words[0], words[1], words[2], words[3]);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (j < count) target[j] = values[j];
        }
      }
    } else {
      const int pair = lane % 4 * 2;
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        if (column + 8 * t < outputs) Epilogue::store_directly(y[t], p, tile, warp_row + lane / 4, column + 8 * t + pair);
      }
    }
  }

  template <int kRank>
  __device__ static void finish_part(Sums& sums, const DenseSm90Params& p, const OutputTile& tile, uint32_t shared, int group,
                                     int first_row) {
    constexpr int kBegin = first_piece(kRank), kEnd = first_piece(kRank + 1);
#pragma unroll
    for (int at = kBegin; at < kEnd; ++at) {
      add_others<kRank>(sums[at / kPieces], address(shared, group, at / kPieces, at % kPieces), at % kPieces);
    }
    const int warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int at = kBegin; at < kEnd; ++at) {
      const int m = at / kPieces, piece = at % kPieces;
      const int warp_row = first_row + m * Options::kConsumers * kMmaRows + warp * 16, row = warp_row + lane_id() / 4;
      const int column = tile.n + piece * kPieceOutputs;
      const typename Epilogue::Extras extras = Epilogue::extras_of(p, row, tile);
      float y[2][4];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int eight = 2 * piece + t;
        if (8 * eight >= kOutputs) {
#pragma unroll
          for (int i = 0; i < 4; ++i) y[t][i] = 0.0f;
          continue;
        }
        typename Epilogue::Parts parts;
        Epilogue::outputs(y[t], sums[m], p, extras, eight, tile.n, parts);
        if constexpr (Options::kAccumulate) Epilogue::add_c(y[t], p, tile, row, tile.n + 8 * eight + lane_id() % 4 * 2);
      }
      store(y, p, tile, warp_row, column, address(shared, group, m, piece) + warp * 512 - threadIdx.x % kWarpgroupThreads * 16);
    }
  }

  template <int kRank = 0>
  __device__ static void finish(Sums& sums, const DenseSm90Params& p, const OutputTile& tile, uint32_t shared, int group, int first_row,
                                int rank) {
    if (rank == kRank) {
      finish_part<kRank>(sums, p, tile, shared, group, first_row);
    } else if constexpr (kRank + 1 < kShares) {
      finish<kRank + 1>(sums, p, tile, shared, group, first_row, rank);
    }
  }
};

}  // namespace kernelgen
