// Layout of a row-major tile of 16-bit elements in shared memory that ldmatrix and 16-byte copies read and write
// without bank conflicts.
//
// The unit is a chunk: 16 bytes, 8 elements. The eight chunks of one column in eight consecutive rows must fall into
// eight different bank groups (chunk index mod 8):
//   - rows of a multiple of 8 chunks (64, 128, ... elements): chunk c of row r lies at c ^ (r % 8), no padding;
//   - other rows: the row is padded to an odd number of chunks, no exclusive or.
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

template <int Rows, int Columns>
struct SharedTile {
  static_assert(Columns % 8 == 0, "a row is a whole number of 16-byte chunks");
  static constexpr int kRows = Rows;
  static constexpr int kChunks = Columns / 8;
  static constexpr bool kSwizzled = kChunks % 8 == 0;
  static constexpr int kRowChunks = kSwizzled ? kChunks : kChunks | 1;
  static constexpr int kRowBytes = kRowChunks * 16;
  static constexpr int kBytes = Rows * kRowBytes;

  // Byte offset of a chunk. With `chunk` split into a lane part and a compile-time part (see chunk_step) only the
  // exclusive or stays at run time.
  __device__ static constexpr int offset(int row, int chunk) {
    return row * kRowBytes + (kSwizzled ? chunk ^ (row & 7) : chunk) * 16;
  }

  // Offset of chunk `chunk + step` from `lane_offset` = offset(row, chunk), where `step` is even and `chunk` is 0 or 1
  // (the two columns of chunks that the lanes of one ldmatrix.x4 address).
  __device__ static constexpr int chunk_step(int lane_offset, int step) {
    return kSwizzled ? (lane_offset ^ ((step & 7) * 16)) + (step & ~7) * 16 : lane_offset + step * 16;
  }
};

}  // namespace kernelgen
