// Scales of blocks along k on their way into the sums: global memory -> registers -> a ring in shared memory, as floats.
//
// A slot holds the entries of one tile: kRows of k (one per kPromoteEvery elements) for each row of a and column of b. They
// may have any type and strides, so threads load them one by one, a tile ahead of the copies they travel with: what fetch()
// loads, the next turn's store() writes. The ring has one slot more than that of the operands, because a warp reads its
// scales after the barrier behind which the others refill the operands' slot.
#pragma once

#include <kernelgen/gemm/mma_shape.cuh>

namespace kernelgen {

__device__ inline float scale_value(float x) { return x; }
__device__ inline float scale_value(bf16 x) { return to_float(x); }
__device__ inline float scale_value(fp16 x) { return to_float(x); }
// An E8M0 exponent of bias 127: 2^-127 is no normal float, 255 is NaN.
__device__ inline float scale_value(uint8_t x) {
  return __uint_as_float(x == 0 ? 0x00400000u : x == 255 ? 0x7fc00000u : static_cast<uint32_t>(x) << 23);
}

template <class Shape>
struct MmaScales {
  using ScaleB = typename Shape::ScaleB;
  static constexpr int kEvery = max_of(1, Shape::kPromoteEvery);
  static constexpr int kRows = max_of(1, Shape::kBlockK / kEvery);
  static constexpr int kEntriesA = Shape::kBlockScalesA ? kRows * Shape::kBlockM : 0;
  static constexpr int kEntriesB = Shape::kBlockScalesB ? kRows * Shape::kBlockN : 0;
  static constexpr int kEntriesZero = Shape::kZero ? kEntriesB : 0;
  static constexpr bool kAny = kEntriesA + kEntriesB > 0;
  static constexpr int kBytes = 4 * (kEntriesA + kEntriesB + kEntriesZero);
  static constexpr int kRing = (Shape::kStages + 1) * kBytes;
  static constexpr int kPerThreadA = ceil_div(kEntriesA, Shape::kThreads), kPerThreadB = ceil_div(kEntriesB, Shape::kThreads);

  const float* a;
  const ScaleB* b;
  const uint8_t* zero;

  // A thread's entries of one tile.
  struct Staged {
    float a[max_of(1, kPerThreadA)], b[max_of(1, kPerThreadB)];
    uint32_t negative_zero[max_of(1, kPerThreadB)];
  };

  __device__ MmaScales(const GemmMmaParams& p, int64_t batch)
      : a(p.scale_a + batch * p.scale_a_batch), b(static_cast<const ScaleB*>(p.scale_b) + batch * p.scale_b_batch),
        zero(p.zero_b + batch * p.zero_batch) {}

  // Entry e of a slot is of index e % extent and row e / extent of k. `gate`: where the first half of a split b starts.
  __device__ void fetch(Staged& to, const GemmMmaParams& p, const MmaWork& work, const typename Shape::TileB& tile_b, int gate,
                        int k0) const {
#pragma unroll
    for (int i = 0; i < kPerThreadA; ++i) {
      const int e = threadIdx.x + i * Shape::kThreads, row = work.row + e % Shape::kBlockM, k = k0 + e / Shape::kBlockM * kEvery;
      const bool exists = e < kEntriesA && row < work.row_end && k < work.k_end;
      to.a[i] = exists ? a[row * p.scale_a_row + k / kEvery * p.scale_a_block] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kPerThreadB; ++i) {
      const int e = threadIdx.x + i * Shape::kThreads, j = e % Shape::kBlockN, k = k0 + e / Shape::kBlockN * kEvery;
      const bool exists = e < kEntriesB && tile_b.outer_index(j) < tile_b.outer_end(j) && k < work.k_end;
      const int64_t column = tile_b.outer_index(j) + gate;
      const int block = k / Shape::kScaleDepth;
      to.b[i] = exists ? scale_value(b[column / Shape::kScaleColumns * p.scale_b_column + block * p.scale_b_block]) : 0.0f;
      if constexpr (Shape::kZero) {
        to.negative_zero[i] = negative_pair<typename Shape::Product>(exists ? zero[column * p.zero_column + block * p.zero_block] : 0);
      }
    }
  }

  __device__ static void store(uint32_t slot, const Staged& from) {
#pragma unroll
    for (int i = 0; i < kPerThreadA; ++i) {
      const int e = threadIdx.x + i * Shape::kThreads;
      if (e < kEntriesA) store_word(slot + 4 * e, __float_as_uint(from.a[i]));
    }
#pragma unroll
    for (int i = 0; i < kPerThreadB; ++i) {
      const int e = threadIdx.x + i * Shape::kThreads;
      if (e >= kEntriesB) continue;
      store_word(slot + 4 * (kEntriesA + e), __float_as_uint(from.b[i]));
      if constexpr (Shape::kZero) store_word(slot + 4 * (kEntriesA + kEntriesB + e), from.negative_zero[i]);
    }
  }

  // Of a row and a column of the tile; `entry`: which row of k.
  __device__ static float of_a(uint32_t slot, int entry, int row) {
    return __uint_as_float(load_word(slot + 4 * (entry * Shape::kBlockM + row)));
  }
  __device__ static float of_b(uint32_t slot, int entry, int column) {
    return __uint_as_float(load_word(slot + 4 * (kEntriesA + entry * Shape::kBlockN + column)));
  }
  __device__ static uint32_t zero_of_b(uint32_t slot, int entry, int column) {
    return load_word(slot + 4 * (kEntriesA + kEntriesB + entry * Shape::kBlockN + column));
  }
};

}  // namespace kernelgen
