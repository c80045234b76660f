// out = activation(a @ b + bias) + beta * c on Hopper for few rows of a and a packed 4-bit b, at the speed of reading b.
//
// Computed transposed, so that the 16 rows of an mma are columns of b and its 8 columns rows of a. kSplitK blocks of a cluster share K:
// a block has kColumns columns and a slice of K, so that it reads little of a beside much of b:
//
//   codes   each warp fills a ring of its own in shared memory by cp.async: many bytes on their way, and no barrier between its steps
//   a       panels of kPanel steps of k by cp.async in the order in which lanes multiply it, 16 bytes per lane and load. Two of them, so
//           that the next one comes while this one is multiplied
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

// Scales, or zero points, of a step and column lie together, to be loaded together.
template <class Entry, int Groups>
struct alignas(Groups * sizeof(Entry)) StepEntries {
  Entry of_group[Groups];
};

// The type of the multiplication. e2m1 fits the upper byte of an fp16, which takes half of the work that a bf16 takes.
template <class Code, class T>
struct Multiplied {
  using type = T;
};
template <class T>
struct Multiplied<e2m1, T> {
  using type = fp16;
};

// `Options`: as in packed_codes.cuh; kTiles (of 16 columns of a warp), kTokenTiles (of 8 rows of a), kWarpsN, kWarpsK, kStages (of a ring),
// kPanel, kSplitK, kAhead (steps whose codes go to L2 beforehand)
template <class Options>
struct PackedSm90 : PackedCodes<Options> {
  using Codes = PackedCodes<Options>;
  using T = typename Options::Product;  // of a
  using Factor = typename Multiplied<typename Options::ElementB, T>::type;
  using ScaleB = typename Options::ScaleB;
  using Codes::begins_group;
  using Codes::ends_group;
  using Codes::group_of_word;
  using Codes::k_of_word;
  using Codes::kGroups;
  using Codes::kRun;
  using Codes::kStep;
  using Codes::kWords;
  using Codes::place;
  using Codes::row_of_lane;
  using Options::kGroup;
  using Options::kPanel;
  using Options::kSplitK;
  using Options::kStages;
  using Options::kTiles;
  using Options::kTokenTiles;
  using Options::kWarpsK;
  using Options::kWarpsN;
  using Options::kZero;

  static constexpr int kWarps = kWarpsN * kWarpsK, kThreads = kWarps * kWarpSize;
  static constexpr int kWarpColumns = kTiles * 16, kColumns = kWarpsN * kWarpColumns, kTokens = kTokenTiles * 8;
  // Beside e2m1, rows of a are multiplied as fp16, step by step times the power of two that brings their largest element to 2^15: what
  // that cuts off is less than 2^-39 of it.
  static constexpr bool kNormal = is_same_v<typename Options::ElementB, e2m1>;
  static constexpr int kStepBytes = kStep / 2;  // of a column of codes
  static constexpr int kStageBytes = kWarpColumns * kStepBytes, kRingBytes = kWarps * kStages * kStageBytes;
  static constexpr int kSumPitch = kColumns + 4, kSumBytes = kTokens * kSumPitch * 4;  // of kWarpsN warps, in floats
  static constexpr int kSlotBytes = kWarpSize * 16, kTokenBytes = kWords * kTokenTiles * kSlotBytes;  // of a, of a step
  static constexpr int kPanelBytes = kPanel * kTokenBytes, kPanelRows = kNormal ? kPanel * kTokens * 4 : 0;
  static constexpr int kRounds = kPanel / kWarpsK;  // of a warp, of a panel
  static_assert(kPanel % kWarpsK == 0, "all warps take as many steps of a panel");
  using Scale = typename KeptScale<ScaleB>::type;
  template <class Entry>
  using Entries = StepEntries<Entry, kGroups>;
  // Rows of steps are padded: threads write them column by column.
  template <class Entry>
  static constexpr int kPitch = kColumns * static_cast<int>(sizeof(Entries<Entry>)) + max_of(4, static_cast<int>(sizeof(Entries<Entry>)));
  static constexpr int kPerGroup = kStep / kGroups;
  static constexpr int kLine = 128;  // bytes

