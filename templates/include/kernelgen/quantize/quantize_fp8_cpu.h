// x, optionally through an activation, to fp8 codes and scales. A task owns task_rows rows of a batch entry.
//
// Where there is an activation, its results lie in scratch (a row, or a block of 128 x 128) while their largest magnitude is
// looked for and while they are rounded; else x is read a second time, from the cache. One scale for the whole tensor needs
// every task's largest magnitude first: a phase of its own.
#pragma once

#include "kernelgen/activation/activations.h"
#include "kernelgen/gemm/gate.cuh"
#include "kernelgen/quantize/quantize_rows.h"

namespace kernelgen {

// Strides are in elements. width counts codes: half of x with a gated activation.
struct QuantizeCpuParams {
  const void* x;
  void* codes;
  float* scale;
  uint32_t* largest;  // of each task, for one scale
  int64_t x_batch, x_row;
  int64_t codes_batch, codes_row;
  int64_t scale_batch, scale_row, scale_block;  // scale_row: between rows of scales, which may be of blocks
  int64_t batch, rows, width;
  int64_t task_rows, batch_tasks, tasks;  // rows of a task; tasks of a batch entry, and of all
};

// `Options`: Element, Code, kActivation, kGate, kRecipe.
template <class Options>
struct QuantizeCpu {
  using V = Simd<float>;
  using T = typename Options::Element;
  using Code = typename Options::Code;
  static constexpr Gate kGate = Options::kGate;
  static constexpr bool kActive = Options::kActivation != Activation::kNone;
  static_assert(kGate == Gate::kNone || kActive, "a gate is an activation's");

  // Rows of values to quantise, in memory: x itself or the activation's results.
  template <class Value>
  struct Values {
    const Value* first;
    int64_t row_step;
  };

  static KERNELGEN_INLINE typename V::Reg load_every_second(const T* x, int64_t n) {
    alignas(64) float lanes[V::kLanes] = {};
    for (int64_t i = 0; i < n && i < V::kLanes; ++i) lanes[i] = widen(x[2 * i]);
    return V::load(lanes);
  }
  static void activate_row(const T* x, int64_t column, int64_t count, int64_t width, float* out) {
    const T* gate = kGate == Gate::kInterleaved ? x + 2 * column : kGate == Gate::kUpFirst ? x + width + column : x + column;
    const T* up = kGate == Gate::kInterleaved ? gate + 1 : kGate == Gate::kUpFirst ? x + column : x + width + column;
    for (int64_t i = 0; i < count; i += V::kLanes) {
      const int64_t n = count - i;
      if constexpr (kGate == Gate::kInterleaved) {
        V::store_first(out + i, activate<V, Options::kActivation>(load_every_second(gate + 2 * i, n)) * load_every_second(up + 2 * i, n), n);
      } else {
        typename V::Reg value = activate<V, Options::kActivation>(V::load_first(gate + i, n));
        if constexpr (kGate != Gate::kNone) value = value * V::load_first(up + i, n);
        V::store_first(out + i, value, n);
      }
    }
  }

  // `count` columns of rows r .. r + rows.
  static auto values(const QuantizeCpuParams& p, int64_t batch, int64_t r, int64_t rows, int64_t column, int64_t count, float* scratch) {
    const T* x = static_cast<const T*>(p.x) + batch * p.x_batch + r * p.x_row;
    if constexpr (!kActive) {
      return Values<T>{x + column, p.x_row};
    } else {
      for (int64_t i = 0; i < rows; ++i) activate_row(x + i * p.x_row, column, count, p.width, scratch + i * count);
      return Values<float>{scratch, count};
    }
  }

  // A tile with a scale of its own.
  static void tile(const QuantizeCpuParams& p, int64_t batch, int64_t r, int64_t rows, int64_t column, int64_t count, float* scale,
                   float* scratch) {
    const auto x = values(p, batch, r, rows, column, count, scratch);
    Code* codes = static_cast<Code*>(p.codes) + batch * p.codes_batch + r * p.codes_row + column;
    *scale = quantize_tile(x.first, x.row_step, codes, p.codes_row, rows, count);
  }

  static void find_largest(const QuantizeCpuParams& p, int64_t task, float* scratch) {
    uint32_t largest = 0;
    for_rows(p, task, [&](int64_t batch, int64_t r) {
      largest = largest_magnitude(values(p, batch, r, 1, 0, p.width, scratch).first, p.width, largest);
    });
    p.largest[task] = largest;
  }

  static void quantize_tensor(const QuantizeCpuParams& p, int64_t task, float* scratch) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < p.tasks; ++i) largest = largest > p.largest[i] ? largest : p.largest[i];
    const float scale = scale_for<Code>(largest);
    if (task == 0) *p.scale = scale;
    for_rows(p, task, [&](int64_t batch, int64_t r) {
      Code* codes = static_cast<Code*>(p.codes) + batch * p.codes_batch + r * p.codes_row;
      quantize_row(values(p, batch, r, 1, 0, p.width, scratch).first, codes, p.width, scale);
    });
  }

  template <class Each>
  static void for_rows(const QuantizeCpuParams& p, int64_t task, Each each) {
    const int64_t batch = task / p.batch_tasks, row = task % p.batch_tasks * p.task_rows;
    for (int64_t r = row; r < row + p.task_rows && r < p.rows && batch < p.batch; ++r) each(batch, r);
  }

  static void quantize(const QuantizeCpuParams& p, int64_t task, float* scratch) {
    if constexpr (Options::kRecipe == Recipe::kTensor) {
      quantize_tensor(p, task, scratch);
    } else if constexpr (Options::kRecipe == Recipe::kBlock128x128) {
      // A task is a row of blocks.
      const int64_t batch = task / p.batch_tasks, block = task % p.batch_tasks, row = block * kScaleBlock;
      float* scale = p.scale + batch * p.scale_batch + block * p.scale_row;
      const int64_t rows = p.rows - row < kScaleBlock ? p.rows - row : kScaleBlock;
      for (int64_t c = 0; c < p.width; c += kScaleBlock, scale += p.scale_block) {
        tile(p, batch, row, rows, c, p.width - c < kScaleBlock ? p.width - c : kScaleBlock, scale, scratch);
      }
    } else {
      for_rows(p, task, [&](int64_t batch, int64_t r) {
        float* scale = p.scale + batch * p.scale_batch + r * p.scale_row;
        if constexpr (Options::kRecipe == Recipe::kRow) {
          tile(p, batch, r, 1, 0, p.width, scale, scratch);
        } else {
          for (int64_t c = 0; c < p.width; c += kScaleBlock, scale += p.scale_block) {
            tile(p, batch, r, 1, c, p.width - c < kScaleBlock ? p.width - c : kScaleBlock, scale, scratch);
          }
        }
      });
    }
  }
};

}  // namespace kernelgen
