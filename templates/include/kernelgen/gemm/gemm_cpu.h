// out = activation(a @ b + bias) + beta * c on the CPU: packed panels, a register tile, one task per block of the output.
//
// A task owns block_m x block_n outputs and walks k in blocks of block_k. For each of those
//
//   the rows of a are packed into panels of kRows x block_k      stays in L2, read once per panel of b
//   one panel of b at a time, block_k x kWidth, is packed        stays in L1 while every panel of a passes
//   Tile::multiply adds kRows x kWidth sums in registers         to the task's sums, which lie tile after tile in scratch
//
// and after the last block of k a tile's sums pass through the epilogue, row by row, into out. Nothing is shared between
// tasks, so calls from several threads do not meet; each sum is added up in the order of k whatever the blocks are, so
// results depend neither on the number of threads nor on block_m and block_n.
//
// A gated activation makes two columns of the product one output: the panel of b then holds gate columns in the first
// half of its width and the matching up columns in the second, wherever b keeps them.
#pragma once

#include "kernelgen/activation/activations.h"
#include "kernelgen/gemm/pack.h"

namespace kernelgen {

// Strides are in elements. n counts outputs: half the columns of b with a gated activation.
struct GemmCpuParams {
  const void* a;
  const void* b;
  const void* bias;  // one value per column of b, null without
  const void* c;     // shape of out, null without
  void* out;
  int64_t a_batch, a_row, a_column;
  int64_t b_batch, b_row, b_column;
  int64_t c_batch, c_row;
  int64_t out_batch, out_row;
  int64_t m, n, k;
  int64_t block_m, block_n, block_k;  // of a task; block_k is a multiple of the product's depth
  int64_t tasks_m, tasks_n;           // tasks of one batch entry
  int64_t b_offset, sums_offset;      // bytes from the start of scratch: panel of b, sums
  double beta;
};

// Where the gate and the up columns of b are: halves, or even and odd columns.
enum class Gate { kNone, kGateFirst, kUpFirst, kInterleaved };

// `Options` is the rendered file's struct of compile-time constants:
//   Element (of a, b), Out, Bias, C; kTileRows, kTileVecs; kBias, kActivation, kGate, kAccumulate
template <class Options>
struct GemmEpilogue : Options {
  using Sum = Accumulator<typename Options::Element>;
  using V = Simd<Sum>;
  using Reg = typename V::Reg;
  using Options::kGate;
  static constexpr bool kGated = kGate != Gate::kNone;

  // Column of b that holds the gate (or, plain, the value) of output `column`; the up column lies up_distance further.
  static KERNELGEN_INLINE int64_t first_column(const GemmCpuParams& p, int64_t column) {
    return kGate == Gate::kInterleaved ? 2 * column : kGate == Gate::kUpFirst ? p.n + column : column;
  }
  static KERNELGEN_INLINE int64_t up_distance(const GemmCpuParams& p) {
    return kGate == Gate::kInterleaved ? 1 : kGate == Gate::kUpFirst ? -p.n : p.n;
  }
  static constexpr int64_t kColumnStep = kGate == Gate::kInterleaved ? 2 : 1;  // of b between two outputs

  // The bias of `count` outputs from `column` on, gates first, then, `width` further, ups. Zero without a bias.
  static void gather_bias(const GemmCpuParams& p, int64_t column, int64_t count, int64_t width, Sum* bias) {
    const auto* source = static_cast<const typename Options::Bias*>(p.bias) + first_column(p, column);
    for (int64_t i = 0; i < count; ++i) {
      bias[i] = widen(source[i * kColumnStep]);
      if (kGated) bias[width + i] = widen(source[i * kColumnStep + up_distance(p)]);
    }
  }

  // The first `count` (any number) outputs of a register: `value` and, gated, `up` with their biases added.
  static KERNELGEN_INLINE void store(const GemmCpuParams& p, Reg value, Reg up, int64_t batch, int64_t row, int64_t column,
                                     int64_t count) {
    value = activate<V, Options::kActivation>(value);
    if constexpr (kGated) value = value * up;
    if constexpr (Options::kAccumulate) {
      // A zero beta means that c is not read, as in BLAS: 0 * NaN would be NaN.
      if (p.beta != 0) {
        const auto* c = static_cast<const typename Options::C*>(p.c) + batch * p.c_batch + row * p.c_row + column;
        value = V::fma(V::broadcast(static_cast<Sum>(p.beta)), V::load_first(c, count), value);
      }
    }
    auto* out = static_cast<typename Options::Out*>(p.out) + batch * p.out_batch + row * p.out_row + column;
    if (count >= V::kLanes) {
      V::store(out, value);
    } else {
      V::store_first(out, value, count);
    }
  }
};

template <class Options>
struct GemmCpu : GemmEpilogue<Options> {
  using Epilogue = GemmEpilogue<Options>;
  using typename Epilogue::Sum;
  using typename Epilogue::V;
  using Epilogue::kGated;
  using T = typename Options::Element;
  using Product = typename ProductOf<T>::type;
  using Element = typename Product::Element;
  using RegisterTile = Tile<Product, Options::kTileRows, Options::kTileVecs>;
  using Pack = Packer<T, Product>;
  static constexpr int kDepth = Product::kDepth;
  static constexpr int kRows = RegisterTile::kRows;
  static constexpr int kWidth = RegisterTile::kWidth;
  static constexpr int kOutputs = kGated ? kWidth / 2 : kWidth;
  static constexpr int kOutputVecs = kOutputs / V::kLanes;
  static_assert(!kGated || Options::kTileVecs % 2 == 0, "gate and up fill whole registers");

