// out = activation(a @ b + bias) + beta * c on Hopper for few rows of a and a packed 4-bit b, at the speed of reading b.
//
// Computed transposed, so that the 16 rows of an mma are columns of b and its 8 columns rows of a. kSplitK blocks of a cluster share K:
// a block has kColumns columns and a slice of K, so that it reads little of a beside much of b, and all of that part of a before it
// multiplies:
//
//   codes   each warp fills a ring of its own in shared memory by cp.async: many bytes on their way, and no barrier in the main loop
//   a       to shared memory in the order in which lanes multiply it, 16 bytes per lane and load; its sums, group by group, on the way
//   scales  of the slice to shared memory, group by group
//   warp    kTiles * 16 columns; steps of 128 of k, every kWarpsK-th; after each group its sums times its scale to the totals
//
// In the end each block of the cluster adds up and finishes a part of the outputs, in a fixed order. How codes are decoded:
// packed_codes.cuh.
//
// A launch begins while the kernel before it ends. Until that has ended nothing is read; but what will be read first is on its way to L2.
#pragma once

#include <kernelgen/cuda/cp_async.cuh>
#include <kernelgen/cuda/dependent.cuh>
#include <kernelgen/gemm/packed_codes.cuh>
#include <kernelgen/sm90/barrier.cuh>

namespace kernelgen {

// How scales are kept in shared memory: an exponent as the bf16 that it means, NaN included, which takes one instruction to use.
template <class Stored>
struct KeptScale {
  using type = Stored;
};
template <>
struct KeptScale<uint8_t> {
  using type = bf16;
};

// `Options`: as in packed_codes.cuh; kTiles (of 16 columns of a warp), kTokenTiles (of 8 rows of a), kWarpsN, kWarpsK, kStages (of a ring),
// kSplitK, kAhead (steps whose codes go to L2 beforehand)
template <class Options>
struct PackedSm90 : PackedCodes<Options> {
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
  using Options::kSplitK;
  using Options::kStages;
  using Options::kTiles;
  using Options::kTokenTiles;
  using Options::kWarpsK;
  using Options::kWarpsN;
  using Options::kZero;

  static constexpr int kWarps = kWarpsN * kWarpsK, kThreads = kWarps * kWarpSize;
  static constexpr int kWarpColumns = kTiles * 16, kColumns = kWarpsN * kWarpColumns, kTokens = kTokenTiles * 8;
  static constexpr int kStepBytes = kStep / 2;  // of a column of codes
  static constexpr int kStageBytes = kWarpColumns * kStepBytes, kRingBytes = kWarps * kStages * kStageBytes;
  static constexpr int kSumPitch = kColumns + 4, kSumBytes = kTokens * kSumPitch * 4;  // of kWarpsN warps, in floats
  static constexpr int kSlotBytes = kWarpSize * 16, kTokenBytes = kWords * kTokenTiles * kSlotBytes;  // of a, of a step
  using Scale = typename KeptScale<ScaleB>::type;
  // Rows of scales and zero points are an odd number of words apart: they are written group by group of a column.
  static constexpr int kScalePitch = kColumns * static_cast<int>(sizeof(Scale)) + 4, kZeroPitch = kColumns + 4;
  static constexpr int kPerGroup = kStep / kGroups;
  static constexpr int kLine = 128;  // bytes

  // Where things are in shared memory, for slices of `steps` steps. The rings come first; in the end the sums overwrite them.
  struct Layout {
    uint32_t rings, tokens, ones, scales, zeros;

    __device__ Layout(uint32_t shared, int steps) : rings(shared), tokens(shared + max_of(kRingBytes, kWarpsK * kSumBytes)) {
      ones = tokens + steps * kTokenBytes;
      scales = ones + (kRaised ? steps * kGroups * kTokens * 4 : 0);
      zeros = scales + steps * kGroups * kScalePitch;
    }
  };

  // The part of the product that a block has. Steps count from the slice's first.
  struct Share {
    int column, first_step, steps;

    __device__ int k(int step) const { return (first_step + step) * kStep; }
  };

  // Whatever the kernel before still writes: prefetches bring lines to L2, where those writes go as well.
  __device__ static void prefetch(const GemmMmaParams& p, const Share& share) {
    const int ahead = min(share.steps, Options::kAhead);
    const int lines = ceil_div(min(ahead * kStep, p.k - share.k(0)) / 2, kLine);
    for (int i = threadIdx.x; i < kColumns * lines; i += kThreads) {
      const int64_t column = min(share.column + i % kColumns, p.n - 1);
      prefetch_l2(static_cast<const char*>(p.b) + column * p.b_stride + share.k(0) / 2 + i / kColumns * kLine);
    }
    if (Options::kAhead == 0 || share.steps == 0) return;
    for (int i = threadIdx.x; i < kColumns; i += kThreads) {
      const int64_t column = min(share.column + i, p.n - 1), block = share.k(0) / kGroup;
      prefetch_l2(static_cast<const ScaleB*>(p.scale_b) + column * p.scale_b_column + block * p.scale_b_block);
    }
  }

