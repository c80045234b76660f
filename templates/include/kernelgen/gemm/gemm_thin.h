// The same product for up to four rows of a, where packing b would cost more than multiplying it: b is read once, from
// where it lies, and the speed is that of memory.
//
// A task owns all rows of one batch entry by block_n outputs. The rows of a, converted and padded with zeros to whole
// registers, lie in scratch, and so do the task's sums: for each row the values (or gates) of its outputs, then the ups.
//
//   b contiguous along k        dot products of kColumns columns with the rows, registers along k
//   b contiguous along columns  rows of b, kDepthStep at a time, times elements of a, registers along the columns
#pragma once

#include "kernelgen/gemm/gemm_cpu.h"

namespace kernelgen {

// A register along k of a dot product: Product::kDepth elements of k in each lane.
template <class T, class Product>
struct DotLoad {
  using V = typename Product::V;
  static constexpr int kElements = V::kLanes * Product::kDepth;
  static KERNELGEN_INLINE auto whole(const T* p) {
    if constexpr (Product::kDepth == 1) {
      return V::load(p);
    } else {
      return Product::right(p);
    }
  }
  static KERNELGEN_INLINE auto first(const T* p, int64_t n) {
    if constexpr (Product::kDepth == 1) {
      return V::load_first(p, n);
    } else {
#if defined(__AVX512BF16__)
      return _mm512_maskz_loadu_epi16((__mmask32)((uint64_t{1} << n) - 1), p);
#endif
    }
  }
};

template <class Options>
struct GemmThinCpu : GemmEpilogue<Options> {
  using Epilogue = GemmEpilogue<Options>;
  using typename Epilogue::Sum;
  using typename Epilogue::V;
  using Epilogue::kGated;
  using Reg = typename V::Reg;
  using T = typename Options::Element;
  using Product = typename ProductOf<T>::type;
  using Element = typename Product::Element;
  using Dot = DotLoad<T, Product>;
  using Pack = Packer<T, Product>;
  static constexpr int kDepth = Product::kDepth;
  static constexpr int kWidth = Options::kTileVecs * V::kLanes;  // as the host computes it; unused here
  static constexpr int kMaxRows = 4;
  static constexpr int kDepthStep = 4;