  // sums (+)= panel of a * panel of b
  static __attribute__((noinline)) void multiply(const Element* a, const Element* b, int64_t steps, Sum* sums, bool first) {
    if (!first) {
      for (int i = 0; i < kRows * kWidth; i += 64 / int(sizeof(Sum))) __builtin_prefetch(sums + i, 1);
    }
    RegisterTile tile;
    tile.clear();
    tile.multiply(a, kDepth, kRows * kDepth, b, steps);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < Options::kTileVecs; ++v) {
        Sum* sum = sums + r * kWidth + v * V::kLanes;
        V::store(sum, first ? tile.acc[r][v] : tile.acc[r][v] + V::load(sum));
      }
    }
  }

  static __attribute__((noinline)) void finish(const GemmCpuParams& p, const Sum* sums, const Sum* bias, int64_t batch,
                                               int64_t row, int64_t rows, int64_t column, int64_t columns) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int v = 0; v < kOutputVecs && v * V::kLanes < columns; ++v) {
        const Sum* sum = sums + r * kWidth + v * V::kLanes;
        auto value = V::load(sum), up = V::load(kGated ? sum + kOutputs : sum);
        if constexpr (Options::kBias) {
          value = value + V::load(bias + v * V::kLanes);
          if constexpr (kGated) up = up + V::load(bias + kOutputs + v * V::kLanes);
        }
        Epilogue::store(p, value, up, batch, row + r, column + v * V::kLanes, columns - v * V::kLanes);
      }
    }
  }

  static void pack_a(const GemmCpuParams& p, const T* a, int64_t rows, int64_t depth, Element* panels) {
    const int64_t panel = p.block_k * kRows;
    for (int64_t r = 0; r < rows; r += kRows, panels += panel) {
      Pack::template pack<kRows>(a + r * p.a_row, p.a_row, p.a_column, rows - r, depth, panels, kRows * kDepth);
    }
  }

  // `b` is row k of the block in the column of the first output's gate.
  static void pack_b(const GemmCpuParams& p, const T* b, int64_t columns, int64_t depth, Element* panel) {
    const int64_t step = Epilogue::kColumnStep * p.b_column;
    Pack::template pack<kOutputs>(b, step, p.b_row, columns, depth, panel, kWidth * kDepth);
    if constexpr (kGated) {
      b += Epilogue::up_distance(p) * p.b_column;
      Pack::template pack<kOutputs>(b, step, p.b_row, columns, depth, panel + kOutputs * kDepth, kWidth * kDepth);
    }
  }

  static void run(const GemmCpuParams& p, int64_t task, char* scratch) {
    const int64_t batch = task / (p.tasks_m * p.tasks_n), in_batch = task % (p.tasks_m * p.tasks_n);
    // Tasks that run at the same time are neighbours: they read the same columns of b.
    const int64_t row = in_batch % p.tasks_m * p.block_m, column = in_batch / p.tasks_m * p.block_n;
    const int64_t rows = p.block_m < p.m - row ? p.block_m : p.m - row;
    const int64_t columns = p.block_n < p.n - column ? p.block_n : p.n - column;
    const int64_t panels_m = (rows + kRows - 1) / kRows;
    const T* a = static_cast<const T*>(p.a) + batch * p.a_batch + row * p.a_row;
    const T* b = static_cast<const T*>(p.b) + batch * p.b_batch + Epilogue::first_column(p, column) * p.b_column;
    Element* a_panels = reinterpret_cast<Element*>(scratch);
    Element* b_panel = reinterpret_cast<Element*>(scratch + p.b_offset);
    Sum* sums = reinterpret_cast<Sum*>(scratch + p.sums_offset);
    const int64_t tile_sums = p.k > p.block_k ? kRows * kWidth : 0;  // one block of k needs no sums but the tile at hand

    int64_t k = 0;
    do {  // once for k = 0: the epilogue of zeros
      const int64_t depth = p.block_k < p.k - k ? p.block_k : p.k - k;
      const int64_t steps = (depth + kDepth - 1) / kDepth;
      const bool first = k == 0, last = k + depth >= p.k;
      pack_a(p, a + k * p.a_column, rows, depth, a_panels);
      Sum* sum = sums;
      for (int64_t j = 0; j < columns; j += kOutputs) {
        pack_b(p, b + k * p.b_row + j * Epilogue::kColumnStep * p.b_column, columns - j, depth, b_panel);
        alignas(64) Sum bias[kWidth] = {};
        const int64_t outputs = columns - j < kOutputs ? columns - j : kOutputs;
        if (Options::kBias && last) Epilogue::gather_bias(p, column + j, outputs, kOutputs, bias);
        for (int64_t i = 0; i < panels_m; ++i, sum += tile_sums) {
          multiply(a_panels + i * p.block_k * kRows, b_panel, steps, sum, first);
          if (last) {
            const int64_t r = i * kRows;
            finish(p, sum, bias, batch, row + r, rows - r < kRows ? rows - r : kRows, column + j, outputs);
          }
        }
      }
      k += p.block_k;
    } while (k < p.k);
  }
};

}  // namespace kernelgen
