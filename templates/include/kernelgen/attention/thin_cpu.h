// The two products for a panel of few rows, as decoding has: lanes run along the head dimension, and keys and values are
// read where they lie, once, without a packed copy.
//
//   scores  for kKeys keys x 4 rows (one per lane of the sum register): partial sums along D, one transposition
//   output  for 4 rows x kCols registers of columns: O[row][:] += weight[key][row] * V[key][:]
//
// Scores and weights lie as in the wide path, [key][row], so that masks, biases and the softmax are the same code.
#pragma once

#include "kernelgen/attention/geometry_cpu.h"

namespace kernelgen {

template <class G>
struct ThinPanel {
  using V = typename G::V;
  using Reg = typename G::Reg;
  using Scalar = typename G::Scalar;
  using Panel = typename G::Panel;
  using KeyValue = typename G::KeyValue;
  using Rope = typename G::Rope;

  static constexpr int kLanes = G::kLanes, kWidth = G::kWidth;
  static constexpr int kRowBlock = 4;
  // The wide path costs about 2 D FMA a key whatever the rows, this one D / 8 FMA and half as many loads a row (AVX-512).
  static constexpr int kMaxRows = kLanes < 8 ? kLanes : 8;
  static constexpr int kKeys = kLanes / kRowBlock;
#if defined(__AVX512F__)
  static constexpr int kCols = 4;
#else
  static constexpr int kCols = 2;
#endif
  static constexpr int kMain = G::kHeadDim - G::kRopeDim;
  static constexpr bool kScaledMain = G::kPageScales && G::kPlainRope;  // page scales are of this part alone
  static constexpr int padded(int dim) { return (dim + kLanes - 1) / kLanes * kLanes; }
  static constexpr int kQueryStride = padded(kMain) + padded(G::kRopeDim);
  static constexpr int kOutStride = padded(G::kHeadDimV);
  static constexpr int kSumBlock = 32;  // as in the wide path
  static_assert(sizeof(Scalar) * kMaxRows * kQueryStride <= sizeof(Panel::queries) &&
                kMaxRows * kOutStride <= G::kHeadDimV * kWidth, "rows in the memory of a wide panel");

  static bool fits(int64_t rows) { return rows <= kMaxRows; }
  static KERNELGEN_INLINE Scalar* query(Panel& panel, int row) {
    return reinterpret_cast<Scalar*>(panel.queries) + row * kQueryStride;
  }
  static KERNELGEN_INLINE const Scalar* query(const Panel& panel, int row) {
    return reinterpret_cast<const Scalar*>(panel.queries) + row * kQueryStride;
  }

  // Elements [d, d + kLanes) of a row of kDim, zero past its end.
  template <int kDim, class T>
  static KERNELGEN_INLINE Reg load(const T* row, int d) {
    if (kDim % kLanes == 0 || d + kLanes <= kDim) return load_as<V>(row + d);
    return load_first_as<V>(row + d, kDim - d);
  }

  template <int kDim, class T>
  static void pack_row(const T* source, Scalar* target, Scalar factor) {
    for (int d = 0; d < kDim; d += kLanes) V::store(target + d, load<kDim>(source, d) * V::broadcast(factor));
  }

  template <int kDim, class T>
  static KERNELGEN_INLINE void add_products(const T* const (&rows)[kKeys], const Scalar* queries, Reg (&sum)[kLanes]) {
#pragma GCC unroll 1
    for (int d = 0; d < kDim; d += kLanes) {
      Reg q[kRowBlock];
#pragma GCC unroll 4
      for (int r = 0; r < kRowBlock; ++r) q[r] = V::load(queries + r * kQueryStride + d);
#pragma GCC unroll 4
      for (int j = 0; j < kKeys; ++j) {
        const Reg k = load<kDim>(rows[j], d);
#pragma GCC unroll 4
        for (int r = 0; r < kRowBlock; ++r) sum[j * kRowBlock + r] = V::fma(k, q[r], sum[j * kRowBlock + r]);
      }
    }
  }

  // Products of keys [begin, last) with every row, into scores [key][row].
  template <class Tile, class Next>
  static __attribute__((noinline)) void dots(const Panel& panel, const Tile& tile, const Next& next, Scalar* scores, int begin,
                                             int last) {
    for (int j = begin; j < last; j += kKeys) {
      next.prefetch_some(j - begin, kKeys);
      const KeyValue* main[kKeys];
      const Rope* rope[kKeys];
      for (int i = 0; i < kKeys; ++i) {
        const int key = j + i < last ? j + i : last - 1;
        main[i] = tile.key(key);
        if constexpr (G::kRopeDim > 0) rope[i] = tile.rope(key);
      }
      for (int row = 0; row < panel.rows; row += kRowBlock) {
        Reg sum[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) sum[i] = V::zero();
        add_products<kMain>(main, query(panel, row), sum);
        if constexpr (kScaledMain)
          for (int i = 0; i < kLanes; ++i) sum[i] = sum[i] * V::broadcast(tile.key_factor(j + i / kRowBlock < last ? j + i / kRowBlock : j));
        if constexpr (G::kRopeDim > 0) add_products<G::kRopeDim>(rope, query(panel, row) + padded(kMain), sum);
        V::transpose(sum);
#pragma GCC unroll 4
        for (int half = kLanes / 2; half; half /= 2)
#pragma GCC unroll 8
          for (int i = 0; i < half; ++i) sum[i] = sum[i] + sum[i + half];
        alignas(64) Scalar of_pair[kLanes];  // [key][row]
        V::store(of_pair, sum[0]);
        for (int i = 0; i < kKeys && j + i < last; ++i) {
          Scalar factor = 1;
          if constexpr (G::kPageScales && !kScaledMain) factor = tile.key_factor(j + i);
          for (int r = 0; r < kRowBlock; ++r) {
            const Scalar s = of_pair[i * kRowBlock + r];
            scores[(j + i) * kWidth + row + r] = G::kPageScales && !kScaledMain ? s * factor : s;
          }
        }
      }
    }
  }

