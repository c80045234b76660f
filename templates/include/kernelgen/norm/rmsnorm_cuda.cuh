// out = v / sqrt(mean(v^2) + eps) * weight per row, with v = x, or v = x + residual written back to residual.
//
// Lanes neighbouring threads own a row; a block covers Threads / Lanes rows. Two shapes:
//   Kept > 0   a row fits in registers: each thread keeps its Kept vectors of v in float32 between the two passes;
//   Kept = 0   any width: the second pass reads x (and residual) again, mostly from L2.
// Every element is read and written by the same thread and its write comes after all of its reads, so out may be x.
// v is normalised as summed in float32; what residual receives is that sum rounded.
#pragma once

#include <kernelgen/cuda/vector_io.cuh>
#include <kernelgen/cuda/warp.cuh>

namespace kernelgen {

struct RmsNormParams {
  const void* x;
  const void* weight;
  void* out;
  void* residual;  // not looked at by a kernel without residual
  int64_t rows, width;
  int64_t x_stride, out_stride, residual_stride;  // of a row, in elements
  float eps;
};

// Sum over the Lanes threads of a row, the same bits in each of them.
template <int Threads, int Lanes>
__device__ inline float row_sum(float x) {
  static_assert(Lanes == kWarpSize || Lanes == Threads, "a row belongs to a warp or to the block");
  x = warp_sum(x);
  if constexpr (Lanes > kWarpSize) {
    constexpr int kWarps = Lanes / kWarpSize;
    __shared__ float partial[kWarps];
    if (lane_id() == 0) partial[threadIdx.x / kWarpSize] = x;
    __syncthreads();  // every warp's partial is written before any thread adds them; used once, so nothing to guard after
    x = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) x += partial[i];
  }
  return x;
}

template <class T, class W, bool Residual, int Threads, int Lanes, int Vector, int Kept>
struct RmsNorm {
  const T* x;
  const W* weight;
  T* out;
  T* residual;

  __device__ void load(float (&v)[Vector], int64_t c) const {
    load_elements(v, x + c);
    if constexpr (Residual) {
      float r[Vector];
      load_elements(r, residual + c);
#pragma unroll
      for (int i = 0; i < Vector; ++i) v[i] += r[i];
    }
  }

  __device__ static float add_squares(float sum, const float (&v)[Vector]) {
#pragma unroll
    for (int i = 0; i < Vector; ++i) sum = fmaf(v[i], v[i], sum);
    return sum;
  }

  __device__ void finish(const float (&v)[Vector], int64_t c, float scale) const {
    if constexpr (Residual) store_elements(residual + c, v);
    float w[Vector];
    load_elements(w, weight + c);
#pragma unroll
    for (int i = 0; i < Vector; ++i) w[i] *= v[i] * scale;
    store_elements(out + c, w);
  }

  __device__ void run(int64_t width, float eps) const {
    constexpr int64_t kStep = Lanes * Vector;
    const int64_t first = (threadIdx.x % Lanes) * Vector;
    float sum = 0.0f;
    if constexpr (Kept > 0) {
      float v[Kept][Vector];
#pragma unroll
      for (int i = 0; i < Kept; ++i) {
        if (first + i * kStep < width) {
          load(v[i], first + i * kStep);
          sum = add_squares(sum, v[i]);
        }
      }
      const float scale = scale_of(sum, width, eps);
#pragma unroll
      for (int i = 0; i < Kept; ++i) {
        if (first + i * kStep < width) finish(v[i], first + i * kStep, scale);
      }
    } else {
      float v[Vector];
      for (int64_t c = first; c < width; c += kStep) {
        load(v, c);
        sum = add_squares(sum, v);
      }
      const float scale = scale_of(sum, width, eps);
      for (int64_t c = first; c < width; c += kStep) {
        load(v, c);
        finish(v, c, scale);
      }
    }
  }

  __device__ static float scale_of(float sum, int64_t width, float eps) {
    return 1.0f / sqrtf(row_sum<Threads, Lanes>(sum) / static_cast<float>(width) + eps);
  }
};

template <class T, class W, bool Residual, int Threads, int Lanes, int Vector, int Kept>
__device__ void rmsnorm_cuda(const RmsNormParams& p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (Threads / Lanes) + threadIdx.x / Lanes;
  if (row >= p.rows) return;  // a whole warp or the whole block: Lanes threads share a row
  const RmsNorm<T, W, Residual, Threads, Lanes, Vector, Kept> norm{
      static_cast<const T*>(p.x) + row * p.x_stride, static_cast<const W*>(p.weight),
      static_cast<T*>(p.out) + row * p.out_stride,
      Residual ? static_cast<T*>(p.residual) + row * p.residual_stride : nullptr};
  norm.run(p.width, p.eps);
}

}  // namespace kernelgen
