// Which tiles of the output a persistent block computes, and in which order.
//
//   struct Tiles { bool find(p, index, tile); }   true and the tile, false behind the last one
//
// Who asks for which index: dealt_tiles_sm90.cuh. All lanes of a warp call find() together, with indices that never fall. With groups of rows the number of tiles is known on the
// device alone: they are counted over the groups one behind the other, 32 groups at a time from that of the tile before. Ends that
// fall or leave the matrix are cut off. (With the index counted from the group's first tile, taken off in find(), kernels of several
// rounds failed on an H200, though the tiles are the same: lanes of the copying warp are not together there.)
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
  // The group that was found last, its first tile, and its rows. All of it is alive beside the sums, so it is kept small.
  int group = 0, first = 0, begin = 0, rows = 0;

  __device__ static int tiles_of(int rows) { return ceil_div(rows, Product::kBlockM); }

  // `columns`: tiles along N that are counted.
  __device__ bool find_group(const DenseSm90Params& p, int index, int columns) {
    int before = first;  // tiles in front of the 32 groups
    for (int window = group; window < p.groups; window += kWarpSize) {
      const int mine = window + lane_id();
      const GroupRange range = mine < p.groups ? group_range<kGrouping>(p, mine) : GroupRange{0, 0};
      const int own = tiles_of(range.end - range.begin) * columns;
      const int through = warp_inclusive_scan(own);
      const int total = __shfl_sync(kFullWarp, through, kWarpSize - 1);
      if (index - before < total) {
        const int source = __ffs(__ballot_sync(kFullWarp, through > index - before)) - 1;
        group = window + source;
        first = before + __shfl_sync(kFullWarp, through - own, source);
        begin = __shfl_sync(kFullWarp, range.begin, source);
        rows = __shfl_sync(kFullWarp, range.end, source) - begin;
        return true;
      }
      before += total;
    }
    return false;
  }

  // The tile's row. Where each block has every so manieth tile it is turned by one in each round of the grid: else equal groups of two tiles, the second of few rows, would give every other
  // block all the full ones (32 groups of 192 rows, H200: as long as for 256).
  __device__ int turned(const TilePosition& at, int index) const {
    const int band = at.m / Product::kBandRows * Product::kBandRows, in_band = min(Product::kBandRows, tiles_of(rows) - band);
    return band + (at.m - band + (index - (at.m - band)) / static_cast<int>(gridDim.x)) % in_band;
  }

  __device__ bool find(const DenseSm90Params& p, int index, OutputTile& tile) {
    if (index >= first + tiles_of(rows) * p.tiles_n && !find_group(p, index, p.tiles_n)) return false;
    const TilePosition at = TileWalk<Product::kBandRows>{tiles_of(rows), p.tiles_n, tiles_of(rows) * p.tiles_n}.at(index - first);
    const int row = Product::kDealt ? at.m : turned(at, index);
    fill(tile, p, begin + row * Product::kBlockM, at.n * Product::kOutputs, begin + rows, group);
    return true;
  }

  __device__ static void fill(OutputTile& tile, const DenseSm90Params& p, int m, int n, int row_end, int group) {
    tile.m = m;
    tile.n = n;
    tile.row_end = row_end;
    tile.batch_b = tile.batch_bias = group;
    tile.batch = tile.batch_a = kGrouping == Grouping::kMasked ? group : 0;
    tile.k_begin = tile.k_first = 0;
    tile.k_end = p.k;
  }
};

// The same tiles, the columns of all groups before the next ones: results that are added to rows of out which groups share meet in L2.
template <class Product, Grouping kGrouping>
struct ColumnTiles : RowGroupTiles<Product, kGrouping> {
  using Base = RowGroupTiles<Product, kGrouping>;
  int along_m = -1, column = 0;  // tiles of all groups; that of N which was found last

  __device__ static int count(const DenseSm90Params& p) {
    int tiles = 0;
    for (int window = 0; window < p.groups; window += kWarpSize) {
      const int mine = window + lane_id();
      const GroupRange range = mine < p.groups ? group_range<kGrouping>(p, mine) : GroupRange{0, 0};
      tiles += Base::tiles_of(range.end - range.begin);
    }
    return warp_sum(tiles);
  }

  __device__ bool find(const DenseSm90Params& p, int index, OutputTile& tile) {
    if (along_m < 0) along_m = count(p);
    if (along_m == 0) return false;
    const int n = index / along_m, at = index - n * along_m;
    if (n >= p.tiles_n) return false;
    if (n != column) {
      column = n;
      this->group = this->first = this->begin = this->rows = 0;
    }
    if (at >= this->first + Base::tiles_of(this->rows) && !this->find_group(p, at, 1)) return false;
    Base::fill(tile, p, this->begin + (at - this->first) * Product::kBlockM, n * Product::kOutputs, this->begin + this->rows, this->group);
    return true;
  }
};

template <class Product, Grouping kGrouping, bool kRows, bool kColumns>
struct tiles_of_grouping {
  using type = DenseTiles<Product, kGrouping>;
};
template <class Product, Grouping kGrouping>
struct tiles_of_grouping<Product, kGrouping, true, false> {
  using type = RowGroupTiles<Product, kGrouping>;
};
template <class Product, Grouping kGrouping>
struct tiles_of_grouping<Product, kGrouping, true, true> {
  using type = ColumnTiles<Product, kGrouping>;
};

}  // namespace kernelgen
