// The order in which persistent blocks walk the tiles of a product.
//
// Tiles are dealt out in the order of their number, one per cluster and round. A band of kBandRows rows of tiles is walked
// column by column, so that the tiles in flight share few rows of a and columns of b, and L2 serves most of their loads.
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

struct TilePosition {
  int m, n;  // in (cluster) tiles
  int batch;
};

template <int kBandRows>
struct TileWalk {
  int tiles_m, tiles_n, total;

  __device__ TilePosition at(int index) const {
    const int plane = tiles_m * tiles_n;
    const int batch = index / plane, tile = index - batch * plane;
    const int band = tile / (kBandRows * tiles_n);
    const int rows = min(kBandRows, tiles_m - band * kBandRows);
    const int in_band = tile - band * kBandRows * tiles_n;
    return {band * kBandRows + in_band % rows, in_band / rows, batch};
  }
};

}  // namespace kernelgen
