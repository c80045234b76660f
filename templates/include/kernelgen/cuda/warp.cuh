// Reductions and scans over the lanes of a warp, and over the four lanes that share the rows of an mma accumulator.
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

constexpr uint32_t kFullWarp = 0xffffffffu;

__device__ inline int lane_id() { return threadIdx.x % kWarpSize; }

// Warp index within a one-dimensional block, in a register that the compiler knows to be the same for all lanes. A
// collective: call it once, where the warp is converged, and keep the result.
__device__ inline int warp_id() { return __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kWarpSize, 0); }

// Over the quad: lanes 4i .. 4i + 3.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, step));
  return x;
}

__device__ inline int warp_max(int x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = max(x, __shfl_xor_sync(kFullWarp, x, step));
  return x;
}

template <class T>
__device__ inline T warp_sum(T x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  return x;
}

// Inclusive prefix sum over the lanes.
__device__ inline int warp_inclusive_scan(int x) {
  const int lane = lane_id();
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int below = __shfl_up_sync(kFullWarp, x, step);
    if (lane >= step) x += below;
  }
  return x;
}

}  // namespace kernelgen