  // A place of 16 bytes among the four of a column's step, so that the lanes of any read below meet different banks. Bits of the column
  // are exchanged: reads of 8 bytes take two places of each of four columns.
  __device__ static int swizzled(int column, int place) { return place ^ (column / 2 % 2 * 2 + column / 4 % 2); }

  // How a lane copies codes: column lane / 4 of each 8, place lane % 4.
  struct Copy {
    const char* source;
    uint32_t columns[2 * kTiles], target;

    __device__ Copy(const GemmMmaParams& p, const Share& share, int warp_n) {
      const int row = row_of_lane(), first = share.column + warp_n * kWarpColumns + row;
      source = static_cast<const char*>(p.b) + share.column * p.b_stride + share.k(0) / 2 + place() * 16;
      target = row * kStepBytes + swizzled(row, place()) * 16;
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) columns[i] = (min(first + 8 * i, p.n - 1) - share.column) * static_cast<uint32_t>(p.b_stride);
    }

    // What lies past the end is 0: in codes and in a.
    __device__ void operator()(const GemmMmaParams& p, const Share& share, uint32_t slot, int step) const {
      const bool exists = step < share.steps && share.k(step) + place() * 32 < p.k;
      const char* from = source + step * kStepBytes;
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) cp_async_16(slot + target + i * 8 * kStepBytes, from + columns[i], exists);
      cp_async_commit();
    }
  };

  // All of a's slice, and the sums of its rows over each group where codes are raised: negated, and times 136 where that is what is
  // subtracted. Several pieces at a time, to have their loads on the way together.
  __device__ static void bring_a(const GemmMmaParams& p, const Layout& at, const Share& share, int warp) {
    constexpr int kBatch = min_of(4, 2 * kTokenTiles);
    const uint32_t one[4] = {kPairOfOnes<T>, kPairOfOnes<T>, kPairOfOnes<T>, kPairOfOnes<T>};
    const int pieces = share.steps * kTokenTiles;
#pragma unroll 1
    for (int first = warp; first < pieces; first += kBatch * kWarps) {
      uint4 x[kBatch][kWords];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int piece = first + i * kWarps, token = piece % kTokenTiles * 8 + row_of_lane();
        const char* row = static_cast<const char*>(p.a) + token * p.a_stride;
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
          const int k = share.k(piece / kTokenTiles) + k_of_word(word);
          x[i][word] = make_uint4(0, 0, 0, 0);
          if (piece < pieces && token < p.m && k < p.k) x[i][word] = *reinterpret_cast<const uint4*>(row + k * 2);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int piece = first + i * kWarps, step = piece / kTokenTiles, tile = piece % kTokenTiles;
        if (piece >= pieces) break;
        float ones[4];
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
          const uint32_t raw[4] = {x[i][word].x, x[i][word].y, x[i][word].z, x[i][word].w};
          uint32_t pairs[4];
          Codes::pair_up(pairs, raw);
          store_chunk(at.tokens + (step * kWords + word) * kTokenTiles * kSlotBytes + tile * kSlotBytes + lane_id() * 16, pairs);
          if constexpr (kRaised) {
            if (begins_group(word)) {
              mma_m16n8k16_fresh<T>(ones, one, pairs[0], pairs[1]);
            } else {
              mma_m16n8k16<T>(ones, one, pairs[0], pairs[1]);
            }
            mma_m16n8k16<T>(ones, one, pairs[2], pairs[3]);
            if (ends_group(word) && row_of_lane() == 0) {
              const uint32_t target = at.ones + ((step * kGroups + group_of_word(word)) * kTokens + tile * 8 + place() * 2) * 4;
              constexpr float kFactor = kZero ? -1.0f : -136.0f;
              store_word(target, __float_as_uint(kFactor * ones[0]));
              store_word(target + 4, __float_as_uint(kFactor * ones[1]));
            }
          }
        }
      }
    }
  }

  template <class Kept, class Entry>
  __device__ static Kept kept(Entry x) {
    if constexpr (is_same_v<Kept, Entry>) {
      return x;
    } else {
      return from_float<Kept>(scale_value(x));
    }
  }

  // Entries of the slice, (N, groups) in memory, to rows of groups. Neighbouring threads take neighbouring groups of a column.
  template <class Kept, class Entry>
  __device__ static void bring_entries(unsigned char* target, int pitch, const Entry* source, int64_t column_stride, int64_t block_stride,
                                       const GemmMmaParams& p, const Share& share) {
    constexpr int kBatch = 8;
    const int entries = share.steps * kGroups, last = (p.k - 1) / kGroup;
    if (entries == 0) return;
    const int columns = kThreads / entries, rest = kThreads % entries;
    int column = threadIdx.x / entries, entry = threadIdx.x % entries;
#pragma unroll 1
    while (column < kColumns) {
      Entry values[kBatch];
      int places[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        places[i] = column < kColumns ? entry * pitch + column * static_cast<int>(sizeof(Kept)) : -1;
        const int block = min((share.k(0) + entry * kPerGroup) / kGroup, last);
        values[i] = source[min(share.column + column, p.n - 1) * column_stride + block * block_stride];
        column += columns;
        entry += rest;
        if (entry >= entries) {
          entry -= entries;
          ++column;
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (places[i] >= 0) *reinterpret_cast<Kept*>(target + places[i]) = kept<Kept>(values[i]);
      }
    }
  }

  using Words = uint32_t[kTiles][2][kWords];
  using Sums = float[kTiles][kTokenTiles][4];

  // The codes of a step: of columns row_of_lane() of each 8, those that this lane multiplies.
  __device__ static void load_codes(Words& words, uint32_t slot) {
    constexpr int kBytes = kRun / 2;
    const int row = row_of_lane(), byte = place() * kBytes, first = swizzled(row, byte / 16) * 16 + byte % 16;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      uint32_t(&to)[kWords] = words[i / 2][i % 2];
      const uint32_t column = slot + (8 * i + row) * kStepBytes;
      if constexpr (kBytes == 16) {
        load_chunk(to, column + first);
      } else {
#pragma unroll
        for (int word = 0; word < kWords; word += kBytes / 4) {
          const uint32_t source = column + (first ^ (k_of_word(word) - k_of_word(0)) / 2);
          if constexpr (kBytes == 8) {
            uint32_t pair[2];
            load_pair(pair, source);
            to[word] = pair[0];
            to[word + 1] = pair[1];
          } else {
            to[word] = load_word(source);
          }
        }
      }
    }
  }

  // What a lane needs of its columns for one group. Zero points: as PackedCodes::zero_value.
  struct Group {
    float scales[kTiles][2];
    uint32_t zeros[kTiles][2];

    __device__ void load(const unsigned char* scale_row, const unsigned char* zero_row, int first) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const int column = first + 8 * i;
        scales[i / 2][i % 2] = scale_value(reinterpret_cast<const Scale*>(scale_row)[column]);
        zeros[i / 2][i % 2] = 0;
        if constexpr (kZero) zeros[i / 2][i % 2] = Codes::zero_value(zero_row[column]);
      }
    }
  };

  // One step. `scales` and `zeros`: this step's first rows.
  __device__ static void multiply(Sums& totals, const Words& words, const Layout& at, const unsigned char* scales, const unsigned char* zeros,
                                  int step, int first_column) {
    Sums partial;
    Group group;
    float raised[kTokenTiles][2];
    const uint32_t tokens = at.tokens + step * kTokenBytes + lane_id() * 16;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const int index = group_of_word(word);
      if (begins_group(word)) group.load(scales + index * kScalePitch, zeros + index * kZeroPitch, first_column);
      uint32_t a[kTokenTiles][4];
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        load_chunk(a[t], tokens + (word * kTokenTiles + t) * kSlotBytes);
        if (kRaised && begins_group(word)) {
          uint32_t pair[2];
          load_pair(pair, at.ones + ((step * kGroups + index) * kTokens + t * 8 + place() * 2) * 4);
          raised[t][0] = __uint_as_float(pair[0]);
          raised[t][1] = __uint_as_float(pair[1]);
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int product = 0; product < 2; ++product) {
          uint32_t b[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) b[i] = decode(words[tile][i % 2][word], 2 * product + i / 2, group.zeros[tile][i % 2]);
#pragma unroll
          for (int t = 0; t < kTokenTiles; ++t) {
            float(&sums)[4] = partial[tile][t];
            if (product == 0 && begins_group(word)) {
              if constexpr (kRaised) {
                float from[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) from[i] = raised[t][i % 2] * (kZero ? __uint_as_float(group.zeros[tile][i / 2]) : 1.0f);
                mma_m16n8k16_from<T>(sums, from, b, a[t][0], a[t][1]);
              } else {
                mma_m16n8k16_fresh<T>(sums, b, a[t][0], a[t][1]);
              }
            } else {
              mma_m16n8k16<T>(sums, b, a[t][2 * product], a[t][2 * product + 1]);
            }
          }
        }
        if (ends_group(word)) {
#pragma unroll
          for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
            for (int i = 0; i < 4; ++i) totals[tile][t][i] = fmaf(partial[tile][t][i], group.scales[tile][i / 2], totals[tile][t][i]);
          }
        }
      }
    }
  }

  __device__ static void leave_sums(const Sums& totals, float* sums, int first_column) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[(t * 8 + place() * 2 + i % 2) * kSumPitch + first_column + tile * 16 + i / 2 * 8] = totals[tile][t][i];
        }
      }
    }
  }

  // Eight neighbouring outputs of a row: over all blocks of the cluster and warps that share K.
  __device__ static void collect(const GemmMmaParams& p, uint32_t sums, const Share& share, int token, int piece) {
    const int column = share.column + 8 * piece;
    if (column >= p.n) return;
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = 0.0f;
#pragma unroll
    for (int block = 0; block < kSplitK; ++block) {
      const uint32_t source = cluster_address(sums + (token * kSumPitch + 8 * piece) * 4, block);
#pragma unroll
      for (int warp = 0; warp < kWarpsK; ++warp) {
        const float4 low = load_cluster(source + warp * kSumBytes), high = load_cluster(source + warp * kSumBytes + 16);
        y[0] += low.x, y[1] += low.y, y[2] += low.z, y[3] += low.w;
        y[4] += high.x, y[5] += high.y, y[6] += high.z, y[7] += high.w;
      }
    }
    Codes::finish(y, p, token, column);
  }

  __device__ static void run(const GemmMmaParams& p) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const uint32_t shared = shared_address(shared_memory);
    const int warp = warp_id(), warp_n = warp % kWarpsN, warp_k = warp / kWarpsN;
    const int rank = kSplitK > 1 ? static_cast<int>(cluster_rank()) : 0;
    const int all_steps = ceil_div(p.k, kStep), per_block = ceil_div(all_steps, kSplitK), first_step = min(rank * per_block, all_steps);
    const Share share{static_cast<int>(blockIdx.x) / kSplitK * kColumns, first_step, min(per_block, all_steps - first_step)};
    const Layout at(shared, per_block);
    prefetch(p, share);
    join_previous_kernel();
    const Copy copy(p, share, warp_n);
    const uint32_t ring = at.rings + warp * kStages * kStageBytes;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) copy(p, share, ring + i * kStageBytes, warp_k + i * kWarpsK);
    bring_entries<Scale>(shared_memory + (at.scales - shared), kScalePitch, static_cast<const ScaleB*>(p.scale_b), p.scale_b_column,
                         p.scale_b_block, p, share);
    if constexpr (kZero) bring_entries<uint8_t>(shared_memory + (at.zeros - shared), kZeroPitch, p.zero_b, p.zero_column, p.zero_block, p, share);
    bring_a(p, at, share, warp);
    __syncthreads();  // a, its sums, scales and zero points are there
    const int first_column = warp_n * kWarpColumns + row_of_lane();
    Sums totals;
