// A ring of tiles of one GEMM operand: global memory -> shared memory (cp.async) -> mma fragments.
//
// An operand is seen as `outer` (m of a, n of b) by k. A tile is kOuter x kBlockK of it and lies in shared memory as it
// does in global memory, so that one thread copies 16 bytes (8 elements, a chunk) with one instruction:
//
//   AlongK    k is contiguous: the tile is stored [outer][k]        (a in row order, b in column order)
//   !AlongK   outer is contiguous: the tile is stored [k][outer]    (a in column order, b in row order)
//
// Threads neighbouring in a block copy neighbouring chunks of a stored row. Each keeps the address of its first chunk
// and steps by whole rows (copy_share). The last tile of k, and operands aligned to less than 16 bytes, take copy_any,
// which checks every bound. What lies outside the operand is zero-filled: past the end of k both operands are zero, and
// the sums of rows and columns past the others' ends are not stored.
//
// Gated activations need gate and up columns side by side. With Split, stored outer index j of a tile that starts at
// output column c means column c + j / 16 * 8 + j % 8 of the first half of b where j / 8 is even, of the second half
// where it is odd: every 16 columns of the product hold 8 outputs, gate and up in separate n8 tiles.
#pragma once

#include <kernelgen/cuda/cp_async.cuh>
#include <kernelgen/cuda/ldmatrix.cuh>
#include <kernelgen/cuda/memory.cuh>
#include <kernelgen/cuda/shared_tile.cuh>

namespace kernelgen {

// Copies the first `count` (0 .. 8) 16-bit elements of a chunk that is aligned to Access bytes, and zeroes the rest.
template <int Access>
__device__ inline void copy_chunk_part(uint32_t shared, const uint16_t* source, int count) {
  if constexpr (Access == 2) {
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) words[i / 2] |= static_cast<uint32_t>(source[i]) << (i % 2 * 16);
    }
    store_chunk(shared, words);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i += Access / 2) {
      const int bytes = max_of(0, min_of(count - i, Access / 2)) * 2;
      if constexpr (Access == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(source), "r"(bytes) : "memory");
      } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared + 2 * i), "l"(source + i), "n"(Access),
                     "r"(bytes)
                     : "memory");
      }
    }
  }
}

template <int Outer, int BlockK, bool AlongK, bool Split, int Threads, int Access>
struct OperandTile {
  using Tile = SharedTile<AlongK ? Outer : BlockK, AlongK ? BlockK : Outer>;
  static constexpr int kBytes = round_up(Tile::kBytes, 128);  // the exclusive or of SharedTile wants 128-byte slots
  static constexpr int kRowStep = Threads / Tile::kChunks;    // stored rows between two chunks of a thread
  static constexpr int kCopies = ceil_div(Tile::kRows, kRowStep);
  static_assert(Threads % Tile::kChunks == 0, "the threads copy whole stored rows at a time");
  static_assert(!Split || !AlongK || kRowStep % 8 == 0, "a thread's rows alternate between gate and up in a fixed order");

  // With Split and this distance a thread's rows are in turn of the gate and of the up half.
  static constexpr bool kAlternates = Split && AlongK && kRowStep == 8;

  const uint16_t* base;    // element (0, 0) of the operand of this batch
  const uint16_t* source;  // this thread's first chunk of the tile that is copied next
  const uint16_t* next;    // its next chunk of that tile
  int target;              // where its first chunk goes, from the slot's start
  int64_t step, odd_step;  // between its chunks, in elements; odd_step with kAlternates only
  int64_t stride;          // between stored rows, in elements
  int first;               // first outer index of the tile; of its outputs with Split
  int limit;               // outer extent; of one half with Split
  int depth;               // K
  int half_offset;         // from the gate half of b to the up half, with Split
  bool whole;              // the whole outer range exists and 16-byte accesses are legal

