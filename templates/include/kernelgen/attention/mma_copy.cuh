// Copies between global memory and shared tiles, by the threads of a group.
#pragma once

#include <kernelgen/attention/mma_shape.cuh>

namespace kernelgen {

// How the threads of a group spread over a tile of `Units` units of 16 bytes per row: `Across` threads side by side, so
// that a thread keeps its columns and walks down the rows.
template <class Shape, int Rows, int Units, int Across>
struct Spread {
  static constexpr int kAcross = Across;
  static constexpr int kRowStep = Shape::kGroupThreads / kAcross;
  static constexpr int kSteps = ceil_div(Rows, kRowStep);

  __device__ static int unit() { return Shape::thread_in_group() % kAcross; }
  __device__ static int row() { return Shape::thread_in_group() / kAcross; }
};

// The most threads side by side that divide the units of a row, up to the 8 that read 128 bytes.
constexpr int widest_across(int units) { return units % 8 == 0 ? 8 : units % 4 == 0 ? 4 : units % 2 == 0 ? 2 : 1; }

template <class Shape, class Tile, int Across = widest_across(Tile::kChunks)>
struct Copier : Spread<Shape, Tile::kRows, Tile::kChunks, Across> {
  using T = typename Shape::T;
  using S = Spread<Shape, Tile::kRows, Tile::kChunks, Across>;
  using S::kAcross;
  using S::kRowStep;
  using S::row;

  __device__ static int chunk() { return S::unit(); }

  // f(down, right) for every chunk (row() + down, chunk() + right) of this thread.
  template <class Function>
  __device__ static void each(Function f) {
#pragma unroll
    for (int down = 0; down < Tile::kRows; down += kRowStep) {
      if (Tile::kRows % kRowStep != 0 && row() >= Tile::kRows - down) break;
#pragma unroll
      for (int right = 0; right < Tile::kChunks; right += kAcross) f(down, right);
    }
  }
  __device__ static int offset(int down, int right) { return Tile::offset(row() + down, chunk() + right); }

  // Where this thread's first chunk comes from, in the tile at `source`.
  __device__ static const T* start(const T* source, int64_t row_stride) {
    return source + row() * row_stride + chunk() * 8;
  }

  // Starts copying rows [0, rows) x columns [0, columns) of the tile at `from` (see start) and moves `from` to the
  // next tile; the rest of the shared tile becomes 0.
  __device__ static void load(uint32_t shared, const T*& from, int64_t row_stride, int rows, int columns) {
    each([&](int down, int right) {
      const bool valid = down < rows - row() && (Tile::kChunks * 8 == columns || chunk() * 8 < columns - right * 8);
      copy_16_aligned<max_of(Shape::kAlignment, 2)>(shared + offset(down, right), from + down * row_stride + right * 8, valid);
    });
    from += Tile::kRows * row_stride;
  }

  // The same for rows that lie anywhere: at(row_of_tile, column) is the address of 8 elements. Rows are asked for in
  // order by all threads of a warp together, since a page number may come from another lane.
  template <class At>
  __device__ static void load_rows(uint32_t shared, At at, int rows, int columns) {
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      const int down = step * kRowStep;
      const auto source = at(step, row() + down);
      if (Tile::kRows % kRowStep != 0 && row() >= Tile::kRows - down) break;
#pragma unroll
      for (int right = 0; right < Tile::kChunks; right += kAcross) {
        const int column = (chunk() + right) * 8;
        const bool valid = row() + down < rows && (Tile::kChunks * 8 == columns || column < columns);
        copy_16_aligned<max_of(Shape::kAlignment, 2)>(shared + offset(down, right), source(valid ? column : 0), valid);
      }
    }
  }

  // Replaces each 16-byte chunk w of this thread by f(w).
  template <class Function>
  __device__ static void rewrite(uint32_t shared, Function f) {
#pragma unroll 1
    for (int i = Shape::thread_in_group(); i < Tile::kRows * Tile::kChunks; i += Shape::kGroupThreads) {
      uint32_t w[4];
      const uint32_t address = shared + Tile::offset(i / Tile::kChunks, i % Tile::kChunks);
      load_chunk(w, address);
#pragma unroll
      for (int j = 0; j < 4; ++j) w[j] = f(w[j]);
      store_chunk(address, w);
    }
  }
};

