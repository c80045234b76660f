// From the sums of a warpgroup, 64 rows at a time, to the output of gemm/dense_sm90: scales, bias, activation, gate, c.
//
// Everything happens in the registers that hold the sums: a thread has two rows and, of every eight columns, two neighbours. The
// result goes through shared memory, 128 bytes of a row at a time (a slab of 64 rows, swizzled like the operands), so that the copy
// engine writes whole lines and clips what lies past the end; kSlabs slabs take turns. Rows that end inside the slab because
// another group's begin there, and columns that end inside of 16 bytes, are written by the threads themselves, as are tiles that do
// not fall into slabs.
//
// A gated activation makes two columns of the product one output. Where gate and up are halves of b, the tile holds kOutputs columns
// of one half and then the same of the other, which one thread holds at the same place; where they alternate they are neighbours in
// one thread, and results change lanes to lie in pairs.
//
// With kScatter each row is multiplied by a weight of its own, rounded, and added to the row of out that p.rows names, 16 bytes an
// instruction, in whatever order tiles come.
//
// Codes of fp8 (kQuantize) take two walks over the results of a row's 128 columns, which lie in one quad of lanes: for the largest
// magnitude, and for the codes.
#pragma once

#include <kernelgen/activation/activations.cuh>
#include <kernelgen/cuda/conversions.cuh>
#include <kernelgen/cuda/ldmatrix.cuh>
#include <kernelgen/cuda/memory.cuh>
#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/gemm/gate.cuh>
#include <kernelgen/gemm/quantized_rows_sm90.cuh>
#include <kernelgen/gemm/row_totals.cuh>
#include <kernelgen/gemm/tiles_sm90.cuh>
#include <kernelgen/sm90/barrier.cuh>
#include <kernelgen/sm90/reduce.cuh>
#include <kernelgen/sm90/smem_tile.cuh>
#include <kernelgen/sm90/stmatrix.cuh>
#include <kernelgen/sm90/wgmma.cuh>

namespace kernelgen {

template <class Options>
struct DenseEpilogue {
  using Out = typename Options::Out;
  static constexpr Gate kGate = Options::kGate;
  static constexpr bool kGated = kGate != Gate::kNone;
  static constexpr bool kFunction = !is_same_v<typename Options::Function, void>;
  static constexpr bool kSplit = kGate == Gate::kGateFirst || kGate == Gate::kUpFirst;
  static constexpr bool kRowGroups = Options::kGrouping == Grouping::kRows || Options::kGrouping == Grouping::kMasked;
  static constexpr int kOutputs = kGated ? Options::kBlockN / 2 : Options::kBlockN;
  static constexpr int kSums = Options::kBlockN / 2;  // of a thread, for 64 rows
  static constexpr int kSlabColumns = kSwizzleRowBytes / static_cast<int>(sizeof(Out));
  static constexpr int kSlabBytes = kMmaRows * kSwizzleRowBytes;
  static constexpr int kStoreBytes = Options::kTmaOut ? Options::kSlabs * kSlabBytes : 0;
  // Scales and biases of the tile's columns, asked for before its products, wait in shared memory: for each warpgroup its own. Blocks that
  // share K, whose sums lie there, read them where they are, and so do tiles beside scales of blocks, which leave no room.
  static constexpr bool kStaged = (Options::kScales || Options::kBias) && Options::kSplitK == 1 && !Options::kBlockScales;
  static constexpr int kColumnBytes = round_up(Options::kBlockN * 4, 128);
  static constexpr int kStagedBytes = kStaged ? kColumnBytes * (Options::kScales + Options::kBias) : 0;
  static constexpr int kColumnsOfThread = (Options::kBlockN + kWarpgroupThreads - 1) / kWarpgroupThreads;
  static constexpr bool kScatter = Options::kScatter;
  static constexpr int kRowsOfThread = 4;  // of a slab of 64, of which it adds 16 bytes each
  static_assert(!kScatter || (Options::kTmaOut && sizeof(Out) == 2 && kOutputs % kSlabColumns == 0),
                "whole slabs of 16 bits are scattered");
  static_assert(kOutputs % 8 == 0, "eight outputs of a row belong to one instruction");
  // Outputs of eight columns at a time where registers are short, or ptxas loads scales and biases of all at once, and spills.
  static constexpr bool kOneByOne =
      kFunction || ((Options::kPromote || kRowGroups) && kGate == Gate::kInterleaved && (Options::kBias || Options::kScales));

