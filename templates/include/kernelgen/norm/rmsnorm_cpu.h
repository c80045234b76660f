// out = v / sqrt(mean(v^2) + eps) * weight per row, with v = x, or v = x + residual written back to residual.
//
// A task owns task_rows rows. Each row is walked twice: once to sum the squares of v, once to write. The second walk
// reads x (and residual) again, which are in cache, before it writes the same elements, so out may be x. v is normalised
// as summed in the accumulator's type; what residual receives is that sum rounded.
#pragma once

#include <cmath>

#include "kernelgen/cpu/vec.h"

namespace kernelgen {

struct RmsNormCpuParams {
  const void* x;
  const void* weight;
  void* out;
  void* residual;  // not looked at by a kernel without residual
  int64_t rows, width;
  int64_t x_stride, out_stride, residual_stride;  // of a row, in elements
  int64_t task_rows;
  double eps;
};

template <class T, class W, bool Residual>
struct RmsNormCpu {
  using Sum = Accumulator<T>;
  using V = Simd<Sum>;
  using Reg = typename V::Reg;

  const T* x;
  const W* weight;
  T* out;
  T* residual;

  KERNELGEN_INLINE Reg value(int64_t c) const {
    Reg v = V::load(x + c);
    if constexpr (Residual) v = v + V::load(residual + c);
    return v;
  }
  KERNELGEN_INLINE Reg value_first(int64_t c, int64_t n) const {
    Reg v = V::load_first(x + c, n);
    if constexpr (Residual) v = v + V::load_first(residual + c, n);
    return v;
  }

  KERNELGEN_INLINE void run(int64_t width, double eps) const {
    constexpr int kLanes = V::kLanes, kChains = 4;  // independent sums, so that an addition need not wait for the last
    Reg sums[kChains] = {V::zero(), V::zero(), V::zero(), V::zero()};
    int64_t c = 0;
    for (; c + kChains * kLanes <= width; c += kChains * kLanes) {
#pragma GCC unroll 4
      for (int i = 0; i < kChains; ++i) {
        const Reg v = value(c + i * kLanes);
        sums[i] = V::fma(v, v, sums[i]);
      }
    }
    for (; c < width; c += kLanes) {
      const Reg v = value_first(c, width - c);
      sums[0] = V::fma(v, v, sums[0]);
    }
    const Sum mean = V::sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<Sum>(width);
    const Reg scale = V::broadcast(Sum(1) / std::sqrt(mean + static_cast<Sum>(eps)));

    for (c = 0; c + kLanes <= width; c += kLanes) {
      const Reg v = value(c);
      if constexpr (Residual) V::store(residual + c, v);
      V::store(out + c, v * scale * V::load(weight + c));
    }
    if (c < width) {
      const Reg v = value_first(c, width - c);
      if constexpr (Residual) V::store_first(residual + c, v, width - c);
      V::store_first(out + c, v * scale * V::load_first(weight + c, width - c), width - c);
    }
  }
};

template <class T, class W, bool Residual>
void rmsnorm_cpu(const RmsNormCpuParams& p, int64_t task) {
  const int64_t first = task * p.task_rows, end = first + p.task_rows < p.rows ? first + p.task_rows : p.rows;
  for (int64_t row = first; row < end; ++row) {
    const RmsNormCpu<T, W, Residual> norm{
        static_cast<const T*>(p.x) + row * p.x_stride, static_cast<const W*>(p.weight),
        static_cast<T*>(p.out) + row * p.out_stride,
        Residual ? static_cast<T*>(p.residual) + row * p.residual_stride : nullptr};
    norm.run(p.width, p.eps);
  }
}

}  // namespace kernelgen
