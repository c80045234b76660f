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
// In the end the warps' totals are added up through shared memory, in a fixed order. How codes are decoded: packed_codes.cuh. The sums of
// a's elements, where they are raised, are one more product, by ones. On Hopper packed_sm90.cuh is the faster one.
#pragma once

#include <kernelgen/cuda/cp_async.cuh>
#include <kernelgen/gemm/packed_codes.cuh>

namespace kernelgen {

// `Options`: as in packed_codes.cuh; kTiles, kTokenTiles (of 8 rows of a), kWarps, kStages (of a's ring)
template <class Options>
struct PackedSkinny : PackedCodes<Options> {
  using Codes = PackedCodes<Options>;
  using T = typename Options::Product;
  using ScaleB = typename Options::ScaleB;
  using Codes::begins_group;
  using Codes::decode;
  using Codes::ends_group;
  using Codes::group_of_word;
  using Codes::k_of_word;
  using Codes::kGroups;
  using Codes::kRaised;
  using Codes::kRun;
  using Codes::kStep;
  using Codes::kWords;
  using Codes::place;
  using Codes::row_of_lane;
  using Options::kGroup;
  using Options::kStages;
  using Options::kTiles;
  using Options::kTokenTiles;
  using Options::kWarps;
  using Options::kZero;

  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kColumns = kTiles * 16, kTokens = kTokenTiles * 8;
  static constexpr int kChunk = kWarps * kStep;
  // Rows of a are 64 bytes more than whole sets of banks apart: with the swizzle of chunk_at the eight lanes of a 16-byte read, two
  // rows and four places of k, meet different banks whatever kRun is.
  static constexpr int kPitch = kChunk * 2 + 64;
  static constexpr int kSlotBytes = kTokens * kPitch;
  static constexpr int kSumPitch = kColumns + 4, kSumBytes = kTokens * kSumPitch * 4;  // of a warp, in floats
  static constexpr int kSharedBytes = max_of(kStages * kSlotBytes, kWarps * kSumBytes);

  __device__ static int chunk_at(int chunk) { return (chunk ^ (chunk / 4 & 3)) * 16; }

  // What a lane needs of b for one step. Zero points: as floats, plus 128, or negated pairs.
  struct Piece {
    uint32_t words[kTiles][2][kWords];
    float scales[kTiles][2][kGroups];
    uint32_t zeros[kTiles][2][kZero ? kGroups : 1];
  };

  // Where this lane's columns are: 16 tile + 8 half + row_of_lane() from the block's first, at most the last.
  struct Columns {
    uint32_t codes[kTiles][2], scales[kTiles][2], zeros[kTiles][kZero ? 2 : 1];  // in bytes