  uint32_t slabs;   // shared address of this warpgroup's kSlabs
  uint32_t staged;  // and of its columns' scales, then biases
  int group;        // of the block's consumers
  int slab = 0;     // the next of kSlabs

  // First row of the tile of b from `row` on, as a column of b.
  __device__ static int column_of_b(const DenseSm90Params& p, int output, int row) {
    if constexpr (kSplit) {
      const int half = row / kOutputs;  // 0: gate
      return output + row % kOutputs + (half == (kGate == Gate::kUpFirst ? 0 : 1) ? p.n / 2 : 0);
    } else {
      return output * (kGated ? 2 : 1) + row;
    }
  }

  // What the two rows and the columns of a thread are multiplied by, and what is added.
  struct Extras {
    float top, bottom;
    uint32_t staged;
    const float* scales;
    const typename Options::Bias* biases;
    int batch, row;  // for a function of the user's
  };

  // That of a row of the product; of rows that do not exist any that does.
  __device__ static int64_t row_of_a(const DenseSm90Params& p, int row, const OutputTile& tile) {
    if constexpr (Options::kGather) {
      return p.rows[min(row, tile.row_end - 1)];
    } else {
      return min(row, p.m - 1);
    }
  }

  __device__ static float scale_of_row(const DenseSm90Params& p, const OutputTile& tile, int row) {
    return (p.scale_a + tile.batch_a * p.scale_a_batch)[row_of_a(p, row, tile) * p.scale_a_row];
  }
  __device__ static const float* scales_of_columns(const DenseSm90Params& p, const OutputTile& tile) {
    return p.scale_b + tile.batch_b * p.scale_b_batch;
  }
  __device__ static const typename Options::Bias* biases_of(const DenseSm90Params& p, const OutputTile& tile) {
    return static_cast<const typename Options::Bias*>(p.bias) + tile.batch_bias * p.bias_batch;
  }

  // Not kStaged.
  __device__ static Extras extras_of(const DenseSm90Params& p, int row, const OutputTile& tile) {
    Extras extras{1.0f, 1.0f, 0, nullptr, nullptr, kFunction ? tile.batch : 0, kFunction ? row : 0};
    if constexpr (Options::kScales) {
      extras.top = scale_of_row(p, tile, row);
      extras.bottom = scale_of_row(p, tile, row + 8);
      extras.scales = scales_of_columns(p, tile);
    }
    if constexpr (Options::kBias) extras.biases = biases_of(p, tile);
    return extras;
  }

  // Of a thread: scales of its two rows of each 64, and the columns that it brings to shared memory.
  struct Ahead {
    float rows[Options::kMmaM][2];
    float scales[kColumnsOfThread], biases[kColumnsOfThread];
    float weights[kScatter ? Options::kMmaM : 1][2];  // of the same rows
    int targets[kScatter ? Options::kMmaM : 1][kRowsOfThread];
  };

  // Of the rows of a slab that this thread adds.
  __device__ static int row_of_slab(int i) { return threadIdx.x % kWarpgroupThreads / 8 + 16 * i; }

