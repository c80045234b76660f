// out = activation(a @ b + bias) + beta * c for few rows of a and a packed 4-bit b, with mma.sync (sm_80 and later): a matter of
// reading b at memory speed.
//
// Computed transposed, so that the 16 rows of an mma are columns of b and its 8 columns rows of a. A block has kTiles * 16 columns of
// b and all of k, of which its warps take 128 elements each in turn:
//
//   codes   from global memory to registers, two steps ahead, in the order in which lanes multiply them: no shared memory, no barrier
//   a       chunks of kWarps * 128 of k in a ring in shared memory, by cp.async
//   warp    for each 8 codes of a column and as many elements of a: decode, multiply; after each group times its scale to the totals
//
// In the end the warps' totals are added up through shared memory, in a fixed order. Sums over k may run in any order that both
// operands share: a lane multiplies neighbouring codes, and in pairs of the first and fifth, second and sixth, .. of eight, which lie
// 16 bits apart in their word (four_bit.cuh).
#pragma once

#include <kernelgen/activation/activations.cuh>
#include <kernelgen/cuda/cp_async.cuh>
#include <kernelgen/cuda/four_bit.cuh>
#include <kernelgen/cuda/mma.cuh>
#include <kernelgen/cuda/vector_io.cuh>
#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/gemm/mma_scales.cuh>
#include <kernelgen/gemm/mma_shape.cuh>

namespace kernelgen {

// `Options`: as in mma_shape.cuh, ElementB int4_code or e2m1; kTiles, kTokenTiles (of 8 rows of a), kWarps, kStages (of a's ring), kZero,
// kGroup (codes that share a scale), kBias, kActivation, kAccumulate, kVectorOut
template <class Options>
struct PackedSkinny : Options {
  using Code = typename Options::ElementB;
  using T = typename Options::Product;
  using Out = typename Options::Out;
  using ScaleB = typename Options::ScaleB;
  using Options::kGroup;
  using Options::kStages;
  using Options::kTiles;
  using Options::kTokenTiles;
  using Options::kWarps;
  using Options::kZero;

  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kColumns = kTiles * 16, kTokens = kTokenTiles * 8;
  static constexpr int kStep = 128;  // of k, of one warp
  static constexpr int kChunk = kWarps * kStep;
  static constexpr int kRun = min_of(kGroup, kStep) / 4;        // neighbouring codes of a lane: a quad has one group at a time
  static constexpr int kGroups = max_of(1, kStep / kGroup);     // of a step
  static constexpr int kWords = 4;                              // of eight codes, of a lane, column and step
  // Rows of a are 64 bytes more than whole sets of banks apart: with the swizzle of chunk_at the eight lanes of a 16-byte read, two
  // rows and four places of k, meet different banks whatever kRun is.
  static constexpr int kPitch = kChunk * 2 + 64;
  static constexpr int kSlotBytes = kTokens * kPitch;
  static constexpr int kSumPitch = kColumns + 4, kSumBytes = kTokens * kSumPitch * 4;  // of a warp, in floats
  static constexpr int kSharedBytes = max_of(kStages * kSlotBytes, kWarps * kSumBytes);
  static_assert(kGroup == 32 || kGroup == 64 || kGroup % 128 == 0, "a step has whole groups, or a group whole steps");

  __device__ static int place() { return lane_id() % 4; }        // of k
  __device__ static int row_of_lane() { return lane_id() / 4; }  // of a tile's halves, and of a

  // First element of k, within a step, of word `word` of this lane.
  __device__ static int k_of_word(int word) { return word * 8 / kRun * 4 * kRun + place() * kRun + word * 8 % kRun; }
  __device__ static int group_of_word(int word) { return kGroups == 1 ? 0 : word * 8 / kRun; }

  __device__ static int chunk_at(int chunk) { return (chunk ^ (chunk / 4 & 3)) * 16; }

  // What a lane needs of b for one step.
  struct Piece {
    uint32_t words[kTiles][2][kWords];
    float scales[kTiles][2][kGroups];
    uint32_t negative_zero[kTiles][2][kZero ? kGroups : 1];
  };

  // Columns of this lane, within b: 16 tile + 8 half + row_of_lane() from the block's first, at most the last.
  __device__ static int column_of(const GemmMmaParams& p, int first, int tile, int half) {
    return min(first + 16 * tile + 8 * half + row_of_lane(), p.n - 1);
  }

