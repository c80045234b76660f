// Keys of attention/prefill_sm90 that are split over blocks: each block has the key tiles of one part of a row tile's, all parts as many tiles or
// less. It writes its own softmax in float32 and its LSE, -inf where a row sees nothing of the part; the second stage of
// paged_merge.cuh (sm90_merge.cuh) merges them.
//
// Rows of partial results are [query of the batch][head][part], those of a ragged batch by their place in q.
#pragma once

#include <kernelgen/attention/sm90_dense.cuh>

namespace kernelgen {

// Of the key tiles that a row tile sees those of its part.
template <class Work>
__device__ inline Interval part_of_tiles(const PrefillSm90Params& p, const Work& work, Interval tiles) {
  const int each = ceil_div(max(tiles.last - tiles.first, 0), p.splits), first = min(tiles.first + work.split * each, tiles.last);
  return {first, min(first + each, tiles.last)};
}

template <class Shape, class Rows>
struct PartialSm90 {
  using Params = typename Rows::Params;
  using Work = typename Rows::Work;

  __device__ static int64_t place(const Params& p, const Work& work, int row) {
    const int64_t query = Rows::query(p, work, row) + (Shape::kRagged ? int64_t{work.q_start} : int64_t{work.request} * work.seq_q);
    return (query * p.num_q_heads + Rows::head(p, work, row)) * p.splits + work.split;
  }

  // Four lanes have 32 bytes of a row beside each other.
  __device__ static void store(const Params& p, const Work& work, const float (&output)[Shape::kOutputCount], const float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = Shape::row_in_block(work.warp, r);
      if (!Rows::row_exists(work, row)) continue;
      float* out = static_cast<float*>(p.out) + place(p, work, row) * Shape::kHeadDimV + lane_id() % 4 * 2;
#pragma unroll
      for (int n = 0; n < Shape::kHeadDimV / 8; ++n) {
        *reinterpret_cast<float2*>(out + 8 * n) = make_float2(output[4 * n + 2 * r] * factor[r], output[4 * n + 2 * r + 1] * factor[r]);
      }
    }
  }
};

}  // namespace kernelgen