  template <class Tile>
  static KERNELGEN_INLINE const KeyValue* value(const Tile& tile, int j) {
    if constexpr (G::kRopeDim > 0) return tile.key(j);
    else return tile.value(j);
  }

  template <class Tile>
  static bool all_finite(const Tile& tile, int begin, int last) {
    Reg sum = V::zero();  // 0 * x is 0, or NaN for a NaN or an infinity
    for (int j = begin; j < last; ++j)
      for (int d = 0; d < G::kHeadDimV; d += kLanes) sum = V::fma(load<G::kHeadDimV>(value(tile, j), d), V::zero(), sum);
    return V::sum(sum) == 0;
  }

  // Weights times the values' page scales.
  template <class Tile>
  static void scale_weights(const Tile& tile, Scalar* weights, int begin, int last) {
    for (int j = begin; j < last; ++j) {
      const Scalar factor = G::kRopeDim > 0 ? tile.key_factor(j) : tile.value_factor(j);
      for (int r = 0; r < kMaxRows; ++r) weights[j * kWidth + r] *= factor;
    }
  }

  // O[row][:] = O[row][:] * alpha[row] + weights . V over keys [begin, last).
  template <class Tile>
  static __attribute__((noinline)) void output(Panel& panel, const Tile& tile, const Scalar* weights, int begin, int last,
                                               const Scalar* alpha) {
    for (int row = 0; row < panel.rows; row += kRowBlock) {
      Scalar* out = panel.output + row * kOutStride;
      for (int r = 0; r < kRowBlock; ++r)
        for (int d = 0; d < kOutStride; d += kLanes)
          V::store(out + r * kOutStride + d, V::load(out + r * kOutStride + d) * V::broadcast(alpha[row + r]));
      for (int block = begin; block < last; block += kSumBlock) {
        const int stop = last - block < kSumBlock ? last : block + kSumBlock;
        constexpr int kStep = kCols * kLanes, kWhole = kOutStride / kStep * kStep;
        for (int d = 0; d < kWhole; d += kStep) add_values<kCols>(tile, weights + row, out, d, block, stop);
        for (int d = kWhole; d < kOutStride; d += kLanes) add_values<1>(tile, weights + row, out, d, block, stop);
      }
    }
  }

  template <int kUsedCols, class Tile>
  static KERNELGEN_INLINE void add_values(const Tile& tile, const Scalar* weights, Scalar* out, int d, int begin, int end) {
    Reg sum[kRowBlock][kUsedCols];
#pragma GCC unroll 4
    for (int r = 0; r < kRowBlock; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < kUsedCols; ++c) sum[r][c] = V::zero();
#pragma GCC unroll 1
    for (int j = begin; j < end; ++j) {
      const KeyValue* v = value(tile, j);
      Reg column[kUsedCols];
#pragma GCC unroll 4
      for (int c = 0; c < kUsedCols; ++c) column[c] = load<G::kHeadDimV>(v, d + c * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRowBlock; ++r) {
        const Reg weight = V::broadcast(weights[j * kWidth + r]);
#pragma GCC unroll 4
        for (int c = 0; c < kUsedCols; ++c) sum[r][c] = V::fma(weight, column[c], sum[r][c]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRowBlock; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < kUsedCols; ++c) {
        Scalar* o = out + r * kOutStride + d + c * kLanes;
        V::store(o, V::load(o) + sum[r][c]);
      }
  }

  // `output` where some rows must not see a NaN or inf of V: a row adds only keys that it sees.
  template <class Tile, class SightOf>
  static __attribute__((noinline)) void careful_output(Panel& panel, const Tile& tile, const SightOf& sight,
                                                       const Scalar* weights, int begin, int last, const Scalar* alpha) {
    for (int row = 0; row < panel.rows; ++row) {
      Scalar* out = panel.output + row * kOutStride;
      for (int d = 0; d < kOutStride; ++d) out[d] *= alpha[row];
    }
    for (int j = begin; j < last; ++j) {
      alignas(64) Scalar seen[kLanes];
      V::store(seen, sight.choose(j, 0, V::broadcast(1), V::zero()));
      for (int row = 0; row < panel.rows; ++row) {
        if (seen[row] == 0) continue;
        Scalar* out = panel.output + row * kOutStride;
        const Reg weight = V::broadcast(weights[j * kWidth + row]);
        for (int d = 0; d < kOutStride; d += kLanes)
          V::store(out + d, V::fma(weight, load<G::kHeadDimV>(value(tile, j), d), V::load(out + d)));
      }
    }
  }

  // Row `row` of the output, times `factor`.
  template <class Target>
  static void store_row(const Panel& panel, int row, Scalar factor, Target* out) {
    const Scalar* from = panel.output + row * kOutStride;
    for (int d = 0; d < G::kHeadDimV; d += kLanes)
      V::store_first(out + d, V::load(from + d) * V::broadcast(factor), G::kHeadDimV - d);
  }
};

}  // namespace kernelgen
