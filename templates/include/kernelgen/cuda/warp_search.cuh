// Search in a sorted array in global memory by a whole warp: 32 probes at a time, so that 70,000 entries take four rounds of
// memory latency instead of a binary search's seventeen.
#pragma once

#include <kernelgen/cuda/types.cuh>
#include <kernelgen/cuda/warp.cuh>

namespace kernelgen {

// How many of values[0 .. count) are <= key; `values` never falls. A collective of the warp.
__device__ inline int warp_count_up_to(const int32_t* values, int count, int key) {
  int first = 0;  // values[.. first) are <= key, values[first + count ..) are not
  while (count > 0) {
    const int step = (count + kWarpSize - 1) / kWarpSize;
    const int probe = lane_id() * step;  // the last entry of a lane's run would do as well; the first needs no clamp
    const bool below = probe < count && values[first + probe] <= key;
    const int runs = __popc(__ballot_sync(kFullWarp, below));
    if (runs == 0) break;
    // The run of the last lane that is below may still contain the boundary behind its first entry.
    const int skipped = (runs - 1) * step + 1;
    const int left = min(step - 1, count - skipped);
    first += skipped;
    count = left;
  }
  return first;
}

}  // namespace kernelgen