  // Outer index in the operand of outer index `j` of the tile. Equal to or above `outer_end(j)`: does not exist.
  __device__ int outer_index(int j) const {
    if constexpr (Split) {
      return first + j / 16 * 8 + j % 8 + (j & 8 ? half_offset : 0);
    } else {
      return first + j;
    }
  }
  __device__ int outer_end(int j) const { return Split && (j & 8) ? limit + half_offset : limit; }

  __device__ static int row() { return threadIdx.x / Tile::kChunks; }
  __device__ static int chunk() { return threadIdx.x % Tile::kChunks; }

  // `gate` is where the gate half starts: 0, or N / 2 with the up half in front. half_offset then is negative.
  __device__ OperandTile(const void* operand, int64_t stride, int first, int limit, int depth, int gate = 0, int half = 0)
      : base(static_cast<const uint16_t*>(operand) + (AlongK ? gate * stride : gate)), stride(stride), first(first),
        limit(limit), depth(depth), half_offset(half) {
    constexpr int kOutputs = Split ? Outer / 2 : Outer;
    whole = Access == 16 && first + kOutputs <= limit;
    source = AlongK ? base + outer_index(row()) * stride + chunk() * 8 : base + row() * stride + outer_index(chunk() * 8);
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
          copy_chunk_part<16>(to, next, first_output() + output_step(i) < limit - first ? 8 : 0);
        } else {
          copy_chunk_part<16>(to, next, max_of(0, min_of(outer_end(chunk() * 8) - outer_index(chunk() * 8), 8)));
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
      const int j = AlongK ? r : chunk() * 8;
      const int k = k0 + (AlongK ? chunk() * 8 : r);
      const int outer = outer_index(j);
      const int along_k = depth - k, along_outer = outer_end(j) - outer;
      int count = AlongK ? (along_outer > 0 ? along_k : 0) : (along_k > 0 ? along_outer : 0);
      count = max_of(0, min_of(count, 8));
      const int64_t at = AlongK ? outer * stride + k : k * stride + outer;
      copy_chunk_part<Access>(slot + Tile::offset(r, chunk()), count > 0 ? base + at : base, count);
    }
  }

  // The whole tile at depth k0, wherever it lies.
  __device__ void copy(uint32_t slot, int k0) {
    if (whole && k0 + BlockK <= depth) {
      copy_share<true>(slot, 0, 1);
    } else {
      copy_any(slot, k0);
    }
  }

  __device__ void advance() {
    source += AlongK ? int64_t{BlockK} : BlockK * stride;
    next = source;
  }

  // Lane part of the ldmatrix address for the outer range that starts at `outer` (a multiple of a power of two that the
  // range does not exceed) and the k16 steps that start at `step`. IsA: fragment order of the a operand.
  template <bool IsA>
  __device__ static int lane_offset(int outer, int step) {
    const int lane = threadIdx.x % kWarpSize, low = lane % 8, high = lane / 16, middle = lane / 8 % 2;
    if constexpr (AlongK) {
      const int row = IsA ? lane % 16 : low + high * 8;
      return Tile::chunk_step(Tile::offset(outer + row, IsA ? high : middle), 2 * step);
    } else {
      const int row = IsA ? low + high * 8 : lane % 16;
      return Tile::chunk_step(Tile::offset(step * 16 + row, IsA ? middle : high), outer / 8);
    }
  }

  // The fragments of outer range [16 * tile, 16 * tile + 16) and k16 step `step`, both counted from lane_offset's.
  __device__ static void load_fragment(uint32_t (&r)[4], uint32_t slot, int lane_offset, int tile, int step) {
    if constexpr (AlongK) {
      ldmatrix_x4(r, slot + Tile::chunk_step(lane_offset, 2 * step) + tile * 16 * Tile::kRowBytes);
    } else {
      ldmatrix_x4_trans(r, slot + Tile::chunk_step(lane_offset, 2 * tile) + step * 16 * Tile::kRowBytes);
    }
  }
};

}  // namespace kernelgen
