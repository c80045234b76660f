// The same product for up to four rows of a, where packing b would cost more than multiplying it: b is read once, from
// where it lies, and the speed is that of memory.
//
// A task owns all rows of one batch entry by block_n outputs. The rows of a, converted and padded with zeros to whole
// registers, lie in scratch, and so do the task's sums: for each row the values (or gates) of its outputs, then the ups.
//
//   b contiguous along k        dot products of kColumns columns with the rows, registers along k
//   b contiguous along columns  rows of b, kDepthStep at a time, times elements of a, registers along the columns
//
// fp8 values and packed codes are widened to float as they are read. Scales that change along k are multiplied in right away:
// a's as its rows are converted, b's in dot() as it is read, in spread() when a segment of k is through.
#pragma once

#include "kernelgen/gemm/gemm_epilogue.h"
#include "kernelgen/gemm/pack.h"

namespace kernelgen {

// Pairs only where both sides are bf16 in memory: widening anything else costs less than making pairs of it.
template <class T, class TB>
struct ThinProductOf {
  using type = FmaProduct<Accumulator<T>>;
};
#if defined(__AVX512BF16__)
template <>
struct ThinProductOf<bf16, bf16> {
  using type = PairProduct;
};
#endif

// Registers along k of a column of b: Product::kDepth elements of k in each lane.
template <class Options, class Product>
struct ThinColumn {
  using V = typename Product::V;
  using Reg = typename V::Reg;
  using TB = typename Options::ElementB;
  static constexpr int kElements = V::kLanes * Product::kDepth;
  static constexpr bool kSegments = Options::kScales == Scales::kSegments;

  const TB* column;  // packed: of bytes
  Reg scale, zero;   // of the segment at hand

  // The registers at k, of which n elements are there.
  KERNELGEN_INLINE auto load(int64_t k, int64_t n) const {
    if constexpr (is_packed<TB>) {
      return (codes(k, n) - zero) * scale;
    } else if constexpr (Product::kDepth == 1) {
      const Reg x = n >= kElements ? load_as<V>(column + k) : load_first_as<V>(column + k, n);
      return kSegments ? x * scale : x;
    } else {
#if defined(__AVX512BF16__)
      if (n >= kElements) return Product::right(column + k);
      return _mm512_maskz_loadu_epi16((__mmask32)((uint64_t{1} << n) - 1), column + k);
#endif
    }
  }
  KERNELGEN_INLINE Reg codes(int64_t k, int64_t n) const {
#if defined(__AVX512F__)
    return load16_nibbles(column, k, n);
#else
    return load8_nibbles(column, k, n);
#endif
  }
};

template <class Options>
struct GemmThinCpu : GemmEpilogue<Options> {
  using Epilogue = GemmEpilogue<Options>;
  using typename Epilogue::Sum;
  using typename Epilogue::V;
  using typename Epilogue::View;
  using Epilogue::kGated, Epilogue::kSegments;
  using Reg = typename V::Reg;
  using T = typename Options::Element;
  using TB = typename Options::ElementB;
  using Product = typename ThinProductOf<T, TB>::type;
  using Element = typename Product::Element;
  using Column = ThinColumn<Options, Product>;
  static constexpr int kDepth = Product::kDepth;
  static constexpr int kWidth = Options::kTileVecs * V::kLanes;  // as the host computes it; unused here
  static constexpr int kMaxRows = 4;
  static constexpr int kDepthStep = 4;
  static constexpr int kHalves = kGated ? 2 : 1;
  static_assert(kDepth == 1 || !kSegments, "scales are multiplied to floats");