  // k0: the step's first element. What lies past the end is 0 in a.
  __device__ static void load(Piece& piece, const GemmMmaParams& p, int first, int k0) {
    const auto* scales = static_cast<const ScaleB*>(p.scale_b);
    const int last = (p.k - 1) / kGroup;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t column = column_of(p, first, tile, half);
        const char* codes = static_cast<const char*>(p.b) + column * p.b_stride + k0 / 2;
#pragma unroll
        for (int word = 0; word < kWords; word += kRun / 8) {
          const int k = k_of_word(word);
          uint32_t(&to)[kWords] = piece.words[tile][half];
          if (k0 + k < p.k) {
            const Run from = *reinterpret_cast<const Run*>(codes + k / 2);
#pragma unroll
            for (int i = 0; i < kRun / 8; ++i) to[word + i] = from.word[i];
          } else {
#pragma unroll
            for (int i = 0; i < kRun / 8; ++i) to[word + i] = 0;
          }
        }
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const int64_t block = min(k0 / kGroup + group, last);
          piece.scales[tile][half][group] = scale_value(scales[column * p.scale_b_column + block * p.scale_b_block]);
          if constexpr (kZero) {
            piece.negative_zero[tile][half][group] = negative_pair<T>(p.zero_b[column * p.zero_column + block * p.zero_block]);
          }
        }
      }
    }
  }

  struct alignas(kRun / 2) Run {
    uint32_t word[kRun / 8];
  };

  // Rows of a from k0 on, kChunk elements each.
  __device__ static void copy_a(const GemmMmaParams& p, uint32_t slot, int k0) {
    constexpr int kChunks = kChunk / 8;
    for (int i = threadIdx.x; i < kTokens * kChunks; i += kThreads) {
      const int token = i / kChunks, chunk = i % kChunks, k = k0 + chunk * 8;
      const bool exists = token < p.m && k < p.k;
      const char* row = static_cast<const char*>(p.a) + min(token, p.m - 1) * p.a_stride;
      cp_async_16(slot + token * kPitch + chunk_at(chunk), row + (exists ? k : 0) * 2, exists);
    }
  }

  // The eight elements of a beside a word, as registers of two mma: pairs of the first and fifth, ...
  __device__ static void load_a(uint32_t (&pairs)[4], uint32_t slot, int token_tile, int chunk) {
    uint32_t x[4];
    load_chunk(x, slot + (token_tile * 8 + row_of_lane()) * kPitch + chunk_at(chunk));
    pairs[0] = __byte_perm(x[0], x[2], 0x5410);
    pairs[1] = __byte_perm(x[0], x[2], 0x7632);
    pairs[2] = __byte_perm(x[1], x[3], 0x5410);
    pairs[3] = __byte_perm(x[1], x[3], 0x7632);
  }

  using Sums = float[kTiles][kTokenTiles][4];

  __device__ static uint32_t decode(uint32_t word, int pair, uint32_t negative_zero) {
    if constexpr (is_same_v<Code, int4_code>) {
      return int4_pair_apart<T, kZero>(word, pair, negative_zero);
    } else {
      return e2m1_pair_apart<T>(word, pair);
    }
  }

  __device__ static void multiply(Sums& totals, const Piece& piece, uint32_t slot, int warp) {
    Sums partial;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const int group = group_of_word(word);
      const bool begins = word == 0 || group != group_of_word(word - 1);
      const bool ends = word + 1 == kWords || group != group_of_word(word + 1);
      uint32_t a[kTokenTiles][4];
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) load_a(a[t], slot, t, (warp * kStep + k_of_word(word)) / 8);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int product = 0; product < 2; ++product) {
          uint32_t b[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int half = i % 2;
            b[i] = decode(piece.words[tile][half][word], 2 * product + i / 2, piece.negative_zero[tile][half][kZero ? group : 0]);
          }
#pragma unroll
          for (int t = 0; t < kTokenTiles; ++t) {
            if (begins && product == 0) {
              mma_m16n8k16_fresh<T>(partial[tile][t], b, a[t][2 * product], a[t][2 * product + 1]);
            } else {
              mma_m16n8k16<T>(partial[tile][t], b, a[t][2 * product], a[t][2 * product + 1]);
            }
          }
        }
        if (ends) {
#pragma unroll
          for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
            for (int i = 0; i < 4; ++i) totals[tile][t][i] = fmaf(partial[tile][t][i], piece.scales[tile][i / 2][group], totals[tile][t][i]);
          }
        }
      }
    }
  }

  // One chunk: a's is in the ring; the piece that was used is loaded anew, for two chunks later.
  __device__ static void turn(Sums& totals, Piece& piece, const GemmMmaParams& p, uint32_t shared, int first, int warp, int chunk,
                              int chunks) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // all copies of this chunk have landed, and all warps are done with the slot that is refilled now
    const int ahead = chunk + kStages - 1;
    if (ahead < chunks) copy_a(p, shared + ahead % kStages * kSlotBytes, ahead * kChunk);
    cp_async_commit();
    multiply(totals, piece, shared + chunk % kStages * kSlotBytes, warp);
    if (chunk + 2 < chunks) load(piece, p, first, (chunk + 2) * kChunk + warp * kStep);
  }

  __device__ static void leave_sums(const Sums& totals, float* sums) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = t * 8 + place() * 2 + i % 2, column = tile * 16 + i / 2 * 8 + row_of_lane();
          sums[token * kSumPitch + column] = totals[tile][t][i];
        }
      }
    }
  }

  // Eight neighbouring outputs of a row.
  __device__ static void finish(const GemmMmaParams& p, const float* sums, int token, int piece, int first) {
    const int column = first + 8 * piece, count = p.n - column;
    if (count <= 0) return;
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float* source = sums + warp * (kSumBytes / 4) + token * kSumPitch + 8 * piece;
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] += source[i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (Options::kBias) y[i] += to_float(static_cast<const typename Options::Bias*>(p.bias)[min(column + i, p.n - 1)]);
      y[i] = activate<Options::kActivation>(y[i]);
    }
    if constexpr (Options::kAccumulate) {
      // A zero beta means that c is not read, as in BLAS: 0 * NaN would be NaN.
      const auto* c = static_cast<const typename Options::C*>(p.c) + token * p.c_row + column;
      if (p.beta != 0.0f) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (i < count) y[i] = fmaf(p.beta, to_float(c[i]), y[i]);
        }
      }
    }
    Out* out = static_cast<Out*>(p.out) + token * p.out_row + column;
    if (Options::kVectorOut && count >= 8) {
      constexpr int kPart = min_of(8, 16 / static_cast<int>(sizeof(Out)));
#pragma unroll
      for (int i = 0; i < 8; i += kPart) {
        float part[kPart];
#pragma unroll
        for (int j = 0; j < kPart; ++j) part[j] = y[i + j];
        store_elements(out + i, part);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < count) out[i] = from_float<Out>(y[i]);
      }
    }
  }

  __device__ static void run(const GemmMmaParams& p) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const uint32_t shared = shared_address(shared_memory);
    const int warp = threadIdx.x / kWarpSize, first = blockIdx.x * kColumns, chunks = ceil_div(p.k, kChunk);
    Piece even, odd;  // of chunks 0, 2, ... and 1, 3, ...
    load(even, p, first, warp * kStep);
    if (chunks > 1) load(odd, p, first, kChunk + warp * kStep);
