// out = sum over sides of exp(lse_i - lse) * out_i, lse = log of the sum of exp(lse_i). A task owns task_rows rows, a row
// being a (token, head). A side with LSE -inf is skipped, not weighted with 0: its values may be anything.
#pragma once

#include <cmath>
#include <limits>

#include "kernelgen/cpu/vec.h"
#include "kernelgen/attention/merge_params.h"

namespace kernelgen {

template <class T>
struct MergeRow {
  using Sum = Accumulator<T>;
  using V = Simd<Sum>;
  using Reg = typename V::Reg;

  // Side i weighs weights[i] once divided by total; 0 marks none of its own: a skipped side is not in `live`.
  Sum* weights;
  int64_t* live;
  int64_t count;
  Sum scale;

  KERNELGEN_INLINE Reg value(const T* outs, int64_t side_stride, int64_t c, int64_t n) const {
    Reg sum = V::zero();
    for (int64_t i = 0; i < count; ++i) {
      const T* x = outs + live[i] * side_stride + c;
      sum = V::fma(V::broadcast(weights[i]), n >= V::kLanes ? V::load(x) : V::load_first(x, n), sum);
    }
    return sum * V::broadcast(scale);
  }
};

template <class T>
void merge_states_cpu(const MergeParams& p, int64_t task, void* scratch) {
  using Sum = Accumulator<T>;
  using Row = MergeRow<T>;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  Row row{static_cast<Sum*>(scratch), reinterpret_cast<int64_t*>(static_cast<char*>(scratch) + 8 * p.sides), 0, Sum(0)};
  const int64_t rows = p.tokens * p.heads;
  const int64_t first = task * p.task_rows, end = first + p.task_rows < rows ? first + p.task_rows : rows;
  for (int64_t r = first; r < end; ++r) {
    const int64_t token = r / p.heads, head = r % p.heads;
    const float* lses = p.lses + token * p.lses_token_stride + head * p.lses_head_stride;
    float peak = kNone;
    row.count = 0;
    for (int64_t i = 0; i < p.sides; ++i) {
      const float lse = lses[i * p.lses_side_stride];
      if (lse == kNone) continue;
      peak = lse > peak ? lse : peak;  // a NaN reaches the sum below instead
      row.weights[row.count] = lse;
      row.live[row.count++] = i;
    }
    // With nothing but NaN left, any finite peak gives NaN.
    const Sum from = peak == kNone ? Sum(0) : Sum(peak);
    Sum total = 0;
    for (int64_t i = 0; i < row.count; ++i)  // an LSE of +inf, a sink's, takes all of the weight
      total += row.weights[i] = row.weights[i] == from ? Sum(1) : std::exp(row.weights[i] - from);
    row.scale = row.count ? Sum(1) / total : Sum(0);
    p.lse[token * p.lse_token_stride + head * p.lse_head_stride] =
        row.count ? static_cast<float>(from + std::log(total)) : kNone;

    using V = typename Row::V;
    const T* outs = static_cast<const T*>(p.outs) + token * p.outs_token_stride + head * p.outs_head_stride;
    T* out = static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
    for (int64_t c = 0; c < p.head_dim; c += V::kLanes) {
      const int64_t n = p.head_dim - c;
      const auto value = row.value(outs, p.outs_side_stride, c, n);
      if (n >= V::kLanes) V::store(out + c, value);
      else V::store_first(out + c, value, n);
    }
  }
}

}  // namespace kernelgen