  // sums[r][j] = a[r] . (column j of b, kColumnStep apart) for Rows rows of `pitch` elements and `count` outputs, whose first
  // column of b is `first`.
  template <int Rows>
  static __attribute__((noinline)) void dot(const GemmCpuParams& p, const Element* a, int64_t pitch, int64_t batch, int64_t first,
                                            int64_t count, Sum* sums, int64_t sums_pitch) {
    constexpr int kColumns = Rows == 1 ? 8 : 4;  // streams of b at a time, and enough sums to hide an addition's latency
    const int64_t segment = kSegments ? int64_t{Options::kSegment} : p.k;
    const TB* b = static_cast<const TB*>(p.b) + batch * p.b_batch;
    for (int64_t j = 0; j < count; j += kColumns) {
      int64_t index[kColumns];
      Column column[kColumns];
#pragma GCC unroll 8
      for (int i = 0; i < kColumns; ++i) {
        index[i] = first + (j + i < count ? j + i : count - 1) * Epilogue::kColumnStep;
        column[i].column = b + index[i] * p.b_column;
      }
      Reg acc[Rows][kColumns];
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int i = 0; i < kColumns; ++i) acc[r][i] = V::zero();
      const auto add = [&](int64_t k, int64_t n) {
        decltype(Product::right(a)) left[Rows];
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) left[r] = Product::right(a + r * pitch + k);
#pragma GCC unroll 8
        for (int i = 0; i < kColumns; ++i) {
          const auto right = column[i].load(k, n);
#pragma GCC unroll 4
          for (int r = 0; r < Rows; ++r) acc[r][i] = Product::multiply_add(left[r], right, acc[r][i]);
        }
      };
      for (int64_t start = 0; start < p.k; start += segment) {
        if constexpr (kSegments) {
#pragma GCC unroll 8
          for (int i = 0; i < kColumns; ++i) {
            column[i].scale = V::broadcast(View::of_b(p, batch, start / segment, index[i]));
            column[i].zero = V::broadcast(std::is_same<TB, Int4>::value ? View::zero_of_b(p, batch, start / segment, index[i]) : 0);
          }
        }
        const int64_t end = start + segment < p.k ? start + segment : p.k;
        int64_t k = start;
        for (; k + Column::kElements <= end; k += Column::kElements) add(k, Column::kElements);
        if (k < end) add(k, end - k);
      }
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int i = 0; i < kColumns; ++i)
          if (j + i < count) sums[r * sums_pitch + j + i] = V::sum(acc[r][i]);
    }
  }

  // sums[r][j] += a[r] . b for b whose columns are neighbours, over k .. end.
  template <int Rows>
  static __attribute__((noinline)) void spread(const GemmCpuParams& p, const Element* a, int64_t pitch, int64_t batch, int64_t first,
                                               int64_t count, int64_t k, int64_t end, Sum* sums, int64_t sums_pitch) {
    const TB* b = static_cast<const TB*>(p.b) + batch * p.b_batch + first;
    for (; k < end; k += kDepthStep) {
      const int64_t deep = end - k < kDepthStep ? end - k : kDepthStep;
      Reg left[Rows][kDepthStep];
      const TB* row[kDepthStep];
#pragma GCC unroll 4
      for (int d = 0; d < kDepthStep; ++d) {
        row[d] = b + (k + (d < deep ? d : 0)) * p.b_row;  // past the end of k it is not read
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) left[r][d] = V::broadcast(d < deep ? widen(a[r * pitch + k + d]) : Sum(0));
      }
      const auto add = [&](int64_t j, auto load, auto store) {
        Reg right[kDepthStep];
#pragma GCC unroll 4
        for (int d = 0; d < kDepthStep; ++d) right[d] = d < deep ? load(row[d] + j) : V::zero();
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
          Reg sum = V::load(sums + r * sums_pitch + j);  // rows of sums are whole registers
#pragma GCC unroll 4
          for (int d = 0; d < kDepthStep; ++d) sum = V::fma(left[r][d], right[d], sum);
          store(sums + r * sums_pitch + j, sum);
        }
      };
      int64_t j = 0;
      for (; j + V::kLanes <= count; j += V::kLanes) {
        add(j, [](const TB* x) { return load_as<V>(x); }, [](Sum* x, Reg value) { V::store(x, value); });
      }
      if (const int64_t n = count - j; n > 0) {
        add(j, [n](const TB* x) { return load_first_as<V>(x, n); }, [n](Sum* x, Reg value) { V::store_first(x, value, n); });
      }
    }
  }

  // spread() over all of k, segment by segment where these are scaled: then `part` holds the sums of one.
  template <int Rows>
  static void spread_all(const GemmCpuParams& p, const Element* a, int64_t pitch, const GemmTask& t, int64_t first, Sum* sums,
                         int64_t sums_pitch, Sum* part) {
    for (int r = 0; r < Rows; ++r) std::memset(sums + r * sums_pitch, 0, size_t(t.columns) * sizeof(Sum));
    if constexpr (!kSegments) {
      spread<Rows>(p, a, pitch, t.batch, first, t.columns, 0, p.k, sums, sums_pitch);
    } else {
      Sum* scales = part + Rows * p.block_n;
      for (int64_t k = 0; k < p.k; k += Options::kSegment) {
        const int64_t end = k + Options::kSegment < p.k ? k + Options::kSegment : p.k;
        std::memset(part, 0, size_t(Rows * p.block_n) * sizeof(Sum));
        spread<Rows>(p, a, pitch, t.batch, first, t.columns, k, end, part, p.block_n);
        for (int64_t j = 0; j < t.columns; ++j) scales[j] = View::of_b(p, t.batch, k / Options::kSegment, first + j);
        for (int r = 0; r < Rows; ++r) {
          for (int64_t j = 0; j < t.columns; ++j) sums[r * sums_pitch + j] += part[r * p.block_n + j] * scales[j];
        }
      }
    }
  }

  // Rows of a as they are multiplied, zero behind k and where a has no row.
  static void convert_rows(const GemmCpuParams& p, const GemmTask& t, int count, int64_t pitch, Element* rows) {
    std::memset(rows, 0, size_t(count * pitch) * sizeof(Element));
    for (int64_t r = 0; r < t.rows; ++r) {
      convert_row(p, t, t.row + r, static_cast<const T*>(p.a) + t.batch * p.a_batch + (t.row + r) * p.a_row, rows + r * pitch);
    }
  }
  static void convert_row(const GemmCpuParams& p, const GemmTask& t, int64_t index, const T* a, Element* row) {
    constexpr bool kScale = kSegments && Options::kScaledA;
    if constexpr (kDepth == 1) {
      for (int64_t k = 0; k < p.k; k += V::kLanes) {  // registers: the row is as long as whole ones, and so is a segment
        if (p.a_column == 1) {
          V::store(row + k, load_first_as<V>(a + k, p.k - k));
        } else {
          for (int64_t i = k; i < k + V::kLanes && i < p.k; ++i) row[i] = widen(a[i * p.a_column]);
        }
        if constexpr (kScale) V::store(row + k, V::load(row + k) * V::broadcast(View::of_a(p, t.batch, k / Options::kSegment, index)));
      }
    } else if (p.a_column == 1) {
      std::memcpy(row, a, size_t(p.k) * sizeof(T));
    } else {
      for (int64_t k = 0; k < p.k; ++k) row[k] = a[k * p.a_column];
    }
  }

  template <int Rows>
  static void run_rows(const GemmCpuParams& p, const GemmTask& t, char* scratch) {
    const int64_t pitch = (p.k + Column::kElements - 1) / Column::kElements * Column::kElements;
    Element* rows = reinterpret_cast<Element*>(scratch);
    const size_t row_bytes = size_t(kMaxRows * pitch) * sizeof(Element);
    Sum* sums = reinterpret_cast<Sum*>(scratch + (row_bytes + 63) / 64 * 64);
    const int64_t sums_pitch = kHalves * p.block_n;
    convert_rows(p, t, Rows, pitch, rows);
    for (int half = 0; half < kHalves; ++half) {
      const int64_t first = Epilogue::first_column(p, t.column) + half * Epilogue::up_distance(p);
      Sum* start = sums + half * p.block_n;
      if (is_packed<TB> || p.b_row == 1) {
        dot<Rows>(p, rows, pitch, t.batch, first, t.columns, start, sums_pitch);
      } else if constexpr (!is_packed<TB>) {
        spread_all<Rows>(p, rows, pitch, t, first, start, sums_pitch, sums + kMaxRows * sums_pitch);
      }
    }
    finish(p, sums, sums_pitch, t);
  }

  static void finish(const GemmCpuParams& p, const Sum* sums, int64_t pitch, const GemmTask& t) {
    typename Epilogue::template Columns<2 * V::kLanes> extra;
    for (int64_t j = 0; j < t.columns; j += V::kLanes) {
      const int64_t count = t.columns - j < V::kLanes ? t.columns - j : V::kLanes;
      extra.gather(p, t.batch, t.column + j, count, V::kLanes);
      for (int64_t r = 0; r < t.rows; ++r) {
        const Reg scale = Epilogue::row_scale(p, t.batch, t.row + r);
        const Reg value = extra.finish(V::load_first(sums + r * pitch + j, count), 0, scale);
        Reg up = value;
        if constexpr (kGated) up = extra.finish(V::load_first(sums + r * pitch + p.block_n + j, count), V::kLanes, scale);
        Epilogue::store(p, value, up, t.batch, t.row + r, t.column + j, count);
      }
    }
  }

  static void run(const GemmCpuParams& p, const GemmTask& t, char* scratch) {
    if (t.rows == 1) {
      run_rows<1>(p, t, scratch);
    } else if (t.rows == 2) {
      run_rows<2>(p, t, scratch);
    } else {
      run_rows<kMaxRows>(p, t, scratch);
    }
  }
};

}  // namespace kernelgen