  // `Step`: from 64 of the rows to the next that are this consumer's.
  template <int Step>
  __device__ static void load_ahead(Ahead& ahead, const DenseSm90Params& p, const OutputTile& tile, int first_row) {
    if constexpr (kScatter) {
      const int last = tile.row_end - 1, own = first_row + threadIdx.x / 32 % 4 * 16 + lane_id() / 4;
#pragma unroll
      for (int m = 0; m < Options::kMmaM; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) ahead.weights[m][i] = p.row_weights[min(own + m * Step + i * 8, last)];
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) ahead.targets[m][i] = p.rows[min(first_row + m * Step + row_of_slab(i), last)];
      }
    }
    if constexpr (!kStaged) return;
    const int row = first_row + threadIdx.x / 32 % 4 * 16 + lane_id() / 4;
#pragma unroll
    for (int i = 0; i < 2 * Options::kMmaM; ++i) {
      if constexpr (Options::kScales) ahead.rows[i / 2][i % 2] = scale_of_row(p, tile, row + i / 2 * Step + i % 2 * 8);
    }
#pragma unroll
    for (int i = 0; i < kColumnsOfThread; ++i) {
      const int mine = min(static_cast<int>(threadIdx.x) % kWarpgroupThreads + i * kWarpgroupThreads, Options::kBlockN - 1);
      const int column = min(column_of_b(p, tile.n, mine), p.n - 1);
      if constexpr (Options::kScales) ahead.scales[i] = scales_of_columns(p, tile)[static_cast<int64_t>(column) * p.scale_b_column];
      if constexpr (Options::kBias) ahead.biases[i] = to_float(biases_of(p, tile)[column]);
    }
  }

  // Those of columns to shared memory. What the tile before left there has been read: slabs, where there are any, leave behind a barrier.
  __device__ void stage(const Ahead& ahead) const {
    if constexpr (!kStaged) return;
    if constexpr (!Options::kTmaOut) named_barrier_sync(1 + group, kWarpgroupThreads);
#pragma unroll
    for (int i = 0; i < kColumnsOfThread; ++i) {
      const uint32_t target = staged + (threadIdx.x % kWarpgroupThreads + i * kWarpgroupThreads) * 4;
      if (i + 1 == kColumnsOfThread && threadIdx.x % kWarpgroupThreads + i * kWarpgroupThreads >= Options::kBlockN) continue;
      if constexpr (Options::kScales) store_float(target, ahead.scales[i]);
      if constexpr (Options::kBias) store_float(target + (Options::kScales ? kColumnBytes : 0), ahead.biases[i]);
    }
    named_barrier_sync(1 + group, kWarpgroupThreads);
  }

  // Of the m-th 64 rows of this consumer, the thread's first of which is `row`.
  __device__ Extras extras_of(const DenseSm90Params& p, int row, const OutputTile& tile, const Ahead& ahead, int m) const {
    if constexpr (kStaged) {
      return {Options::kScales ? ahead.rows[m][0] : 1.0f, Options::kScales ? ahead.rows[m][1] : 1.0f, staged, nullptr, nullptr,
              kFunction ? tile.batch : 0, kFunction ? row : 0};
    } else {
      return extras_of(p, row, tile);
    }
  }

  __device__ static void store_float(uint32_t shared, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared), "f"(x) : "memory"); }

  __device__ static void load_pair(float (&pair)[2], uint32_t shared) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair[0]), "=f"(pair[1]) : "r"(shared) : "memory");
  }

  // Scaled sums with bias of product columns `column`, + 1 and two rows, from d[0 .. 3]; `in_tile`: the column in the tile of b.
  __device__ static void product(float (&x)[4], const float* d, const DenseSm90Params& p, const Extras& extras, int column, int in_tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = d[i];
    if constexpr (Options::kScales) {
      float scales[2];
      if constexpr (kStaged) load_pair(scales, extras.staged + in_tile * 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (!kStaged) scales[i] = extras.scales[static_cast<int64_t>(min(column + i, p.n - 1)) * p.scale_b_column];
        x[i] *= extras.top * scales[i];
        x[i + 2] *= extras.bottom * scales[i];
      }
    }
    if constexpr (Options::kBias) {
      float biases[2];
      if constexpr (kStaged) load_pair(biases, extras.staged + (Options::kScales ? kColumnBytes : 0) + in_tile * 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (!kStaged) biases[i] = to_float(extras.biases[min(column + i, p.n - 1)]);
        x[i] += biases[i];
        x[i + 2] += biases[i];
      }
    }
  }

  using Parts = RowParts<typename Options::Function, 2>;

  // The user's, whose arguments are where a bias would be; `i`: of the four of a thread, two rows apart by 8.
  __device__ static float call_function(const DenseSm90Params& p, const Extras& extras, float x, float y, int column, int i, Parts& parts) {
    if constexpr (TotalsOf<typename Options::Function>::kCount > 0) {
      return parts.value(x, y, extras.batch, extras.row + i / 2 * 8, column, p.bias, column < (kGated ? p.n / 2 : p.n), i / 2);
    } else {
      return Options::Function::value(x, y, {extras.batch, extras.row + i / 2 * 8, column}, static_cast<const int64_t*>(p.bias));
    }
  }

  __device__ static float gated(const DenseSm90Params& p, float gate, float up, const Extras& extras, int column, int i, Parts& parts) {
    if constexpr (kFunction) return call_function(p, extras, gate, up, column, i, parts);
    else return activate_gate<Options::kActivation, Options::kClamped>(gate, up, p.alpha, p.limit);
  }

  // Of the eight outputs from `column` on, those of this thread: y[0], y[1] of its upper row, y[2], y[3] of the lower one.
  __device__ static void outputs(float (&y)[4], const float (&sums)[kSums], const DenseSm90Params& p, const Extras& extras, int tile,
                                 int first_output, Parts& parts) {
    const int pair = lane_id() % 4, column = first_output + 8 * tile + 2 * pair;
    if constexpr (kSplit) {
      const int up_first = kGate == Gate::kUpFirst, half = p.n / 2;
      float gate[4], up[4];
      product(gate, sums + 4 * tile, p, extras, column + (up_first ? half : 0), 8 * tile + 2 * pair);
      product(up, sums + 4 * tile + kSums / 2, p, extras, column + (up_first ? 0 : half), kOutputs + 8 * tile + 2 * pair);
#pragma unroll
      for (int i = 0; i < 4; ++i) y[i] = gated(p, gate[i], up[i], extras, column + i % 2, i, parts);
    } else if constexpr (kGated) {
      // Product tiles 2 tile and 2 tile + 1 give this lane outputs `pair` and 4 + `pair` of the eight.
      float low[4], high[4], z[2][2];
      const int in_tile = 16 * tile + 2 * pair;
      product(low, sums + 8 * tile, p, extras, 2 * first_output + in_tile, in_tile);
      product(high, sums + 8 * tile + 4, p, extras, 2 * first_output + in_tile + 8, in_tile + 8);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int output = first_output + 8 * tile + pair;
        z[0][r] = gated(p, low[2 * r], low[2 * r + 1], extras, output, 2 * r, parts);
        z[1][r] = gated(p, high[2 * r], high[2 * r + 1], extras, output + 4, 2 * r, parts);
      }
      const int source = lane_id() / 4 * 4 + 2 * pair % 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float from_low = __shfl_sync(kFullWarp, z[0][i / 2], source + i % 2);
        const float from_high = __shfl_sync(kFullWarp, z[1][i / 2], source + i % 2);
        y[i] = pair < 2 ? from_low : from_high;
      }
    } else {
      product(y, sums + 4 * tile, p, extras, column, 8 * tile + 2 * pair);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kFunction) y[i] = call_function(p, extras, y[i], 0.0f, column + i % 2, i, parts);
        else y[i] = activate<Options::kActivation>(y[i]);
      }
    }
  }

  // y += beta * c. A zero beta means that c is not read, as in BLAS: 0 * NaN would be NaN.
  __device__ static void add_c(float (&y)[4], const DenseSm90Params& p, const OutputTile& tile, int row, int column) {
    if (p.beta == 0.0f) return;
    const int outputs = kGated ? p.n / 2 : p.n;
    const auto* c = static_cast<const typename Options::C*>(p.c) + tile.batch * p.c_batch;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = row + i / 2 * 8, j = column + i % 2;
      if (r < tile.row_end && j < outputs) y[i] = fmaf(p.beta, to_float(c[r * p.c_row + j]), y[i]);
    }
  }

  __device__ static Out* out_of(const DenseSm90Params& p, const OutputTile& tile) {
    return static_cast<Out*>(const_cast<void*>(p.out)) + tile.batch * p.out_batch;
  }

  __device__ static void store_directly(const float (&y)[4], const DenseSm90Params& p, const OutputTile& tile, int row, int column) {
    const int outputs = kGated ? p.n / 2 : p.n;
    Out* out = out_of(p, tile);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = row + i / 2 * 8, j = column + i % 2;
      if (r < tile.row_end && j < outputs) out[r * p.out_row + j] = from_float<Out>(y[i]);
    }
  }

  // A box of fewer than 128 bytes a row lies row after row without a swizzle.
  template <bool kRest>
  __device__ static uint32_t slab_chunk(int row, int chunk) {
    constexpr int kRestBytes = kOutputs % kSlabColumns * static_cast<int>(sizeof(Out));
    return kRest ? row * kRestBytes + chunk * 16 : swizzled_chunk(row, chunk);
  }

  // Sixteen columns of the warp's 16 rows into the slab.
  template <bool kRest>
  __device__ static void to_slab(uint32_t address, int in_slab, const float (&y)[2][4]) {
    const int lane = lane_id(), warp_row = threadIdx.x / 32 % 4 * 16;
    if constexpr (sizeof(Out) == 2) {
      const int row = warp_row + lane % 16, chunk = in_slab / 8 + lane / 16;
      stmatrix_x4(address + slab_chunk<kRest>(row, chunk), pack_pair<Out>(y[0][0], y[0][1]), pack_pair<Out>(y[0][2], y[0][3]),
                  pack_pair<Out>(y[1][0], y[1][1]), pack_pair<Out>(y[1][2], y[1][3]));
    } else {
      static_assert(sizeof(Out) == 4, "out is 16 or 32 bits wide");
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int column = in_slab + 8 * t + lane % 4 * 2;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint32_t target = address + slab_chunk<kRest>(warp_row + lane / 4 + 8 * r, column / 4) + column % 4 * 4;
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(target), "f"(y[t][2 * r]), "f"(y[t][2 * r + 1]) : "memory");
        }
      }
    }
  }

  // The rows of a slab that are the tile's: kColumns outputs from `column` on.
  template <bool kRest, int kColumns>
  __device__ static void store_slab_rows(uint32_t address, const DenseSm90Params& p, const OutputTile& tile, int first_row, int column) {
    constexpr int kPerChunk = 16 / static_cast<int>(sizeof(Out)), kChunks = kColumns / kPerChunk;
    const int outputs = kGated ? p.n / 2 : p.n, rows = min(kMmaRows, tile.row_end - first_row);
    Out* out = out_of(p, tile) + first_row * p.out_row + column;
    for (int i = threadIdx.x % kWarpgroupThreads; i < rows * kChunks; i += kWarpgroupThreads) {
      const int row = i / kChunks, chunk = i % kChunks, count = outputs - column - chunk * kPerChunk;
      alignas(16) Out values[kPerChunk];
      uint32_t words[4];
      load_chunk(words, address + slab_chunk<kRest>(row, chunk));
      Out* target = out + row * p.out_row + chunk * kPerChunk;
      if (count >= kPerChunk) {
        *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
      } else {
        *reinterpret_cast<uint4*>(values) = make_uint4(words[0], words[1], words[2], words[3]);
#pragma unroll
        for (int j = 0; j < kPerChunk; ++j) {
          if (j < count) target[j] = values[j];
        }
      }
    }
  }

  // The rows of a slab that are the tile's, added to rows of out. (noftz: denormals are kept, as everywhere.)
  __device__ static void add_slab_rows(uint32_t address, const DenseSm90Params& p, const OutputTile& tile, int first_row, int column,
                                       const int (&targets)[kRowsOfThread]) {
    const int chunk = threadIdx.x % 8, at = column + chunk * 8;
    if (at >= (kGated ? p.n / 2 : p.n)) return;
    Out* out = static_cast<Out*>(const_cast<void*>(p.out)) + at;
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int row = row_of_slab(i);
      if (first_row + row >= tile.row_end) break;
      uint32_t words[4];
      load_chunk(words, address + slab_chunk<false>(row, chunk));
      reduce_add_16<Out>(out + targets[i] * p.out_row, words);
    }
  }

  // The next slab, once the store that last read it has done so. By all threads of the warpgroup, as all here.
  __device__ uint32_t begin_slab() const {
    if (threadIdx.x % kWarpgroupThreads == 0) tma_store_wait_read<Options::kSlabs - 1>();
    named_barrier_sync(1 + group, kWarpgroupThreads);
    return slabs + slab * kSlabBytes;
  }

  // The slab, written by all, leaves for 64 rows and the tile's outputs from `column` on.
  __device__ void end_slab(uint32_t address, const DenseSm90Params& p, const OutputTile& tile, int first_row, int column,
                           const Ahead& ahead, int m) {
    if constexpr (kScatter) {
      named_barrier_sync(1 + group, kWarpgroupThreads);
      add_slab_rows(address, p, tile, first_row, tile.n + column, ahead.targets[m]);
      slab = slab + 1 == Options::kSlabs ? 0 : slab + 1;
      return;
    }
    const bool leader = threadIdx.x % kWarpgroupThreads == 0;
    const int outputs_end = kGated ? p.n / 2 : p.n;
    // The copy engine clips rows, but columns only to 16 bytes: what follows in memory is not ours.
    const bool others_follow = (kRowGroups && first_row + kMmaRows > tile.row_end) ||
                               (outputs_end * static_cast<int>(sizeof(Out)) % 16 != 0 && tile.n + kOutputs > outputs_end);
    tma_store_fence();
    named_barrier_sync(1 + group, kWarpgroupThreads);
    if (others_follow) {
      if (column + kSlabColumns <= kOutputs) {
        store_slab_rows<false, kSlabColumns>(address, p, tile, first_row, tile.n + column);
      } else if constexpr (kOutputs % kSlabColumns != 0) {
        store_slab_rows<true, kOutputs % kSlabColumns>(address, p, tile, first_row, tile.n + column);
      }
    } else if (leader) {
      const TensorMap& map = column + kSlabColumns <= kOutputs ? p.map_out : p.map_rest;
      tma_store(map, address, tile.n + column, first_row, tile.batch);
    }
    if (leader) tma_store_commit();  // without a store too: the waits count slabs
    slab = slab + 1 == Options::kSlabs ? 0 : slab + 1;
  }

  // The results of 64 rows as codes with a scale for 128 of a row. InPlace: they take the place of their sums, behind those that are still
  // to be read. That saves registers, but of two products one below the other, in the tensor core's own sums, ptxas then takes
  // them for unfinished ("serialized" in its log).
  template <bool InPlace>
  __device__ void quantize_rows(const DenseSm90Params& p, const OutputTile& tile, float (&sums)[kSums], int first_row, const Ahead& ahead,
                                int m) {
    using Rows = QuantizedRows<Out>;
    static_assert(kSlabColumns == kColumnsOfScale && kOutputs % kColumnsOfScale == 0, "a slab has the columns of one scale");
    const int outputs_end = kGated ? p.n / 2 : p.n;
    const int row = first_row + threadIdx.x / 32 % 4 * 16 + lane_id() / 4;
    const Extras extras = extras_of(p, row, tile, ahead, m);
#pragma unroll
    for (int block = 0; block < kOutputs; block += kColumnsOfScale) {
      uint32_t amax[2] = {0, 0};
      float own[InPlace ? 1 : kColumnsOfScale / 2];
      float* results = InPlace ? sums + block / 2 : own;
#pragma unroll
      for (int eight = 0; eight < kColumnsOfScale / 8; ++eight) {
        float y[4];
        if constexpr (Options::kBias || Options::kScales) __syncwarp();  // as kOneByOne
        Parts parts;
        outputs(y, sums, p, extras, block / 8 + eight, tile.n, parts);
        const int at = tile.n + block + 8 * eight + lane_id() % 4 * 2;
        if constexpr (Options::kAccumulate) add_c(y, p, tile, row, at);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          results[4 * eight + i] = at + i % 2 < outputs_end ? y[i] : 0.0f;
          amax[i / 2] = larger_magnitude(amax[i / 2], results[4 * eight + i]);
        }
      }
      const float upper = fp8_scale(largest_of_quad(amax[0]), Rows::kLargest), lower = fp8_scale(largest_of_quad(amax[1]), Rows::kLargest);
      if (lane_id() % 4 == 0 && tile.n + block < outputs_end) {
        float* scale = p.out_scale + tile.batch * p.out_scale_batch + (tile.n + block) / kColumnsOfScale * p.out_scale_block;
        if (row < tile.row_end) scale[row * p.out_scale_row] = upper;
        if (row + 8 < tile.row_end) scale[(row + 8) * p.out_scale_row] = lower;
      }
      const Divisor by_upper(upper), by_lower(lower);
      const uint32_t address = begin_slab();
#pragma unroll
      for (int column = 0; column < kColumnsOfScale; column += 16) {
        Rows::to_slab(address, column, results + column / 2, by_upper, by_lower);
      }
      end_slab(address, p, tile, first_row, block, ahead, m);
    }
  }

  // 64 rows from `first_row` on, all outputs of the tile. By all threads of the warpgroup.
  __device__ void run_rows(const DenseSm90Params& p, const OutputTile& tile, const float (&sums)[kSums], int first_row, const Ahead& ahead,
                           int m) {
    const int row = first_row + threadIdx.x / 32 % 4 * 16 + lane_id() / 4, first_output = tile.n;
    const Extras extras = extras_of(p, row, tile, ahead, m);
    Parts parts;
#pragma unroll
    for (int column = 0; column < kOutputs; column += kSlabColumns) {
      uint32_t address = 0;
      if constexpr (Options::kTmaOut) address = begin_slab();
#pragma unroll
      for (int in_slab = 0; in_slab < kSlabColumns && column + in_slab < kOutputs; in_slab += 16) {
        float y[2][4];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          if (column + in_slab + 8 * t >= kOutputs) continue;
          const int eight = (column + in_slab) / 8 + t;
          if constexpr (kOneByOne) __syncwarp();
          outputs(y[t], sums, p, extras, eight, first_output, parts);
          if constexpr (kScatter) {
#pragma unroll
            for (int i = 0; i < 4; ++i) y[t][i] *= ahead.weights[m][i / 2];
          }
          const int at = first_output + 8 * eight + lane_id() % 4 * 2;
          if constexpr (Options::kAccumulate) add_c(y[t], p, tile, row, at);
          if constexpr (!Options::kTmaOut) store_directly(y[t], p, tile, row, at);
        }
        if constexpr (Options::kTmaOut) {
          if (column + kSlabColumns <= kOutputs) {
            to_slab<false>(address, in_slab, y);
          } else {
            to_slab<true>(address, in_slab, y);
          }
        }
      }
      if constexpr (Options::kTmaOut) end_slab(address, p, tile, first_row, column, ahead, m);
    }
    if constexpr (TotalsOf<typename Options::Function>::kCount > 0) {  // to memory that is where c would be
      const int outputs_end = kGated ? p.n / 2 : p.n, tiles = (outputs_end + kOutputs - 1) / kOutputs;
      const int64_t step = static_cast<int64_t>(tiles) * p.m, at = tile.batch * step + static_cast<int64_t>(tile.n / kOutputs) * p.m + row;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        parts.template leave<4>(p.c, at + 8 * r, p.groups * step, row + 8 * r < p.m && tile.n < outputs_end, r);
      }
    }
  }

  // Before the block ends: its stores have read shared memory.
  __device__ void finish() const {
    if (Options::kTmaOut && threadIdx.x % kWarpgroupThreads == 0) tma_store_wait_read<0>();
  }

  template <int Step, int MmaM>
  __device__ void run(const DenseSm90Params& p, const OutputTile& tile, float (&sums)[MmaM][kSums], int first_row, const Ahead& ahead) {
    stage(ahead);
#pragma unroll
    for (int m = 0; m < MmaM; ++m) {
      const int first = first_row + m * Step;
      if (first >= tile.row_end) continue;
      if constexpr (Options::kQuantize) {
        quantize_rows<MmaM == 1 || Options::kPromote>(p, tile, sums[m], first, ahead, m);
      } else {
        run_rows(p, tile, sums[m], first, ahead, m);
      }
    }
  }
};

}  // namespace kernelgen
