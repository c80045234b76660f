// Copies of one tile of keys and values in the order and type that the products read: K [key][D], V [D / kRows][key][kRows].
//
// A Tile says where they come from:
//   key(j), value(j)   the row of key j of the tile
//   rope(j)            MLA: the rest of the key
//   key_factor(j), value_factor(j)   page scales
#pragma once

#include "kernelgen/attention/geometry_cpu.h"

namespace kernelgen {

// Rows at a fixed distance: dense and ragged calls.
template <class KeyValue>
struct StridedTile {
  const KeyValue *keys, *values;
  int64_t key_stride, value_stride;

  KERNELGEN_INLINE const KeyValue* key(int j) const { return keys + j * key_stride; }
  KERNELGEN_INLINE const KeyValue* value(int j) const { return values + j * value_stride; }
};

template <class Geometry>
struct Packing {
  using G = Geometry;
  using V = typename G::V;
  using Scalar = typename G::Scalar;
  using Operand = typename G::Operand;
  using KeyValue = typename G::KeyValue;
  using Product = typename G::Product;

  // source[0 .. Count) as operands; widened in whole registers and a masked rest. With page scales times `factor`.
  template <int Count, class T>
  static KERNELGEN_INLINE void widen_row(const T* source, Operand* target, [[maybe_unused]] Scalar factor = 1) {
    if constexpr (is_same<T, Operand>) {
      std::memcpy(target, source, sizeof(T) * Count);
      if constexpr (G::kPageScales)
        for (int d = 0; d < Count; ++d) target[d] *= factor;
    } else {
      const auto scaled = [&](typename V::Reg x) {
        if constexpr (G::kPageScales) return x * V::broadcast(factor);
        else return x;
      };
      constexpr int kWhole = Count / V::kLanes * V::kLanes;
      for (int d = 0; d < kWhole; d += V::kLanes) V::store(target + d, scaled(load_as<V>(source + d)));
      if constexpr (kWhole < Count)
        V::store_first(target + kWhole, scaled(load_first_as<V>(source + kWhole, Count - kWhole)), Count - kWhole);
    }
  }

  // Rows [begin, end) of the tile. What lies behind, up to a multiple of kRows, is stale and always masked.
  template <class Tile>
  static void keys(const Tile& tile, Operand* keys, int begin, int end) {
    constexpr int kMain = G::kHeadDim - G::kRopeDim;
    for (int j = begin; j < end; ++j) {
      Scalar factor = 1;
      if constexpr (G::kPageScales) factor = tile.key_factor(j);
      widen_row<kMain>(tile.key(j), keys + j * G::kHeadDim, factor);
      if constexpr (G::kRopeDim > 0)
        widen_row<G::kRopeDim>(tile.rope(j), keys + j * G::kHeadDim + kMain, G::kPlainRope ? Scalar(1) : factor);
    }
  }

  // As keys, but stale rows would meet weights of 0 in a product: up to the next multiple of kRows they are 0.
  // MLA: values are the beginnings of the packed keys.
  template <class Tile>
  static void values(const Tile& tile, const Operand* keys, Operand* values, int begin, int end) {
    if constexpr (G::kRopeDim > 0) {
      strips<Operand>([&](int j) { return keys + j * G::kHeadDim; }, [](int) { return Scalar(1); }, values, begin, end);
    } else {
      const auto factor = [&]([[maybe_unused]] int j) {
        if constexpr (G::kPageScales) return Scalar(tile.value_factor(j));
        else return Scalar(1);
      };
      strips<KeyValue>([&](int j) { return tile.value(j); }, factor, values, begin, end);
    }
  }

  // 0 * x is 0, or NaN for a NaN or an infinity.
  static bool all_finite(const Operand* values, int begin, int end) {
    const int padded = (end + G::kRows - 1) / G::kRows * G::kRows;
    typename V::Reg sum = V::zero();
    for (int strip = 0; strip < G::kHeadDimV / G::kRows; ++strip) {
      const Operand* from = values + strip * G::kValueStrip;
      for (int i = begin * G::kRows; i < padded * G::kRows; i += V::kLanes)
        sum = V::fma(V::load(from + i), V::zero(), sum);
    }
    return V::sum(sum) == 0;
  }

  static KERNELGEN_INLINE Scalar value_at(const Operand* values, int j, int d) {
    const Operand* strip = values + d / G::kRows * G::kValueStrip;
    if constexpr (G::kDepth == 2) return widen(strip[j / 2 * 2 * G::kRows + d % G::kRows * 2 + j % 2]);
    else return strip[j * G::kRows + d % G::kRows];
  }

 private:
  template <class T, class RowOf, class FactorOf>
  static KERNELGEN_INLINE void strips(RowOf row, [[maybe_unused]] FactorOf factor, Operand* values, int begin, int end) {
    static constexpr T kNothing[G::kHeadDimV] = {};
    const int padded = (end + G::kRows - 1) / G::kRows * G::kRows;
    for (int j = begin; j < padded; j += G::kDepth) {
      const T* even = j < end ? row(j) : kNothing;
      if constexpr (G::kDepth == 2) {
        const T* odd = j + 1 < end ? row(j + 1) : kNothing;
        for (int d = 0; d < G::kHeadDimV; d += 8)
          Product::interleave8(even + d, odd + d, values + d / 8 * G::kValueStrip + j * G::kRows);
      } else {
        alignas(64) Operand wide[G::kHeadDimV];
        const Operand* source = wide;
        if constexpr (is_same<T, Operand> && !G::kPageScales) source = even;
        else widen_row<G::kHeadDimV>(even, wide, j < end ? factor(j) : Scalar(1));
        for (int d = 0; d < G::kHeadDimV; d += G::kRows)
          std::memcpy(values + d / G::kRows * G::kValueStrip + j * G::kRows, source + d, sizeof(Operand) * G::kRows);
      }
    }
  }
};

}  // namespace kernelgen
