// What happens to a finished sum of a CPU product: scales, bias, activation, gate, c; and where b keeps gate and up columns.
#pragma once

#include <type_traits>

#include "kernelgen/activation/activations.h"
#include "kernelgen/gemm/gate.cuh"
#include "kernelgen/gemm/operands.h"
#include "kernelgen/gemm/row_totals.h"
#include "kernelgen/gemm/scales.h"

namespace kernelgen {

// `Options` is the rendered file's struct of compile-time constants:
//   Element (of a), ElementB, Out, Bias, C, Scale (of b); kTileRows, kTileVecs, kGrouping
//   Function: void, or what epilogue_function.h says, whose block of arguments is in the bias' place
//   kBias, kActivation, kGate, kClamped, kAccumulate, kScales and what scales.h names
template <class Options>
struct GemmEpilogue : Options {
  using Sum = Accumulator<typename Options::Element>;
  using V = Simd<Sum>;
  using Reg = typename V::Reg;
  using Options::kGate;
  using View = ScaleView<Options>;
  static constexpr bool kGated = kGate != Gate::kNone;
  static constexpr bool kScaled = Options::kScales == Scales::kProduct, kSegments = Options::kScales == Scales::kSegments;

  // Column of b that holds the gate (or, plain, the value) of output `column`; the up column lies up_distance further.
  static KERNELGEN_INLINE int64_t first_column(const GemmCpuParams& p, int64_t column) {
    return kGate == Gate::kInterleaved ? 2 * column : kGate == Gate::kUpFirst ? p.n + column : column;
  }
  static KERNELGEN_INLINE int64_t up_distance(const GemmCpuParams& p) {
    return kGate == Gate::kInterleaved ? 1 : kGate == Gate::kUpFirst ? -p.n : p.n;
  }
  static constexpr int64_t kColumnStep = kGate == Gate::kInterleaved ? 2 : 1;  // of b between two outputs

  // of(column of b) for `count` outputs from `column` on: gates first, then, `width` further, ups.
  template <class Of>
  static void gather(const GemmCpuParams& p, int64_t column, int64_t count, int64_t width, Sum* values, Of of) {
    const int64_t first = first_column(p, column);
    for (int64_t i = 0; i < count; ++i) {
      values[i] = of(first + i * kColumnStep);
      if (kGated) values[width + i] = of(first + i * kColumnStep + up_distance(p));
    }
  }

  // The factors and addends of at most kMax columns of b, zero past the last output.
  template <int kMax>
  struct Columns {
    alignas(64) Sum bias[kMax] = {};
    alignas(64) Sum scale[kMax] = {};

    void gather(const GemmCpuParams& p, int64_t batch, int64_t column, int64_t count, int64_t width) {
      if constexpr (Options::kBias) {
        const auto* source = static_cast<const typename Options::Bias*>(p.bias) + batch * p.bias_batch;
        GemmEpilogue::gather(p, column, count, width, bias, [&](int64_t c) { return widen(source[c]); });
      }
      if constexpr (kScaled) {
        GemmEpilogue::gather(p, column, count, width, scale, [&](int64_t c) { return View::of_b(p, batch, 0, c); });
      }
    }
    // The sum of some columns, `at` further; the scale of its row of a comes last.
    KERNELGEN_INLINE Reg finish(Reg sum, int64_t at, Reg row_scale) const {
      if constexpr (kScaled) sum = sum * V::load(scale + at) * row_scale;
      if constexpr (Options::kBias) sum = sum + V::load(bias + at);
      return sum;
    }
  };
  static KERNELGEN_INLINE Reg row_scale(const GemmCpuParams& p, int64_t batch, int64_t row) {
    if constexpr (kScaled) return V::broadcast(View::of_a(p, batch, 0, row));
    return V::zero();  // unused
  }

  // A user's function of each of the first `count` elements: its loads and branches are of one element.
  static KERNELGEN_INLINE Reg call_function(const GemmCpuParams& p, Reg value, Reg up, int64_t batch, int64_t row, int64_t column,
                                            int64_t count) {
    alignas(64) Sum x[V::kLanes], y[V::kLanes] = {};
    V::store(x, value);
    if constexpr (kGated) V::store(y, up);
    using Function = typename Options::Function;
    constexpr int kTotals = TotalsOf<Function>::kCount;
    if constexpr (kTotals > 0) {
      const auto b = static_cast<int32_t>(batch), r = static_cast<int32_t>(row), c = static_cast<int32_t>(column);
      Sum parts[kTotals], terms[kTotals];
      for (int t = 0; t < kTotals; ++t) parts[t] = Function::none(t);
      for (int32_t i = 0; i < V::kLanes && i < count; ++i) {
        x[i] = Function::value(x[i], y[i], {b, r, c + i}, static_cast<const int64_t*>(p.bias), terms);
        for (int t = 0; t < kTotals; ++t) parts[t] = Function::both(t, parts[t], terms[t]);
      }
      // Of the task, which comes to a row's columns in their order; the first of them begins its partials.
      Sum* partial = static_cast<Sum*>(p.codes) + (batch * p.tasks_n + column / p.block_n) * p.m + row;
      for (int t = 0; t < kTotals; ++t, partial += p.batch * p.tasks_n * p.m) {
        *partial = column % p.block_n ? Function::both(t, *partial, parts[t]) : parts[t];
      }
    } else {
      for (int64_t i = 0; i < V::kLanes && i < count; ++i) {
        x[i] = Function::value(x[i], y[i], {static_cast<int32_t>(batch), static_cast<int32_t>(row), static_cast<int32_t>(column + i)},
                               static_cast<const int64_t*>(p.bias));
      }
    }
    return V::load(x);
  }

  // The first `count` (any number) outputs of a register: `value` and, gated, `up`, both from Columns::finish.
  static KERNELGEN_INLINE void store(const GemmCpuParams& p, Reg value, Reg up, int64_t batch, int64_t row, int64_t column,
                                     int64_t count) {
    if constexpr (!std::is_void_v<typename Options::Function>) value = call_function(p, value, up, batch, row, column, count);
    else if constexpr (kGated) value = activate_gate<V, Options::kActivation, Options::kClamped>(value, up, p.alpha, p.limit);
    else value = activate<V, Options::kActivation>(value);
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

}  // namespace kernelgen