  // Where things are in shared memory, for slices of `steps` steps. The rings come first; in the end the sums overwrite them. One panel is
  // enough where it holds the slice.
  struct Layout {
    uint32_t rings, tokens, rows, scales, zeros;  // rows: a float per row of a and step

    __device__ Layout(uint32_t shared, int steps) : rings(shared), tokens(shared + max_of(kRingBytes, kWarpsK * kSumBytes)) {
      const int panels = steps > kPanel ? 2 : 1;
      rows = tokens + panels * kPanelBytes;
      scales = rows + panels * kPanelRows;
      zeros = scales + steps * kPitch<Scale>;
    }
  };

  // The part of the product that a block has. Steps count from the slice's first.
  struct Share {
    int column, first_step, steps;

    __device__ int k(int step) const { return (first_step + step) * kStep; }
  };

  // Whatever the kernel before still writes: prefetches bring lines to L2, where those writes go as well.
  __device__ static void prefetch(const GemmMmaParams& p, const Share& share) {
    if (Options::kAhead == 0 || share.steps == 0) return;
    for (int i = threadIdx.x; i < kColumns; i += kThreads) {
      const int64_t column = min(share.column + i, p.n - 1), block = share.k(0) / kGroup;
      prefetch_l2(static_cast<const ScaleB*>(p.scale_b) + column * p.scale_b_column + block * p.scale_b_block);
    }
    const int pieces = min(min(share.steps, kPanel) * kStep, p.k - share.k(0)) * 2 / kLine;
    for (int i = threadIdx.x; i < p.m * pieces; i += kThreads) {
      prefetch_l2(static_cast<const char*>(p.a) + i / pieces * p.a_stride + share.k(0) * 2 + i % pieces * kLine);
    }
    const int ahead = min(share.steps, Options::kAhead);
    const int lines = ceil_div(min(ahead * kStep, p.k - share.k(0)) / 2, kLine);
    for (int i = threadIdx.x; i < kColumns * lines; i += kThreads) {
      const int64_t column = min(share.column + i % kColumns, p.n - 1);
      prefetch_l2(static_cast<const char*>(p.b) + column * p.b_stride + share.k(0) / 2 + i / kColumns * kLine);
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
      source = static_cast<const char*>(p.b) + share.k(0) / 2 + place() * 16;
      target = row * kStepBytes + swizzled(row, place()) * 16;
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) columns[i] = min(first + 8 * i, p.n - 1) * static_cast<uint32_t>(p.b_stride);
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

  // A part of a's slice on its way to shared memory, in the order in which lanes multiply it: a piece is a step of eight rows, copied and
  // made ready by one warp. Half a warp copies a row's 256 bytes, so that whole lines come. The copies join the next group of codes.
  __device__ static void copy_a(const GemmMmaParams& p, const Layout& at, const Share& share, int warp, int panel) {
    constexpr int kLanes = kStep / 8, kRows = kWarpSize / kLanes;  // of a row; rows at a time
    const int chunk = lane_id() % kLanes, element = chunk * 8;
    // The word and the lane that element belongs to: k_of_word the other way round.
    const int word = element / (4 * kRun) * (kRun / 8) + element % kRun / 8, lane = lane_id() / kLanes * 4 + element / kRun % 4;
    const uint32_t target = at.tokens + panel % 2 * kPanelBytes;
#pragma unroll 1
    for (int piece = warp; piece < kPanel * kTokenTiles; piece += kWarps) {
      const int first = piece % kTokenTiles * 8 + lane_id() / kLanes, k = share.k(panel * kPanel + piece / kTokenTiles) + element;
      const char* source = static_cast<const char*>(p.a) + first * p.a_stride + static_cast<int64_t>(k) * 2;
#pragma unroll
      for (int row = 0; row < 8; row += kRows) {
        cp_async_16(target + slot_of(piece, word) + of_lane(lane + row * 4, word), source + row * p.a_stride, first + row < p.m && k < p.k);
      }
    }
  }

  // Where a lane's 16 bytes are in a slot. The eight lanes that copy 128 bytes of a row write two or four words: to different banks.
  __device__ static int of_lane(int lane, int word) { return lane * 16 ^ (word % 2 * 64 + word / 2 * 32); }

  __device__ static int slot_of(int piece, int word) {
    return piece / kTokenTiles * kTokenBytes + (word * kTokenTiles + piece % kTokenTiles) * kSlotBytes;
  }

  // Its copies have landed: they become pairs for the products.
  __device__ static void make_ready(const Layout& at, int warp, int panel) {
    const uint32_t tokens = at.tokens + panel % 2 * kPanelBytes, rows = at.rows + panel % 2 * kPanelRows;
#pragma unroll(kNormal ? 1 : 2)
    for (int piece = warp; piece < kPanel * kTokenTiles; piece += kWarps) {
      uint32_t raw[kWords][4], pairs[kWords][4];
#pragma unroll
      for (int word = 0; word < kWords; ++word) load_chunk(raw[word], tokens + slot_of(piece, word) + of_lane(lane_id(), word));
      const int step = piece / kTokenTiles, row = piece % kTokenTiles * 8;
      if constexpr (kNormal) {
        normalize(pairs, raw, rows + (step * kTokens + row + row_of_lane()) * 4);
      } else {
#pragma unroll
        for (int word = 0; word < kWords; ++word) Codes::pair_up(pairs[word], raw[word]);
      }
#pragma unroll
      for (int word = 0; word < kWords; ++word) store_chunk(tokens + slot_of(piece, word) + of_lane(lane_id(), word), pairs[word]);
    }
  }

  // A step of the quad's row: as fp16 pairs, and what makes up for their factor and that of the codes, 2^-14.
  __device__ static void normalize(uint32_t (&pairs)[kWords][4], const uint32_t (&raw)[kWords][4], uint32_t target) {
    uint32_t most = raw[0][0];
#pragma unroll
    for (int i = 1; i < kWords * 4; ++i) most = larger_pair<T>(most, raw[i / 4][i % 4]);
    most = larger_pair<T>(most, __shfl_xor_sync(kFullWarp, most, 1));
    most = larger_pair<T>(most, __shfl_xor_sync(kFullWarp, most, 2));
    const float2 both = unpack_pair<T>(most);
    const int exponent = __float_as_uint(fmaxf(fabsf(both.x), fabsf(both.y))) >> 23;
    const int raise = min(127 + 15 + 127 - exponent, 253);  // as a float's exponent; its reciprocal is no subnormal
    const float factor = __uint_as_float(static_cast<uint32_t>(raise) << 23);
    if (place() == 0) store_word(target, static_cast<uint32_t>(254 - raise + 14) << 23);
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 first = unpack_pair<T>(raw[word][i]), second = unpack_pair<T>(raw[word][i + 2]);
        pairs[word][2 * i] = pack_pair<fp16>(first.x * factor, second.x * factor);
        pairs[word][2 * i + 1] = pack_pair<fp16>(first.y * factor, second.y * factor);
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

  // Entries of the slice, (N, groups) in memory, to rows of steps. Neighbouring threads take neighbouring groups of a column. What
  // `meanwhile` starts is behind the first loads in the queue to memory.
  template <class Kept, class Entry, class Start>
  __device__ static void bring_entries(unsigned char* target, const Entry* source, int64_t column_stride, int64_t block_stride,
                                       const GemmMmaParams& p, const Share& share, Start meanwhile) {
    constexpr int kBatch = 16;
    const int entries = max(share.steps * kGroups, 1), last = (p.k - 1) / kGroup;
    const int columns = kThreads / entries, rest = kThreads % entries;
    int column = threadIdx.x / entries, entry = threadIdx.x % entries;
    Entry values[kBatch];
    int places[kBatch];
    auto load = [&] {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        places[i] = column < kColumns ? entry / kGroups * kPitch<Kept> + (column * kGroups + entry % kGroups) * static_cast<int>(sizeof(Kept)) : -1;
        const int block = min((share.k(0) + entry * kPerGroup) / kGroup, last);
        if (places[i] >= 0) values[i] = source[min(share.column + column, p.n - 1) * column_stride + block * block_stride];
        column += columns;
        entry += rest;
        if (entry >= entries) {
          entry -= entries;
          ++column;
        }
      }
    };
    auto store = [&] {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (places[i] >= 0) *reinterpret_cast<Kept*>(target + places[i]) = kept<Kept>(values[i]);
      }
    };
    load();
    meanwhile();
    store();
#pragma unroll 1
    while (column < kColumns) {
      load();
      store();
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

  // What a lane needs of its columns for one step, as it is kept, and for one group. Zero points: negated pairs in kCodeUnit.
  struct StepScales {
    Entries<Scale> scales[2 * kTiles];
    Entries<uint8_t> zeros[kZero ? 2 * kTiles : 1];

    __device__ StepScales(const unsigned char* scale_row, const unsigned char* zero_row, int first) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        scales[i] = reinterpret_cast<const Entries<Scale>*>(scale_row)[first + 8 * i];
        if constexpr (kZero) zeros[i] = reinterpret_cast<const Entries<uint8_t>*>(zero_row)[first + 8 * i];
      }
    }
  };
  struct Group {
    float scales[kTiles][2];
    uint32_t zeros[kTiles][2];