#pragma unroll 1
    for (int chunk = 0; chunk < kStages - 1; ++chunk) {
      if (chunk < chunks) copy_a(p, shared + chunk * kSlotBytes, chunk * kChunk);
      cp_async_commit();
    }
    Sums totals;
#pragma unroll
    for (int i = 0; i < kTiles * kTokenTiles * 4; ++i) totals[i / (kTokenTiles * 4)][i / 4 % kTokenTiles][i % 4] = 0.0f;
    int chunk = 0;
#pragma unroll 1
    for (; chunk + 1 < chunks; chunk += 2) {
      turn(totals, even, p, shared, first, warp, chunk, chunks);
      turn(totals, odd, p, shared, first, warp, chunk + 1, chunks);
    }
    if (chunk < chunks) turn(totals, even, p, shared, first, warp, chunk, chunks);
    cp_async_wait<0>();
    __syncthreads();  // all warps are done with the ring, which the sums overwrite
    float* sums = reinterpret_cast<float*>(shared_memory);
    leave_sums(totals, sums + warp * (kSumBytes / 4));
    __syncthreads();
    constexpr int kPieces = kColumns / 8;
    for (int i = threadIdx.x; i < p.m * kPieces; i += kThreads) finish(p, sums, i / kPieces, i % kPieces, first);
  }
};

}  // namespace kernelgen
