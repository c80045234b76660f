// out[r][c] = silu(x[r][c]) * x[r][width + c]. A task owns task_rows rows by task_columns columns of out.
#pragma once

#include "kernelgen/activation/activations.h"

namespace kernelgen {

struct SiluAndMulCpuParams {
  const void* x;
  void* out;
  int64_t rows, width;
  int64_t x_stride, out_stride;  // of a row, in elements
  int64_t task_rows, task_columns, tasks_per_row;
};

template <class T>
void silu_and_mul_cpu(const SiluAndMulCpuParams& p, int64_t task) {
  using V = Simd<Accumulator<T>>;
  const int64_t row = task / p.tasks_per_row * p.task_rows, column = task % p.tasks_per_row * p.task_columns;
  const int64_t row_end = row + p.task_rows < p.rows ? row + p.task_rows : p.rows;
  const int64_t column_end = column + p.task_columns < p.width ? column + p.task_columns : p.width;
  for (int64_t r = row; r < row_end; ++r) {
    const T* gate = static_cast<const T*>(p.x) + r * p.x_stride;
    const T* up = gate + p.width;
    T* out = static_cast<T*>(p.out) + r * p.out_stride;
    int64_t c = column;
    for (; c + V::kLanes <= column_end; c += V::kLanes) V::store(out + c, silu<V>(V::load(gate + c)) * V::load(up + c));
    if (const int64_t n = column_end - c; n > 0) {
      V::store_first(out + c, silu<V>(V::load_first(gate + c, n)) * V::load_first(up + c, n), n);
    }
  }
}

}  // namespace kernelgen
