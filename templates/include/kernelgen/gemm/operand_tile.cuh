// A ring of tiles of one GEMM operand, elements of 4, 8 or 16 bits: global memory -> shared memory (cp.async).
//
// An operand is seen as `outer` (m of a, n of b) by k. A tile is kOuter x kBlockK of it and lies in shared memory as it
// does in global memory, so that one thread copies 16 bytes (a chunk: 8, 16 or 32 elements) with one instruction:
//
//   AlongK    k is contiguous: the tile is stored [outer][k]        (a in row order, b in column order)
//   !AlongK   outer is contiguous: the tile is stored [k][outer]    (a in column order, b in row order)
//
// Threads neighbouring in a block copy neighbouring chunks of a stored row. Each keeps the address of its first chunk
// and steps by whole rows (copy_share). Tiles that the range of k covers in part, and operands aligned to less than 16
// bytes, take copy_any, which checks every bound. What lies outside the operand is zero-filled: outside the range of k
// both operands are zero, and the sums of rows and columns past the others' ends are not stored.
//
// Gated activations need gate and up columns side by side. With Split, runs of kRun stored outer indices are in turn of
// the first and of the second half of b: index j of a tile that starts at output column c means column
// c + j / (2 kRun) * kRun + j % kRun of a half, so that every 2 kRun columns of the product hold kRun outputs. kRun is 8,
// which puts gate and up in separate n8 tiles, or a whole chunk where that is more.
#pragma once

#include <kernelgen/cuda/cp_async.cuh>
#include <kernelgen/cuda/ldmatrix.cuh>
#include <kernelgen/cuda/memory.cuh>
#include <kernelgen/cuda/shared_tile.cuh>

namespace kernelgen {

// FromMiddle: the range of k may begin anywhere; otherwise at 0.
template <int Outer, int BlockK, int Bits, bool AlongK, bool Split, bool FromMiddle, int Threads, int Access>
struct OperandTile {
  static constexpr int kPerChunk = 128 / Bits;  // elements
  using Tile = SharedTile<AlongK ? Outer : BlockK, (AlongK ? BlockK : Outer) / kPerChunk * 8>;
  static constexpr int kBytes = round_up(Tile::kBytes, 128);  // the exclusive or of SharedTile wants 128-byte slots
  static constexpr int kRowStep = Threads / Tile::kChunks;    // stored rows between two chunks of a thread
  static constexpr int kCopies = ceil_div(Tile::kRows, kRowStep);
  static constexpr int kRun = AlongK ? 8 : kPerChunk;
  static_assert((AlongK ? BlockK : Outer) % kPerChunk == 0, "a stored row is a whole number of chunks");
  static_assert(Threads % Tile::kChunks == 0, "the threads copy whole stored rows at a time");
  static_assert(!Split || !AlongK || kRowStep % 8 == 0, "a thread's rows alternate between gate and up in a fixed order");

  // With Split and this distance a thread's rows are in turn of the gate and of the up half.
  static constexpr bool kAlternates = Split && AlongK && kRowStep == 8;

  const char* base;        // element (0, 0) of the operand of this batch
  const char* source;      // this thread's first chunk of the tile that is copied next
  const char* next;        // its next chunk of that tile
  int target;              // where its first chunk goes, from the slot's start
  int64_t step, odd_step;  // between its chunks, in bytes; odd_step with kAlternates only
  int64_t stride;          // between stored rows, in bytes
  int first;               // first outer index of the tile; of its outputs with Split
  int limit;               // outer extent; of one half with Split
  int begin, end;          // of k
  int half_offset;         // from the gate half of b to the up half, with Split
  bool whole;              // the whole outer range exists and 16-byte accesses are legal

  // Outer index in the operand of outer index `j` of the tile. Equal to or above `outer_end(j)`: does not exist.
  __device__ int outer_index(int j) const {
    if constexpr (Split) {
      return first + j / (2 * kRun) * kRun + j % kRun + (j & kRun ? half_offset : 0);
    } else {
      return first + j;
    }
  }
  __device__ int outer_end(int j) const { return Split && (j & kRun) ? limit + half_offset : limit; }

  __device__ static int row() { return threadIdx.x / Tile::kChunks; }
  __device__ static int chunk() { return threadIdx.x % Tile::kChunks; }
  __device__ static constexpr int bytes_of(int elements) { return (elements * Bits + 7) / 8; }

  // Byte offset of an element from `base`; along the stored row that of a whole chunk's first.
  __device__ int64_t offset_of(int outer, int k) const {
    return AlongK ? outer * stride + (Bits >= 8 ? k * (Bits / 8) : k >> 1) : k * stride + outer * (Bits / 8);
  }

