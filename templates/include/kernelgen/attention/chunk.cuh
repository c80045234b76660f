// How long a chunk of keys is where lengths are on the device: the formula of kernels/attention/schedule.py.
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

constexpr int kChunkUnit = 64;  // a chunk is a multiple of this many keys, and starts at one

__device__ inline int64_t round_to_chunk_unit(int64_t keys) { return (keys + kChunkUnit - 1) / kChunkUnit * kChunkUnit; }

// A chunk such that about `slots` items result. `tiles`: row tiles of all requests, `work`: the sum of tiles x keys.
__device__ inline int chunk_for(int64_t tiles, int64_t work, int64_t longest, int slots, int min_chunk) {
  const int64_t whole = max_of(round_to_chunk_unit(longest), int64_t{kChunkUnit});
  if (tiles >= slots) return static_cast<int>(whole);  // enough items without any split
  const int64_t share = (work + slots - 1) / slots;
  return static_cast<int>(min_of(whole, max_of(round_to_chunk_unit(share), int64_t{min_chunk})));
}

}  // namespace kernelgen