// Keys or values in fp8: bytes by cp.async into a slot of a ring, whole tiles ahead, then widened into the 16-bit tile that
// ldmatrix reads. A thread widens exactly what it copied, so that a landed slot needs no barrier, and the slot is free for
// the next copy as soon as it is widened. Loading through registers instead would hold 16 of them per unit in flight.
template <class Shape, class Tile, int Across>
struct ByteCopier : Spread<Shape, Tile::kRows, Tile::kChunks / 2, Across> {
  using T = typename Shape::T;
  using F = typename Shape::KeyElement;
  using S = Spread<Shape, Tile::kRows, Tile::kChunks / 2, Across>;
  static constexpr int kUnits = Tile::kChunks / 2;  // 16 bytes, 16 elements
  using S::kAcross;
  using S::kRowStep;
  using S::row;
  using S::unit;

  __device__ static uint32_t slot_offset(int row, int unit) { return (row * kUnits + unit) * 16; }

  // at(step, row_of_tile)(column) is the address of an element; see Copier::load_rows.
  template <class At>
  __device__ static void load_rows(uint32_t slot, At at, int rows, int columns) {
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      const int down = step * kRowStep;
      const auto source = at(step, row() + down);
      if (Tile::kRows % kRowStep != 0 && row() >= Tile::kRows - down) break;
#pragma unroll
      for (int right = 0; right < kUnits; right += kAcross) {
        const int column = (unit() + right) * 16;
        const int bytes = row() + down < rows ? min(max(columns - column, 0), 16) : 0;
        copy_bytes_aligned<Shape::kAlignment>(slot + slot_offset(row() + down, unit() + right), source(bytes ? column : 0),
                                              bytes);
      }
    }
  }

  // Widens this thread's units of a slot into the tile; whether any value is inf or NaN.
  __device__ static bool widen(uint32_t tile, uint32_t slot) {
    uint32_t found = 0;
#pragma unroll
    for (int down = 0; down < Tile::kRows; down += kRowStep) {
      if (Tile::kRows % kRowStep != 0 && row() >= Tile::kRows - down) break;
#pragma unroll
      for (int right = 0; right < kUnits; right += kAcross) {
        uint32_t bytes[4], pairs[8];
        load_chunk(bytes, slot + slot_offset(row() + down, unit() + right));
        const uint32_t special = special_bytes<F>(bytes[0]) | special_bytes<F>(bytes[1]) | special_bytes<F>(bytes[2]) |
                                 special_bytes<F>(bytes[3]);
        if (special == 0) {
#pragma unroll
          for (int i = 0; i < 4; ++i) widen_word<F, T, true>(pairs[2 * i], pairs[2 * i + 1], bytes[i]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) widen_word<F, T>(pairs[2 * i], pairs[2 * i + 1], bytes[i]);
        }
        found |= special;
        const int chunk = 2 * (unit() + right);
        store_chunk(tile + Tile::offset(row() + down, chunk), {pairs[0], pairs[1], pairs[2], pairs[3]});
        store_chunk(tile + Tile::offset(row() + down, chunk + 1), {pairs[4], pairs[5], pairs[6], pairs[7]});
      }
    }
    return found != 0;
  }
};

// Loads the query tile whose rows lie at(row_of_tile)(column), once per block; fp8 queries are widened on the way.
template <class Shape, class At>
__device__ inline void load_query_rows(uint32_t shared, At at, int rows) {
  using Tile = typename Shape::QueryTile;
  using F = typename Shape::QueryElement;
  using C = Copier<Shape, Tile>;
  C::each([&](int down, int right) {
    const int row = C::row() + down, column = (C::chunk() + right) * 8;
    const bool valid = row < rows && column < Shape::kHeadDim;
    const F* source = at(valid ? row : 0)(valid ? column : 0);
    const uint32_t target = shared + Tile::offset(row, C::chunk() + right);
    if constexpr (is_fp8_v<F>) {
      uint32_t words[2] = {0, 0}, pairs[4];
      if (valid) {
#pragma unroll
        for (int i = 0; i < 8; ++i) words[i / 4] |= static_cast<uint32_t>(source[i].bits) << (i % 4 * 8);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) widen_word<F, typename Shape::T>(pairs[2 * i], pairs[2 * i + 1], words[i]);
      store_chunk(target, pairs);
    } else {
      copy_16_aligned<max_of(Shape::kAlignment, 2)>(target, source, valid);
    }
  });
}

}  // namespace kernelgen