  // `gate` is where the gate half starts: 0, or N / 2 with the up half in front. half_offset then is negative. The first
  // tile that is copied is the one that holds k = `begin`.
  __device__ OperandTile(const void* operand, int64_t stride, int first, int limit, int begin, int end, int gate = 0, int half = 0)
      : base(static_cast<const char*>(operand) + (AlongK ? gate * stride : gate * (Bits / 8))), stride(stride), first(first),
        limit(limit), begin(begin), end(end), half_offset(half) {
    constexpr int kOutputs = Split ? Outer / 2 : Outer;
    const int k0 = FromMiddle ? begin / BlockK * BlockK : 0;
    whole = Access == 16 && first + kOutputs <= limit;
    source = base + (AlongK ? offset_of(outer_index(row()), k0 + chunk() * kPerChunk)
                            : offset_of(outer_index(chunk() * kPerChunk), k0 + row()));
    next = source;
    target = Tile::offset(row(), chunk());
    step = (kAlternates ? half : Split && AlongK ? kRowStep / 2 : kRowStep) * stride;
    odd_step = (8 - half) * stride;
  }

  // Copies the chunks [part * kCopies / parts, (part + 1) * kCopies / parts) of a tile that lies inside the operand along
  // k; Whole: along outer too. The shares of a tile are copied in order, all of them before advance(): `next` walks along.
  template <bool Whole>
  __device__ void copy_share(uint32_t slot, int part, int parts) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (i < part * kCopies / parts || i >= (part + 1) * kCopies / parts) continue;
      if (Tile::kRows % kRowStep == 0 || row() + i * kRowStep < Tile::kRows) {
        // Rows that are a multiple of 8 apart are swizzled alike.
        const uint32_t to =
            slot + (kRowStep % 8 == 0 ? target + i * kRowStep * Tile::kRowBytes : Tile::offset(row() + i * kRowStep, chunk()));
        if constexpr (Whole) {
          cp_async_16(to, next);
        } else if constexpr (AlongK) {
          copy_prefix<16>(to, next, first_output() + output_step(i) < limit - first ? 16 : 0);
        } else {
          const int outer = chunk() * kPerChunk, left = outer_end(outer) - outer_index(outer);
          copy_prefix<16>(to, next, bytes_of(max_of(0, min_of(left, kPerChunk))));
        }
      }
      next += kAlternates && i % 2 ? odd_step : step;
    }
  }

  // Along k: the output, counted from the tile's first, of a thread's first row, and from there to its i-th row.
  __device__ static int first_output() { return Split ? row() / 16 * 8 + row() % 8 : row(); }
  __device__ static constexpr int output_step(int i) {
    return kAlternates ? i / 2 * 8 : Split ? i * kRowStep / 2 : i * kRowStep;
  }

  // Copies the whole tile at depth k0 with every bound checked.
  __device__ void copy_any(uint32_t slot, int k0) const {
#pragma unroll 1
    for (int r = row(); r < Tile::kRows; r += kRowStep) {
      const int j = AlongK ? r : chunk() * kPerChunk;
      const int k = k0 + (AlongK ? chunk() * kPerChunk : r);
      const int outer = outer_index(j), along_outer = outer_end(j) - outer;
      int count = AlongK ? (along_outer > 0 ? end - k : 0) : ((!FromMiddle || k >= begin) && k < end ? along_outer : 0);
      count = max_of(0, min_of(count, kPerChunk));
      const int skipped = AlongK && FromMiddle ? begin - k : 0;  // elements of the chunk in front of the range
      const char* from = count > 0 ? base + offset_of(outer, k) : base;
      const uint32_t to = slot + Tile::offset(r, chunk());
      if (skipped > 0) {
        copy_window(to, from, bytes_of(min_of(skipped, kPerChunk)), bytes_of(count));
      } else {
        copy_prefix<Access>(to, from, bytes_of(count));
      }
    }
  }

  // The whole tile at depth k0, wherever it lies.
  __device__ void copy(uint32_t slot, int k0) {
    if (whole && (!FromMiddle || k0 >= begin) && k0 + BlockK <= end) {
      copy_share<true>(slot, 0, 1);
    } else {
      copy_any(slot, k0);
    }
  }

  __device__ void advance() {
    source += AlongK ? int64_t{BlockK / kPerChunk * 16} : BlockK * stride;
    next = source;
  }
};

}  // namespace kernelgen
