// Rotary position embedding of the heads of q and k: a block per token, bound by memory.
//
// The block writes the token's cosines and sines to shared memory, then its threads walk the units of all heads, those of
// q first; neighbouring threads take neighbouring units of a row.
#pragma once

#include <kernelgen/rope/rotate.cuh>
#include <kernelgen/rope/rope_params.h>

namespace kernelgen {

template <class T, class Table, bool Cached, bool Interleaved, int Access>
__device__ void rope_cuda(const RopeParams& p) {
  extern __shared__ __align__(16) unsigned char shared[];
  using S = Sum<T>;
  S* table = reinterpret_cast<S*>(shared);
  const int64_t token = blockIdx.x, outer = token / p.inner, inner = token - outer * p.inner;
  const int64_t at = outer * p.position_outer_stride + inner * p.position_inner_stride;
  const int64_t position =
      p.wide_positions ? static_cast<const int64_t*>(p.positions)[at] : static_cast<const int32_t*>(p.positions)[at];
  fill_angles<S, Table, Cached>(table, p.angles, p.rotary_dim / 2, p.angle_rows, p.angle_stride, position);
  __syncthreads();  // every thread reads angles that others wrote; written once, so nothing to guard after

  const RotateUnits<T, Interleaved, Access> rotate{table, static_cast<int>(p.rotary_dim / 2), static_cast<int>(p.head_dim)};
  const int per_head = rotate.rotating() + (p.in_place ? 0 : rotate.passing());
  const int heads = static_cast<int>(p.q_heads), units = (heads + static_cast<int>(p.k_heads)) * per_head;
  const T* q = static_cast<const T*>(p.q) + outer * p.q_outer_stride + inner * p.q_inner_stride;
  const T* k = static_cast<const T*>(p.k) + outer * p.k_outer_stride + inner * p.k_inner_stride;
  T* q_out = static_cast<T*>(p.q_out) + outer * p.q_out_outer_stride + inner * p.q_out_inner_stride;
  T* k_out = static_cast<T*>(p.k_out) + outer * p.k_out_outer_stride + inner * p.k_out_inner_stride;
  for (int u = threadIdx.x; u < units; u += blockDim.x) {
    const int head = u / per_head, unit = u - head * per_head;
    if (head < heads) {
      rotate.run(q + head * p.q_head_stride, q_out + head * p.q_out_head_stride, unit, 1.0f);
    } else {
      rotate.run(k + (head - heads) * p.k_head_stride, k_out + (head - heads) * p.k_out_head_stride, unit, 1.0f);
    }
  }
}

}  // namespace kernelgen