    __device__ Columns(const GemmMmaParams& p, int first, int warp) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const int tile = i / 2, half = i % 2, column = min(first + 16 * tile + 8 * half + row_of_lane(), p.n - 1);
        codes[tile][half] = column * static_cast<uint32_t>(p.b_stride) + (warp * kStep + k_of_word(0)) / 2;
        scales[tile][half] = column * static_cast<uint32_t>(p.scale_b_column) * sizeof(ScaleB);
        if constexpr (kZero) zeros[tile][half] = column * static_cast<uint32_t>(p.zero_column);
        // To be kept, not worked out anew for each load.
        asm volatile("" : "+r"(codes[tile][half]), "+r"(scales[tile][half]));
      }
    }
  };

  // Of chunk `chunk`. What lies past the end is 0 in a.
  __device__ static void load(Piece& piece, const GemmMmaParams& p, const Columns& columns, int warp, int chunk) {
    const char* codes = static_cast<const char*>(p.b) + chunk * (kChunk / 2);
    const int k0 = chunk * kChunk + warp * kStep, last = (p.k - 1) / kGroup;
#pragma unroll
    for (int word = 0; word < kWords; word += kRun / 8) {
      const bool exists = k0 + k_of_word(word) < p.k;
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        uint32_t run[kRun / 8] = {};
        if (exists) load_stream(run, codes + columns.codes[i / 2][i % 2] + (k_of_word(word) - k_of_word(0)) / 2);
#pragma unroll
        for (int j = 0; j < kRun / 8; ++j) piece.words[i / 2][i % 2][word + j] = run[j];
      }
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int block = min(k0 / kGroup + group, last);
      const char* scales = static_cast<const char*>(p.scale_b) + block * p.scale_b_block * static_cast<int64_t>(sizeof(ScaleB));
      const uint8_t* zeros = p.zero_b + block * p.zero_block;
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        piece.scales[i / 2][i % 2][group] = scale_value(*reinterpret_cast<const ScaleB*>(scales + columns.scales[i / 2][i % 2]));
        if constexpr (kZero) {
          piece.zeros[i / 2][i % 2][group] = Codes::zero_value(zeros[columns.zeros[i / 2][i % 2]]);
        }
      }
    }
  }

  // kChunk elements of each row of a. Rows that a does not have are cleared once.
  __device__ static void copy_a(const GemmMmaParams& p, uint32_t slot, int chunk) {
    constexpr int kPieces = kChunk / 8;  // half as many as threads
    const int piece = threadIdx.x % kPieces, k = chunk * kChunk + piece * 8;
    const bool exists = k < p.k;
    const char* source = static_cast<const char*>(p.a) + (exists ? k : 0) * 2;
#pragma unroll 4
    for (int token = threadIdx.x / kPieces; token < p.m; token += 2) {
      cp_async_16(slot + token * kPitch + chunk_at(piece), source + token * p.a_stride, exists);
    }
  }

  __device__ static void clear_rows(const GemmMmaParams& p, uint32_t shared) {
    constexpr int kPerSlot = kTokens * (kPitch / 16);
    const uint32_t zeros[4] = {0, 0, 0, 0};
    for (int i = threadIdx.x; i < kStages * kPerSlot; i += kThreads) {
      if (i % kPerSlot / (kPitch / 16) >= p.m) store_chunk(shared + i * 16, zeros);
    }
  }

  // The eight elements of a beside a word, as registers of two mma.
  __device__ static void load_a(uint32_t (&pairs)[4], uint32_t slot, int token_tile, int chunk) {
    uint32_t x[4];
    load_chunk(x, slot + (token_tile * 8 + row_of_lane()) * kPitch + chunk_at(chunk));
    Codes::pair_up(pairs, x);
  }

  using Sums = float[kTiles][kTokenTiles][4];

  // A group's sums times its scale to the totals. `ones`: the sums of a's rows, in every row of the product.
  __device__ static void add(float (&totals)[4], const float (&partial)[4], const float (&ones)[4], const Piece& piece, int tile, int group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = partial[i];
      if constexpr (kRaised) {
        const float raised = kZero ? __uint_as_float(piece.zeros[tile][i / 2][kZero ? group : 0]) : 136.0f;
        sum = fmaf(-raised, ones[i], sum);
      }
      totals[i] = fmaf(sum, piece.scales[tile][i / 2][group], totals[i]);
    }
  }

  __device__ static void mma(float (&d)[4], const uint32_t (&b)[4], const uint32_t (&a)[4], int product, bool fresh) {
    if (fresh) {
      mma_m16n8k16_fresh<T>(d, b, a[2 * product], a[2 * product + 1]);
    } else {
      mma_m16n8k16<T>(d, b, a[2 * product], a[2 * product + 1]);
    }
  }

  __device__ static void multiply(Sums& totals, const Piece& piece, uint32_t slot, int warp) {
    const uint32_t one[4] = {kPairOfOnes<T>, kPairOfOnes<T>, kPairOfOnes<T>, kPairOfOnes<T>};
    Sums partial;
    float ones[kTokenTiles][4];
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const int group = group_of_word(word);
      const bool begins = begins_group(word), ends = ends_group(word);
      uint32_t a[kTokenTiles][4];
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        load_a(a[t], slot, t, (warp * kStep + k_of_word(word)) / 8);
        if constexpr (kRaised) {
          mma(ones[t], one, a[t], 0, begins);
          mma(ones[t], one, a[t], 1, false);
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int product = 0; product < 2; ++product) {
          uint32_t b[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            b[i] = decode(piece.words[tile][i % 2][word], 2 * product + i / 2, piece.zeros[tile][i % 2][kZero ? group : 0]);
          }
#pragma unroll
          for (int t = 0; t < kTokenTiles; ++t) mma(partial[tile][t], b, a[t], product, begins && product == 0);
        }
        if (ends) {
#pragma unroll
          for (int t = 0; t < kTokenTiles; ++t) add(totals[tile][t], partial[tile][t], ones[t], piece, tile, group);
        }
      }
    }
  }

  // One chunk: a's is in the ring; the piece that was used is loaded anew, for two chunks later.
  __device__ static void turn(Sums& totals, Piece& piece, const GemmMmaParams& p, const Columns& columns, uint32_t shared, int warp,
                              int chunk, int chunks) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // all copies of this chunk have landed, and all warps are done with the slot that is refilled now
    const int ahead = chunk + kStages - 1;
    if (ahead < chunks) copy_a(p, shared + ahead % kStages * kSlotBytes, ahead);
    cp_async_commit();
    multiply(totals, piece, shared + chunk % kStages * kSlotBytes, warp);
    if (chunk + 2 < chunks) load(piece, p, columns, warp, chunk + 2);
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
    const int column = first + 8 * piece;
    if (column >= p.n) return;
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float* source = sums + warp * (kSumBytes / 4) + token * kSumPitch + 8 * piece;
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] += source[i];
    }
    Codes::finish(y, p, token, column);
  }

  __device__ static void run(const GemmMmaParams& p) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const uint32_t shared = shared_address(shared_memory);
    const int warp = threadIdx.x / kWarpSize, first = blockIdx.x * kColumns, chunks = ceil_div(p.k, kChunk);
    const Columns columns(p, first, warp);
    Piece even, odd;  // of chunks 0, 2, ... and 1, 3, ...
    load(even, p, columns, warp, 0);
    if (chunks > 1) load(odd, p, columns, warp, 1);
    clear_rows(p, shared);
#pragma unroll 1
    for (int chunk = 0; chunk < kStages - 1; ++chunk) {
      if (chunk < chunks) copy_a(p, shared + chunk * kSlotBytes, chunk);
      cp_async_commit();
    }
    Sums totals;
#pragma unroll
    for (int i = 0; i < kTiles * kTokenTiles * 4; ++i) totals[i / (kTokenTiles * 4)][i / 4 % kTokenTiles][i % 4] = 0.0f;
    int chunk = 0;
#pragma unroll 1
    for (; chunk + 1 < chunks; chunk += 2) {
      turn(totals, even, p, columns, shared, warp, chunk, chunks);
      turn(totals, odd, p, columns, shared, warp, chunk + 1, chunks);
    }
    if (chunk < chunks) turn(totals, even, p, columns, shared, warp, chunk, chunks);
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
