// One product per group, the groups' sizes being known on the device alone: gemm_mma.cuh with another way to find work.
//
//   kRows    rows of a in groups, one behind the other; ends[g] is where group g ends
//   kMasked  group g is the first ends[g] rows of batch entry g
//   kDepth   k in groups, one behind the other, a product of their own each
//
// With groups of rows a fixed number of blocks walks over the tiles that there are, whose number nobody knows beforehand:
// block i takes tiles i, i + gridDim.x, ... of the groups' tiles one behind the other. Each warp finds the group of a tile
// for itself, 32 groups at a time; it comes back only to the groups in which it found the tile before. Rows outside of any
// group are never read or written. Ends that fall or leave the matrix are cut off.
//
// A group of k may begin inside a tile of the ring: what lies in front of it is zero-filled like what lies behind.
#pragma once

#include <kernelgen/gemm/gemm_mma.cuh>

namespace kernelgen {

template <class Options>
struct GroupedGemmMma : GemmMma<Options> {
  using Product = GemmMma<Options>;
  using Shape = MmaShape<Options>;
  static constexpr Grouping kGrouping = Options::kGrouping;

  __device__ static int end_of(const GemmMmaParams& p, int group) {
    const int limit = kGrouping == Grouping::kDepth ? p.k : p.m;
    return max(0, min(p.ends[group], limit));
  }
  __device__ static int begin_of(const GemmMmaParams& p, int group) {
    return kGrouping == Grouping::kMasked || group == 0 ? 0 : end_of(p, group - 1);
  }

  // Where a warp is in the groups.
  struct Walk {
    int group = 0;         // the first of the 32 that were looked at last
    int tiles_before = 0;  // of all groups in front of it

    // The work of tile `tile`, which never falls from call to call; false behind the last one. A collective of the warp.
    __device__ bool find(const GemmMmaParams& p, int tile, MmaWork& work) {
      const int lane = lane_id();
      for (; group < p.groups; group += kWarpSize) {
        const int mine = group + lane;
        const int begin = mine < p.groups ? begin_of(p, mine) : 0;
        const int rows = mine < p.groups ? max(0, end_of(p, mine) - begin) : 0;
        const int tiles_m = ceil_div(rows, Options::kBlockM);
        const int through = warp_inclusive_scan(tiles_m * p.tiles_n);  // tiles of the groups up to this lane's
        const int total = __shfl_sync(kFullWarp, through, kWarpSize - 1);
        if (tile - tiles_before < total) {
          const int source = __ffs(__ballot_sync(kFullWarp, through > tile - tiles_before)) - 1;
          const int found = __shfl_sync(kFullWarp, tiles_m, source), first = __shfl_sync(kFullWarp, begin, source);
          const int in_group = tile - tiles_before - (__shfl_sync(kFullWarp, through, source) - found * p.tiles_n);
          work.batch = group + source;
          work.row = first;
          work.row_end = first + __shfl_sync(kFullWarp, rows, source);
          work.k_begin = 0;
          work.k_end = p.k;
          Product::place_tile(work, in_group, found, p.tiles_n);
          return true;
        }
        tiles_before += total;
      }
      return false;
    }
  };

  __device__ static void run_rows(const GemmMmaParams& p, unsigned char* shared_memory) {
    Walk walk;
    MmaWork work;
    for (int tile = blockIdx.x; walk.find(p, tile, work); tile += gridDim.x) {
      Product::compute(p, work, shared_memory);
      __syncthreads();  // every warp has read its slab of sums before the next tile's copies overwrite it
    }
  }

  __device__ static void run_depth(const GemmMmaParams& p, unsigned char* shared_memory) {
    MmaWork work = Product::work_of(p);
    work.k_begin = begin_of(p, static_cast<int>(work.batch));
    work.k_end = max(work.k_begin, end_of(p, static_cast<int>(work.batch)));
    Product::compute(p, work, shared_memory);
  }

  __device__ static void run(const GemmMmaParams& p) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    if constexpr (kGrouping == Grouping::kDepth) {
      run_depth(p, shared_memory);
    } else {
      run_rows(p, shared_memory);
    }
  }
};

}  // namespace kernelgen
