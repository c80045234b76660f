// Rows of x (of hidden values) that stay in shared memory for all works of a block of moe/small_cuda, in the order of fragments.
//
//   [piece of k][row][lane of a quad]   16 bytes each; a piece is 16 bytes of every lane of a quad, pieces of a warp's part of K are neighbours
//
// Beside fp8 weights, rows of bf16 become fp16: to that the codes are widened by one instruction for two, to bf16 by four. Each part of a
// row is multiplied by a power of two such that its largest finite value is in [2^14, 2^15), and the sums by its inverse. All bits of a
// value stay down to 2^-29 of the largest; below, what is less than 2^-39 of it is rounded away, far under the roundings of float32 sums.
// Beside mxfp4 a lane of a quad has 8 neighbouring elements of each 32, in the order 0 4 1 5 2 6 3 7 of SmallWeights::widen_four_bit.
#pragma once

#include <kernelgen/cuda/conversions.cuh>
#include <kernelgen/cuda/memory.cuh>
#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/moe/small_routing.cuh>

namespace kernelgen {

constexpr int kFourBitPower = 14;  // codes of mxfp4 are multiplied as 2^-14 of what they mean

// T: of rows in global memory; Operand: of those that are multiplied; kPerChunk: elements of a lane's 16 bytes of weights; kSplit: parts of K.
template <class T, class Operand, int kPerChunk, int kSplit>
struct SmallRows {
  static constexpr int kChunksOfX = kPerChunk / 8, kHalves = 2, kStepDepth = kHalves * 4 * kPerChunk;
  static constexpr int kPerStep = kHalves * kChunksOfX;  // pieces
  static constexpr bool kFourBit = kPerChunk == 32;
  static constexpr bool kConverted = !is_same_v<T, Operand>;

  uint32_t pieces;  // of the first part of K; behind them all are the factors of sums, [row][part]
  int rows, steps;
  int first_step;   // of a row, this warp's
  int depth;        // elements of a row

  __device__ uint32_t address(int part, int piece, int row, int place) const {
    return pieces + (((part * steps * kPerStep + piece) * rows + row) * 4 + place) * 16;
  }
  __device__ int piece_bytes() const { return rows * 64; }
  __device__ int bytes() const { return round_up(kSplit * rows * (steps * kPerStep * 64 + 4), 16); }
  __device__ uint32_t factor_at(int row, int part) const { return address(kSplit, 0, 0, 0) + (row * kSplit + part) * 4; }

  // One warp's part of rows first, first + stride, ... below `end`, from step `from_step` on. `source(row)` is the row's first element.
  template <class Source>
  __device__ void bring(const Source& source, int part, int from_step, int first, int stride, int end) const {
    constexpr int kAtOnce = kFourBit ? 16 : 4;  // on their way: nothing else is done meanwhile, pass by pass
    const int quads = steps * kPerStep * 4, total = ceil_div(max(end - first, 0), stride) * quads;
#pragma unroll 1
    for (int from = lane_id(); from < total; from += kAtOnce * kWarpSize) {
      uint4 words[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int at = from + n * kWarpSize, mine = at / quads;
        const int k = element(from_step, at - mine * quads);
        words[n] = make_uint4(0, 0, 0, 0);
        if (at < total && k < depth) words[n] = load_routing(reinterpret_cast<const uint4*>(source(first + mine * stride) + k));
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int at = from + n * kWarpSize, mine = at / quads, quad = at - mine * quads;
        const uint32_t chunk[4] = {words[n].x, words[n].y, words[n].z, words[n].w};
        if (at < total) store_chunk(address(part, quad / 4, first + mine * stride, quad % 4), chunk);
      }
    }
    if constexpr (kConverted) {
      __syncwarp();  // rows are there
#pragma unroll 1
      for (int row = first; row < end; row += stride) convert(part, row);
    }
  }

 private:
  // Of a quad's lane `quad` % 4 in piece `quad` / 4.
  __device__ int element(int from_step, int quad) const {
    const int piece = quad / 4, place = quad % 4, chunk = piece % kChunksOfX, half = piece / kChunksOfX % kHalves;
    const int first = (first_step + (from_step + piece / kPerStep) * (kFourBit ? 1 : kSplit)) * kStepDepth + half * 4 * kPerChunk;
    return first + (kFourBit ? chunk * 32 + place * 8 : place * kPerChunk + chunk * 8);
  }

  __device__ static uint32_t finite_size(uint32_t bits) { return (bits & kExponentBits<T>) == kExponentBits<T> ? 0 : bits; }

  struct Chunk {
    uint32_t words[4];
  };
  __device__ static Chunk converted(const uint32_t (&words)[4], float factor) {
    Chunk y;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_pair<T>(words[i]);
      y.words[i] = pack_pair<Operand>(pair.x * factor, pair.y * factor);
    }
    if constexpr (kFourBit) {
      const uint32_t low[2] = {y.words[0], y.words[1]}, high[2] = {y.words[2], y.words[3]};
#pragma unroll
      for (int i = 0; i < 4; ++i) y.words[i] = __byte_perm(low[i / 2], high[i / 2], i % 2 == 0 ? 0x5410 : 0x7632);
    }
    return y;
  }

  __device__ void convert(int part, int row) const {
    static_assert(!kConverted || (is_same_v<T, bf16> && is_same_v<Operand, fp16>), "bf16 becomes fp16");
    const int quads = steps * kPerStep * 4, lane = lane_id();
    uint32_t largest = 0;
    for (int quad = lane; quad < quads; quad += kWarpSize) {
      uint32_t words[4];
      load_chunk(words, address(part, quad / 4, row, quad % 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) largest = max(largest, max(finite_size(words[i] & 0x7fff), finite_size(words[i] >> 16 & 0x7fff)));
    }
    // Bits of bf16 are ordered as their values are. 2^power puts the largest one's exponent to 14.
    const int exponent = static_cast<int>(__reduce_max_sync(kFullWarp, largest)) >> 7, power = min(141 - exponent, 126);
    const float factor = __int_as_float((127 + power) << 23);
    constexpr int kBatch = 4;
#pragma unroll 1
    for (int first = lane; first < quads; first += kBatch * kWarpSize) {
      uint32_t words[kBatch][4];
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        const int quad = min(first + n * kWarpSize, quads - 1);
        load_chunk(words[n], address(part, quad / 4, row, quad % 4));
      }
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        const int quad = first + n * kWarpSize;
        if (quad < quads) store_chunk(address(part, quad / 4, row, quad % 4), converted(words[n], factor).words);
      }
    }
    if (lane == 0) store_word(factor_at(row, part), static_cast<uint32_t>(127 - power + (kFourBit ? kFourBitPower : 0)) << 23);
  }
};

}  // namespace kernelgen
