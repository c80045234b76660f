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
// Packing turns fp8 values and 4-bit codes into what the tile multiplies, without their scales. Where these change along k
// (Scales::kSegments) the tile starts anew with every segment, and its sums are scaled as they are added.
//
// A gated activation makes two columns of the product one output: the panel of b then holds gate columns in the first
// half of its width and the matching up columns in the second, wherever b keeps them.
#pragma once

#include "kernelgen/gemm/gemm_epilogue.h"
#include "kernelgen/gemm/pack.h"
#include "kernelgen/gemm/pack_bytes.h"

namespace kernelgen {

template <class Options>
struct GemmCpu : GemmEpilogue<Options> {
  using Epilogue = GemmEpilogue<Options>;
  using typename Epilogue::Sum;
  using typename Epilogue::V;
  using typename Epilogue::View;
  using Epilogue::kGated, Epilogue::kSegments;
  using T = typename Options::Element;
  using TB = typename Options::ElementB;
  using Product = typename ProductOf<T>::type;
  using Element = typename Product::Element;
  using RegisterTile = Tile<Product, Options::kTileRows, Options::kTileVecs>;
  static constexpr int kDepth = Product::kDepth;
  static constexpr int kRows = RegisterTile::kRows;
  static constexpr int kWidth = RegisterTile::kWidth;
  static constexpr int kOutputs = kGated ? kWidth / 2 : kWidth;
  static constexpr int kOutputVecs = kOutputs / V::kLanes;
  static constexpr int kSegmentSteps = Options::kSegment / kDepth;
  static_assert(!kGated || Options::kTileVecs % 2 == 0, "gate and up fill whole registers");
  using Columns = typename Epilogue::template Columns<kWidth>;

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