#pragma unroll
    for (int i = 0; i < kTiles * kTokenTiles * 4; ++i) totals[i / (kTokenTiles * 4)][i / 4 % kTokenTiles][i % 4] = 0.0f;
    uint32_t used = ring, refilled = ring + (kStages - 1) * kStageBytes;
#pragma unroll 1
    for (int step = warp_k; step < share.steps; step += kWarpsK) {
      cp_async_wait<kStages - 2>();
      __syncwarp();  // this step's codes have landed; all lanes have read those of the step before, whose slot is refilled
      Words words;
      load_codes(words, used);
      copy(p, share, refilled, step + (kStages - 1) * kWarpsK);
      refilled = used;
      used = used + kStageBytes == ring + kStages * kStageBytes ? ring : used + kStageBytes;
      multiply(totals, words, at, shared_memory + (at.scales - shared) + step * kGroups * kScalePitch,
               shared_memory + (at.zeros - shared) + step * kGroups * kZeroPitch, step, first_column);
    }
    cp_async_wait<0>();
    __syncthreads();  // all warps are done with the rings, which the sums overwrite
    leave_sums(totals, reinterpret_cast<float*>(shared_memory) + warp_k * (kSumBytes / 4), first_column);
    if constexpr (kSplitK > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
    constexpr int kPieces = kColumns / 8;
    for (int i = rank * kThreads + threadIdx.x; i < p.m * kPieces; i += kSplitK * kThreads) {
      collect(p, at.rings, share, i / kPieces, i % kPieces);
    }
    if constexpr (kSplitK > 1) cluster_sync();  // a block stays while others read its sums
  }
};

}  // namespace kernelgen