  // sums[r][j] = a[r] . (column j of b, `step` apart) for Rows rows of `pitch` elements and `count` columns.
  template <int Rows>
  static __attribute__((noinline)) void dot(const Element* a, int64_t pitch, const T* b, int64_t step, int64_t depth,
                                            int64_t count, Sum* sums, int64_t sums_pitch) {
    constexpr int kColumns = Rows == 1 ? 8 : 4;  // streams of b at a time, and enough sums to hide an addition's latency
    const int64_t whole = depth / Dot::kElements * Dot::kElements;
    for (int64_t j = 0; j < count; j += kColumns) {
      const T* column[kColumns];
#pragma GCC unroll 8
      for (int i = 0; i < kColumns; ++i) column[i] = b + (j + i < count ? j + i : count - 1) * step;
      Reg acc[Rows][kColumns];
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int i = 0; i < kColumns; ++i) acc[r][i] = V::zero();
      const auto add = [&](int64_t k, auto load) {
        decltype(Product::right(a)) left[Rows];
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) left[r] = Product::right(a + r * pitch + k);
#pragma GCC unroll 8
        for (int i = 0; i < kColumns; ++i) {
          const auto right = load(column[i] + k);
#pragma GCC unroll 4
          for (int r = 0; r < Rows; ++r) acc[r][i] = Product::multiply_add(left[r], right, acc[r][i]);
        }
      };
      for (int64_t k = 0; k < whole; k += Dot::kElements) add(k, [](const T* p) { return Dot::whole(p); });
      if (whole < depth) add(whole, [&](const T* p) { return Dot::first(p, depth - whole); });
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int i = 0; i < kColumns; ++i)
          if (j + i < count) sums[r * sums_pitch + j + i] = V::sum(acc[r][i]);
    }
  }

  // The same for b whose columns are neighbours; row k of b is `step` elements behind row k - 1.
  template <int Rows>
  static __attribute__((noinline)) void spread(const Element* a, int64_t pitch, const T* b, int64_t step, int64_t depth,
                                               int64_t count, Sum* sums, int64_t sums_pitch) {
    for (int r = 0; r < Rows; ++r) std::memset(sums + r * sums_pitch, 0, size_t(count) * sizeof(Sum));
    for (int64_t k = 0; k < depth; k += kDepthStep) {
      const int64_t deep = depth - k < kDepthStep ? depth - k : kDepthStep;
      Reg left[Rows][kDepthStep];
      const T* row[kDepthStep];
#pragma GCC unroll 4
      for (int d = 0; d < kDepthStep; ++d) {
        row[d] = b + (k + (d < deep ? d : 0)) * step;  // past the end of k it is not read
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) left[r][d] = V::broadcast(d < deep ? widen(a[r * pitch + k + d]) : Sum(0));
      }
      const auto add = [&](int64_t j, auto load, auto store) {
        Reg right[kDepthStep];
#pragma GCC unroll 4
        for (int d = 0; d < kDepthStep; ++d) right[d] = d < deep ? load(row[d] + j) : V::zero();
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
          Reg sum = load(sums + r * sums_pitch + j);
#pragma GCC unroll 4
          for (int d = 0; d < kDepthStep; ++d) sum = V::fma(left[r][d], right[d], sum);
          store(sums + r * sums_pitch + j, sum);
        }
      };
      int64_t j = 0;
      for (; j + V::kLanes <= count; j += V::kLanes) {
        add(j, [](const auto* p) { return V::load(p); }, [](Sum* p, Reg x) { V::store(p, x); });
      }
      if (const int64_t n = count - j; n > 0) {
        add(j, [n](const auto* p) { return V::load_first(p, n); }, [n](Sum* p, Reg x) { V::store_first(p, x, n); });
      }
    }
  }

  template <int Rows>
  static void run_rows(const GemmCpuParams& p, int64_t task, char* scratch) {
    const int64_t batch = task / p.tasks_n, column = task % p.tasks_n * p.block_n;
    const int64_t columns = p.block_n < p.n - column ? p.block_n : p.n - column;
    const int64_t pitch = (p.k + Dot::kElements - 1) / Dot::kElements * Dot::kElements;
    const T* a = static_cast<const T*>(p.a) + batch * p.a_batch;
    const T* b = static_cast<const T*>(p.b) + batch * p.b_batch + Epilogue::first_column(p, column) * p.b_column;
    Element* rows = reinterpret_cast<Element*>(scratch);
    Sum* sums = reinterpret_cast<Sum*>(scratch + p.sums_offset);
    for (int64_t r = 0; r < Rows; ++r) {
      for (int64_t k = 0; k < pitch; ++k) {
        rows[r * pitch + k] = r < p.m && k < p.k ? Pack::convert(a[r * p.a_row + k * p.a_column]) : Element{};
      }
    }
    const int64_t sums_pitch = (kGated ? 2 : 1) * p.block_n;
    for (int half = 0; half < (kGated ? 2 : 1); ++half) {
      const T* start = b + half * Epilogue::up_distance(p) * p.b_column;
      const int64_t step = Epilogue::kColumnStep * p.b_column;
      if (p.b_row == 1) {
        dot<Rows>(rows, pitch, start, step, p.k, columns, sums + half * p.block_n, sums_pitch);
      } else {
        spread<Rows>(rows, pitch, start, p.b_row, p.k, columns, sums + half * p.block_n, sums_pitch);
      }
    }
    finish(p, sums, sums_pitch, batch, column, columns);
  }

  static void finish(const GemmCpuParams& p, const Sum* sums, int64_t pitch, int64_t batch, int64_t column, int64_t columns) {
    alignas(64) Sum bias[2 * V::kLanes] = {};
    for (int64_t j = 0; j < columns; j += V::kLanes) {
      const int64_t count = columns - j < V::kLanes ? columns - j : V::kLanes;
      if constexpr (Options::kBias) Epilogue::gather_bias(p, column + j, count, V::kLanes, bias);
      for (int64_t r = 0; r < p.m; ++r) {
        const Sum* sum = sums + r * pitch + j;
        Reg value = V::load_first(sum, count) + V::load(bias), up = value;
        if constexpr (kGated) up = V::load_first(sum + p.block_n, count) + V::load(bias + V::kLanes);
        Epilogue::store(p, value, up, batch, r, column + j, count);
      }
    }
  }

  static void run(const GemmCpuParams& p, int64_t task, char* scratch) {
    if (p.m == 1) {
      run_rows<1>(p, task, scratch);
    } else if (p.m == 2) {
      run_rows<2>(p, task, scratch);
    } else {
      run_rows<kMaxRows>(p, task, scratch);
    }
  }
};

}  // namespace kernelgen
