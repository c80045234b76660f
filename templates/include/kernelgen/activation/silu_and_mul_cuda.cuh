// out[r][c] = silu(x[r][c]) * x[r][width + c]: one pass, bound by memory.
//
// A block of kThreads covers kThreads / kLanes rows at a time; kLanes neighbouring threads walk one row, so that a
// warp reads whole 128-byte lines of the gate and of the up half. Wide rows are shared by the blocks of grid.y.
#pragma once

#include <kernelgen/activation/activations.cuh>
#include <kernelgen/cuda/vector_io.cuh>

namespace kernelgen {

struct SiluAndMulParams {
  const void* x;
  void* out;
  int64_t rows, width;
  int64_t x_stride, out_stride;  // of a row, in elements
};

// Vector: elements per access; 16 bytes when every row and half row starts at a multiple of 16 bytes, else one.
template <class T, int Threads, int Lanes, int Vector>
__device__ void silu_and_mul_cuda(const SiluAndMulParams& p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (Threads / Lanes) + threadIdx.x / Lanes;
  if (row >= p.rows) return;
  const T* gate = static_cast<const T*>(p.x) + row * p.x_stride;
  const T* up = gate + p.width;
  T* out = static_cast<T*>(p.out) + row * p.out_stride;

  const int64_t step = static_cast<int64_t>(gridDim.y) * Lanes * Vector;
  for (int64_t c = (blockIdx.y * Lanes + threadIdx.x % Lanes) * static_cast<int64_t>(Vector); c < p.width; c += step) {
    float g[Vector], u[Vector];
    load_elements(g, gate + c);
    load_elements(u, up + c);
#pragma unroll
    for (int i = 0; i < Vector; ++i) g[i] = silu(g[i]) * u[i];
    store_elements(out + c, g);
  }
}

}  // namespace kernelgen
