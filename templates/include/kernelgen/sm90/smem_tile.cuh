// Operand tiles in shared memory as TMA writes them and WGMMA reads them: rows of 128 bytes, swizzled in groups of eight.
//
// The 16-byte chunk c of row r lies at chunk c ^ (r % 8), so that the eight rows that an instruction reads together lie in
// different banks. A group of eight rows is 1024 bytes and must be aligned to them. Two forms:
//
//   K contiguous    row = a row of the tile (M or N), 128 bytes of K; tiles of one box
//   MN contiguous   row = one k, 128 bytes of M or N; a tile of more than 64 elements is several boxes one behind the other
#pragma once

#include <kernelgen/cuda/memory.cuh>
#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

constexpr int kSwizzleRowBytes = 128;
constexpr int kSwizzleAtomBytes = 1024;  // eight rows: also the alignment of a tile

// Byte offset of 16-byte chunk `chunk` of row `row`.
__device__ inline uint32_t swizzled_chunk(int row, int chunk) {
  return static_cast<uint32_t>(row * kSwizzleRowBytes + ((chunk ^ (row & 7)) << 4));
}

// Matrix descriptor (PTX ISA, "Matrix Descriptor") of what begins `offset` bytes into a tile: address and two strides in units of 16
// bytes, 128-byte swizzle. One addition to `tile / 16`, which the descriptors of a tile share: as an expression of the address each
// took some ten instructions.
__device__ inline uint64_t smem_descriptor(uint32_t tile, uint32_t offset, uint32_t leading_bytes, uint32_t stride_bytes) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  return kSwizzle128 | static_cast<uint64_t>(stride_bytes >> 4) << 32 | (tile >> 4) + ((leading_bytes >> 4 << 16) + (offset >> 4));
}

// The first `bytes` bytes of word `word` of a chunk.
__device__ inline uint32_t leading_bytes(int word, int bytes) {
  const int here = bytes - 4 * word;
  return here >= 4 ? 0xffffffffu : here <= 0 ? 0u : (1u << (8 * here)) - 1u;
}

// Clears a 16-byte chunk but for bytes [begin, end).
__device__ inline void clear_chunk_outside(uint32_t chunk, int begin, int end) {
  uint32_t words[4] = {0, 0, 0, 0};
  if (begin < 16 && end > 0) {
    load_chunk(words, chunk);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] &= leading_bytes(i, end) & ~leading_bytes(i, begin);
  }
  store_chunk(chunk, words);
}

// A tile of `Rows` (of M or N) by `Depth` (of K) elements of T. `kMajorK`: K is contiguous, and 128 bytes deep.
template <class T, int Rows, int Depth, bool kMajorK>
struct SmemTile {
  static constexpr int kRowElements = kSwizzleRowBytes / static_cast<int>(sizeof(T));
  static constexpr int kBytes = Rows * Depth * static_cast<int>(sizeof(T));
  static constexpr int kStepElements = 32 / static_cast<int>(sizeof(T));  // the K of one product
  static constexpr int kSteps = Depth / kStepElements;
  static constexpr int kBoxes = kMajorK ? 1 : Rows / kRowElements;
  static constexpr int kBoxBytes = kBytes / kBoxes;
  static_assert(kMajorK ? Depth == kRowElements : Rows % kRowElements == 0, "a row of the tile is 128 bytes");
  static_assert(kMajorK || sizeof(T) == 2, "only 16-bit tiles may have M or N contiguous");
  static_assert(Depth % kStepElements == 0 && Rows % 8 == 0, "whole products and whole groups of rows");

  // Clears everything but elements [begin, end) of K; shared among `threads` threads. The tensor core sees it after tma_store_fence
  // and a barrier.
  __device__ static void clear_outside(uint32_t tile, int begin, int end, int thread, int threads) {
    constexpr int kChunks = kSwizzleRowBytes / 16;
    if constexpr (kMajorK) {
      const int from = begin * static_cast<int>(sizeof(T)), to = end * static_cast<int>(sizeof(T));
      for (int i = thread; i < Rows * kChunks; i += threads) {
        const int row = i / kChunks, chunk = i % kChunks * 16;
        if (chunk < from || chunk + 16 > to) clear_chunk_outside(tile + swizzled_chunk(row, i % kChunks), from - chunk, to - chunk);
      }
    } else {
      const int rows = begin + Depth - end;  // of 128 bytes in each box
      for (int i = thread; i < kBoxes * rows * kChunks; i += threads) {
        const int box = i / (rows * kChunks), row = i / kChunks % rows;
        const int k = row < begin ? row : end + row - begin;
        clear_chunk_outside(tile + box * kBoxBytes + k * kSwizzleRowBytes + i % kChunks * 16, 0, 0);
      }
    }
  }

  // The part of step `step` along K that begins at row `row` (a multiple of 8; of 64 where MN is contiguous).
  __device__ static uint64_t descriptor(uint32_t tile, int row, int step) {
    if constexpr (kMajorK) {
      return smem_descriptor(tile, row * kSwizzleRowBytes + step * 32, 16, kSwizzleAtomBytes);
    } else {
      return smem_descriptor(tile, row / kRowElements * kBoxBytes + step * kStepElements * kSwizzleRowBytes, kBoxBytes,
                             kSwizzleAtomBytes);
    }
  }
};

}  // namespace kernelgen