  // The same, one segment of k after the other: scale_a has kRows and scale_b kWidth scales for each.
  static __attribute__((noinline)) void multiply_segments(const Element* a, const Element* b, int64_t steps, Sum* sums, bool first,
                                                          const Sum* scale_a, const Sum* scale_b) {
    if (steps == 0) std::memset(sums, 0, kRows * kWidth * sizeof(Sum));  // k is empty
    for (int64_t s = 0; s < steps; s += kSegmentSteps, first = false, scale_a += kRows, scale_b += kWidth) {
      const int64_t count = steps - s < kSegmentSteps ? steps - s : kSegmentSteps;
      RegisterTile tile;
      tile.clear();
      tile.multiply(a + s * kRows * kDepth, kDepth, kRows * kDepth, b + s * kWidth * kDepth, count);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < Options::kTileVecs; ++v) {
          Sum* sum = sums + r * kWidth + v * V::kLanes;
          auto value = tile.acc[r][v] * V::load(scale_b + v * V::kLanes);
          if constexpr (Options::kScaledA) value = value * V::broadcast(scale_a[r]);
          V::store(sum, first ? value : value + V::load(sum));
        }
      }
    }
  }

  static __attribute__((noinline)) void finish(const GemmCpuParams& p, const Sum* sums, const Columns& extra, int64_t batch,
                                               int64_t row, int64_t rows, int64_t column, int64_t columns) {
    for (int64_t r = 0; r < rows; ++r) {
      const auto row_scale = Epilogue::row_scale(p, batch, row + r);
      for (int v = 0; v < kOutputVecs && v * V::kLanes < columns; ++v) {
        const int at = v * V::kLanes;
        const auto value = extra.finish(V::load(sums + r * kWidth + at), at, row_scale);
        auto up = value;
        if constexpr (kGated) up = extra.finish(V::load(sums + r * kWidth + kOutputs + at), kOutputs + at, row_scale);
        Epilogue::store(p, value, up, batch, row + r, column + at, columns - at);
      }
    }
  }

  template <class X, int Width, class Zero>
  static void pack_strip(const X* strip, int64_t outer_stride, int64_t k_stride, int64_t outer, int64_t depth, Element* panel,
                         int64_t pitch, Zero zero) {
    if constexpr (sizeof(X) == 1) {
      BytePacker<X, Product>::template pack<Width>(strip, outer_stride, k_stride, outer, depth, panel, pitch, zero);
    } else {
      Packer<X, Product>::template pack<Width>(strip, outer_stride, k_stride, outer, depth, panel, pitch);
    }
  }

  static void pack_a(const GemmCpuParams& p, const T* a, int64_t rows, int64_t depth, Element* panels) {
    const int64_t panel = p.block_k * kRows;
    for (int64_t r = 0; r < rows; r += kRows, panels += panel) {
      pack_strip<T, kRows>(a + r * p.a_row, p.a_row, p.a_column, rows - r, depth, panels, kRows * kDepth,
                           [](int64_t, int64_t) { return 0.0f; });
    }
  }

  // kOutputs columns of b from its column `first` on, k .. k + depth.
  static void pack_columns(const GemmCpuParams& p, int64_t batch, int64_t first, int64_t columns, int64_t k, int64_t depth,
                           Element* panel) {
    const int64_t step = Epilogue::kColumnStep * p.b_column;
    const TB* b = static_cast<const TB*>(p.b) + batch * p.b_batch + first * p.b_column;
    pack_strip<TB, kOutputs>(b + (is_packed<TB> ? k / 2 : k * p.b_row), step, p.b_row, columns, depth, panel, kWidth * kDepth,
                             [&](int64_t i, int64_t offset) {
                               if constexpr (!std::is_same<TB, Int4>::value) return 0.0f;
                               return View::zero_of_b(p, batch, (k + offset) / Options::kSegment, first + i * Epilogue::kColumnStep);
                             });
  }

  static void pack_b(const GemmCpuParams& p, int64_t batch, int64_t column, int64_t columns, int64_t k, int64_t depth, Element* panel) {
    const int64_t first = Epilogue::first_column(p, column);
    pack_columns(p, batch, first, columns, k, depth, panel);
    if constexpr (kGated) pack_columns(p, batch, first + Epilogue::up_distance(p), columns, k, depth, panel + kOutputs * kDepth);
  }

  // Scales of the segments that k .. k + depth touches, for every panel of a: [panel][segment][kRows].
  static void gather_scales_a(const GemmCpuParams& p, const GemmTask& t, int64_t k, int64_t segments, int64_t pitch, Sum* scales) {
    for (int64_t i = 0; i < t.rows; i += kRows, scales += pitch * kRows) {
      for (int64_t s = 0; s < segments; ++s) {
        for (int64_t r = 0; r < kRows; ++r) {
          scales[s * kRows + r] = i + r < t.rows ? View::of_a(p, t.batch, k / Options::kSegment + s, t.row + i + r) : 0;
        }
      }
    }
  }
  static void gather_scales_b(const GemmCpuParams& p, int64_t batch, int64_t column, int64_t outputs, int64_t k, int64_t segments,
                              Sum* scales) {
    for (int64_t s = 0; s < segments; ++s, scales += kWidth) {
      std::memset(scales, 0, kWidth * sizeof(Sum));
      Epilogue::gather(p, column, outputs, kOutputs, scales,
                       [&](int64_t c) { return View::of_b(p, batch, k / Options::kSegment + s, c); });
    }
  }

  static void run(const GemmCpuParams& p, const GemmTask& t, char* scratch) {
    const int64_t panels_m = (t.rows + kRows - 1) / kRows;
    const T* a = static_cast<const T*>(p.a) + t.batch * p.a_batch + t.row * p.a_row;
    Element* a_panels = reinterpret_cast<Element*>(scratch);
    Element* b_panel = reinterpret_cast<Element*>(scratch + p.b_offset);
    Sum* sums = reinterpret_cast<Sum*>(scratch + p.sums_offset);
    const int64_t tile_sums = p.k > p.block_k ? kRows * kWidth : 0;  // one block of k needs no sums but the tile at hand
    const int64_t max_segments = (p.block_k + Options::kSegment - 1) / Options::kSegment;
    Sum* b_scales = reinterpret_cast<Sum*>(scratch + p.scales_offset);
    Sum* a_scales = b_scales + max_segments * kWidth;

    int64_t k = t.k;
    do {  // once for an empty k: the epilogue of zeros
      // A group of k that begins within a segment has its first piece to itself.
      const int64_t whole = kSegments && k % Options::kSegment ? Options::kSegment - k % Options::kSegment : p.block_k;
      const int64_t depth = whole < t.k_end - k ? whole : t.k_end - k;
      const int64_t steps = (depth + kDepth - 1) / kDepth, segments = (depth + Options::kSegment - 1) / Options::kSegment;
      const bool first = k == t.k, last = k + depth >= t.k_end;
      pack_a(p, a + k * p.a_column, t.rows, depth, a_panels);
      if constexpr (kSegments && Options::kScaledA) gather_scales_a(p, t, k, segments, max_segments, a_scales);
      Sum* sum = sums;
      for (int64_t j = 0; j < t.columns; j += kOutputs) {
        const int64_t outputs = t.columns - j < kOutputs ? t.columns - j : kOutputs;
        pack_b(p, t.batch, t.column + j, outputs, k, depth, b_panel);
        if constexpr (kSegments) gather_scales_b(p, t.batch, t.column + j, outputs, k, segments, b_scales);
        Columns extra;
        if (last) extra.gather(p, t.batch, t.column + j, outputs, kOutputs);
        for (int64_t i = 0; i < panels_m; ++i, sum += tile_sums) {
          const Element* a_panel = a_panels + i * p.block_k * kRows;
          if constexpr (kSegments) {
            multiply_segments(a_panel, b_panel, steps, sum, first, a_scales + i * max_segments * kRows, b_scales);
          } else {
            multiply(a_panel, b_panel, steps, sum, first);
          }
          if (last) {
            const int64_t r = i * kRows;
            finish(p, sum, extra, t.batch, t.row + r, t.rows - r < kRows ? t.rows - r : kRows, t.column + j, outputs);
          }
        }
      }
      k += depth;
    } while (k < t.k_end);
  }
};

}  // namespace kernelgen