    __device__ void take(const StepScales& step, int index) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        scales[i / 2][i % 2] = scale_value(step.scales[i].of_group[index]);
        zeros[i / 2][i % 2] = kMinusEight<Factor>;
        if constexpr (kZero) {
          const float zero = -kCodeUnit<Factor> * static_cast<float>(step.zeros[i].of_group[index]);
          zeros[i / 2][i % 2] = pack_pair<Factor>(zero, zero);
        }
      }
    }
  };

  // Eight codes of a column as pairs that are 16 bits apart.
  __device__ static void decode(uint32_t (&pairs)[4], uint32_t word, uint32_t zero) {
    if constexpr (kNormal) {
      e2m1_word(pairs, word);
    } else {
      int4_word<T>(pairs, word, zero);
    }
  }

  // One step. `tokens`, `rows`: what a has for it; `scales`, `zeros`: its rows.
  __device__ static void multiply(Sums& totals, const Words& words, uint32_t tokens, uint32_t rows, const unsigned char* scales,
                                  const unsigned char* zeros, int first_column) {
    Sums partial, scaled;  // of a group; of the step, where rows of a are normal
    Group group;
    const StepScales step(scales, zeros, first_column);
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const int index = group_of_word(word);
      if (begins_group(word)) group.take(step, index);
      uint32_t a[kTokenTiles][4];
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        load_chunk(a[t], tokens + of_lane(lane_id(), word) + (word * kTokenTiles + t) * kSlotBytes);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        uint32_t pairs[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) decode(pairs[half], words[tile][half][word], group.zeros[tile][half]);
#pragma unroll
        for (int product = 0; product < 2; ++product) {
          const int i = 2 * product;
          const uint32_t b[4] = {pairs[0][i], pairs[1][i], pairs[0][i + 1], pairs[1][i + 1]};
#pragma unroll
          for (int t = 0; t < kTokenTiles; ++t) {
            float(&sums)[4] = partial[tile][t];
            if (product == 0 && begins_group(word)) {
              mma_m16n8k16_fresh<Factor>(sums, b, a[t][0], a[t][1]);
            } else {
              mma_m16n8k16<Factor>(sums, b, a[t][i], a[t][i + 1]);
            }
          }
        }
        if (ends_group(word)) {
#pragma unroll
          for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float sum = partial[tile][t][i], scale = group.scales[tile][i / 2];
              if constexpr (kNormal) {
                scaled[tile][t][i] = index == 0 ? sum * scale : fmaf(sum, scale, scaled[tile][t][i]);
              } else {
                totals[tile][t][i] = fmaf(sum, scale, totals[tile][t][i]);
              }
            }
          }
        }
      }
    }
    if constexpr (kNormal) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        float factors[2];
        load_row_values(factors, rows + t * 32);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 4; ++i) totals[tile][t][i] = fmaf(scaled[tile][t][i], factors[i % 2], totals[tile][t][i]);
        }
      }
    }
  }

  // Of the two rows of a whose sums a lane has, of eight.
  __device__ static void load_row_values(float (&values)[2], uint32_t rows) {
    uint32_t pair[2];
    load_pair(pair, rows + place() * 8);
    values[0] = __uint_as_float(pair[0]);
    values[1] = __uint_as_float(pair[1]);
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
    if constexpr (!kNormal) {
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] *= 1.0f / kCodeUnit<T>;
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
    // First what the first products wait for: behind a ring of codes it would come late.
    copy_a(p, at, share, warp, 0);
    if constexpr (kZero) {
      bring_entries<uint8_t>(shared_memory + (at.zeros - shared), p.zero_b, p.zero_column, p.zero_block, p, share, [] {});
    }
    bring_entries<Scale>(shared_memory + (at.scales - shared), static_cast<const ScaleB*>(p.scale_b), p.scale_b_column,
                         p.scale_b_block, p, share, [&] {
#pragma unroll
                           for (int i = 0; i < kStages - 1; ++i) copy(p, share, ring + i * kStageBytes, warp_k + i * kWarpsK);
                         });
    const int first_column = warp_n * kWarpColumns + row_of_lane();
    Sums totals;
#pragma unroll
    for (int i = 0; i < kTiles * kTokenTiles * 4; ++i) totals[i / (kTokenTiles * 4)][i / 4 % kTokenTiles][i % 4] = 0.0f;
    uint32_t used = ring, refilled = ring + (kStages - 1) * kStageBytes;
    const int panels = ceil_div(share.steps, kPanel);
#pragma unroll 1
    for (int panel = 0; panel < panels; ++panel) {
      cp_async_wait<min_of(kStages - 2, kRounds - 1)>();  // this lane's copies of the panel, which it made a panel or kStages - 1 groups ago
      __syncwarp();  // those of the other lanes have landed, too
      make_ready(at, warp, panel);
      __syncthreads();  // the panel is there, in the beginning scales and zero points as well; all warps are done with the one before
      const uint32_t tokens = at.tokens + panel % 2 * kPanelBytes, rows = at.rows + panel % 2 * kPanelRows;
#pragma unroll 1
      for (int in_panel = warp_k; in_panel < kPanel; in_panel += kWarpsK) {
        const int step = panel * kPanel + in_panel;
        if (step >= share.steps) break;
        cp_async_wait<kStages - 2>();
        __syncwarp();  // this step's codes have landed; all lanes have read those of the step before, whose slot is refilled
        Words words;
        load_codes(words, used);
        if (in_panel == warp_k && panel + 1 < panels) copy_a(p, at, share, warp, panel + 1);
        copy(p, share, refilled, step + (kStages - 1) * kWarpsK);
        refilled = used;
        used = used + kStageBytes == ring + kStages * kStageBytes ? ring : used + kStageBytes;
        multiply(totals, words, tokens + in_panel * kTokenBytes, rows + in_panel * kTokens * 4,
                 shared_memory + (at.scales - shared) + step * kPitch<Scale>, shared_memory + (at.zeros - shared) + step * kPitch<uint8_t>,
                 first_column);
      }
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
