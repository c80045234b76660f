// Which tiles of the output a persistent block computes, and in which order.
//
//   struct Tiles { bool find(p, index, tile); }   true and the tile, false behind the last one
//
// All lanes of a warp call find() together, `index` going up by the blocks there are from call to call. With groups of rows the number
// of tiles is known on the device alone: they are counted over the groups one behind the other, 32 groups at a time from that of the
// tile before, and find() takes off `index` what lies in front of the group. Ends that fall or leave the matrix are cut off.
#pragma once

#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/gemm/dense_params.cuh>
#include <kernelgen/gemm/grouping.cuh>
#include <kernelgen/sm90/tile_walk.cuh>

namespace kernelgen {

struct OutputTile {
  int m, n;           // first row and output column
  int row_end;        // rows from here on are not the tile's
  int k_begin, k_end;
  int k_first;        // a multiple of 16 bytes at or before k_begin, where copies start
  int batch;          // of out and c
  int batch_a, batch_b, batch_bias;
};

// Elements of a group: of rows, or of k.
struct GroupRange {
  int begin, end;
};

template <Grouping kGrouping>
__device__ inline GroupRange group_range(const DenseSm90Params& p, int group) {
  const int limit = kGrouping == Grouping::kDepth ? p.k : p.m;
  const int begin = kGrouping == Grouping::kMasked || group == 0 ? 0 : max(0, min(p.ends[group - 1], limit));
  return {begin, max(begin, min(p.ends[group], limit))};
}

// All tiles of all batch entries; groups of k are such entries.
template <class Product, Grouping kGrouping>
struct DenseTiles {
  int rank_m, rank_n;  // of the block in its cluster
  int share;           // of K

  __device__ bool find(const DenseSm90Params& p, int index, OutputTile& tile) const {
    if (index >= p.tiles) return false;
    const TilePosition at = TileWalk<Product::kBandRows>{p.tiles_m, p.tiles_n, p.tiles}.at(index);
    tile.m = (at.m * Product::kClusterM + rank_m) * Product::kBlockM;
    tile.n = (at.n * Product::kClusterN + rank_n) * Product::kOutputs;
    tile.row_end = p.m;
    tile.batch = at.batch;
    tile.batch_bias = at.batch;
    tile.batch_a = p.batched_a ? at.batch : 0;
    tile.batch_b = p.batched_b ? at.batch : 0;
    tile.k_begin = tile.k_first = 0;
    tile.k_end = p.k;
    if constexpr (Product::kSplitK > 1) {
      const int steps = ceil_div(p.k, Product::kDepth);
      tile.k_begin = tile.k_first = steps * share / Product::kSplitK * Product::kDepth;
      tile.k_end = min(p.k, steps * (share + 1) / Product::kSplitK * Product::kDepth);
    }
    if constexpr (kGrouping == Grouping::kDepth) {
      const GroupRange range = group_range<kGrouping>(p, at.batch);
      tile.k_begin = range.begin;
      tile.k_end = range.end;
      tile.k_first = range.begin < range.end ? range.begin / Product::kAlignedElements * Product::kAlignedElements : range.end;
    }
    return true;
  }
};

template <class Product, Grouping kGrouping>
struct RowGroupTiles {
  // The group that was found last, from whose first tile `index` counts. All of it is alive beside the sums, so it is kept small.
  int group = 0, begin = 0, end = 0;

  __device__ static int tiles_of(int rows) { return ceil_div(rows, Product::kBlockM); }

  __device__ bool find_group(const DenseSm90Params& p, int& index) {
    for (int window = group; window < p.groups; window += kWarpSize) {
      const int mine = window + lane_id();
      const GroupRange range = mine < p.groups ? group_range<kGrouping>(p, mine) : GroupRange{0, 0};
      const int own = tiles_of(range.end - range.begin) * p.tiles_n;
      const int through = warp_inclusive_scan(own);
      const int total = __shfl_sync(kFullWarp, through, kWarpSize - 1);
      if (index < total) {
        const int source = __ffs(__ballot_sync(kFullWarp, through > index)) - 1;
        group = window + source;
        index -= __shfl_sync(kFullWarp, through - own, source);
        begin = kGrouping == Grouping::kMasked ? 0 : __shfl_sync(kFullWarp, range.begin, source);
        end = __shfl_sync(kFullWarp, range.end, source);
        return true;
      }
      index -= total;
    }
    return false;
  }

  // The tile's row, turned by one in each round of the grid: else equal groups of two tiles, the second of few rows, would give every other
  // block all the full ones (32 groups of 192 rows, H200: as long as for 256). Rounds are counted as if all groups had this one's tiles:
  // the same for the rows of a column, whatever it is.
  __device__ int turned(const DenseSm90Params& p, const TilePosition& at, int tiles_m, int index) const {
    const int band = at.m / Product::kBandRows * Product::kBandRows, in_band = min(Product::kBandRows, tiles_m - band);
    const uint32_t column = static_cast<uint32_t>(group) * (tiles_m * p.tiles_n) + (index - (at.m - band));
    return band + (at.m - band + column / gridDim.x) % in_band;
  }

  __device__ bool find(const DenseSm90Params& p, int& index, OutputTile& tile) {
    if (index >= tiles_of(end - begin) * p.tiles_n && !find_group(p, index)) return false;
    const int tiles_m = tiles_of(end - begin);
    const TilePosition at = TileWalk<Product::kBandRows>{tiles_m, p.tiles_n, tiles_m * p.tiles_n}.at(index);
    tile.m = begin + turned(p, at, tiles_m, index) * Product::kBlockM;
    tile.n = at.n * Product::kOutputs;
    tile.row_end = end;
    tile.batch_b = tile.batch_bias = group;
    tile.batch = tile.batch_a = kGrouping == Grouping::kMasked ? group : 0;
    tile.k_begin = tile.k_first = 0;
    tile.k_end = p.k;
    return true;
  }
};

template <class Product, Grouping kGrouping, bool kRows>
struct tiles_of_grouping {
  using type = DenseTiles<Product, kGrouping>;
};
template <class Product, Grouping kGrouping>
struct tiles_of_grouping<Product, kGrouping, true> {
  using type = RowGroupTiles<Product, kGrouping>;
};

}  // namespace kernelgen
