// out = sum over sides of exp(lse_i - lse) * out_i, lse = log of the sum of exp(lse_i). Lanes neighbouring threads own a
// row, a row being a (token, head); each of them reads the row's LSEs, which come from L1 after the first. A side with LSE
// -inf is skipped, not weighted with 0: its values may be anything.
#pragma once

#include <kernelgen/cache/store.cuh>
#include <kernelgen/attention/merge_params.h>

namespace kernelgen {

template <class T, int Threads, int Lanes, int Access>
__device__ void merge_states_cuda(const MergeParams& p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (Threads / Lanes) + threadIdx.x / Lanes;
  if (row >= p.tokens * p.heads) return;
  const int64_t token = row / p.heads, head = row - token * p.heads;
  const float* lses = p.lses + token * p.lses_token_stride + head * p.lses_head_stride;
  const T* outs = static_cast<const T*>(p.outs) + token * p.outs_token_stride + head * p.outs_head_stride;
  T* out = static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride;

  float peak = -infinity();
  for (int64_t i = 0; i < p.sides; ++i) peak = fmaxf(peak, lses[i * p.lses_side_stride]);  // a NaN reaches the sum instead
  if (peak == -infinity()) peak = 0.0f;
  const auto weight_of = [peak](float lse) { return lse == peak ? 1.0f : expf(lse - peak); };  // +inf, a sink's, takes all of it
  float total = 0.0f;
  for (int64_t i = 0; i < p.sides; ++i) total += weight_of(lses[i * p.lses_side_stride]);
  const float scale = total == 0.0f ? 0.0f : 1.0f / total;
  if (threadIdx.x % Lanes == 0) {
    p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = total == 0.0f ? -infinity() : peak + logf(total);
  }
  for (int64_t c = (threadIdx.x % Lanes) * Access; c < p.head_dim; c += Lanes * Access) {
    float sum[Access] = {};
    for (int64_t i = 0; i < p.sides; ++i) {
      const float lse = lses[i * p.lses_side_stride];
      if (lse == -infinity()) continue;
      const float weight = weight_of(lse);
      float x[Access];
      load_run<Access>(x, outs + i * p.outs_side_stride + c);
#pragma unroll
      for (int j = 0; j < Access; ++j) sum[j] = fmaf(weight, x[j], sum[j]);
    }
#pragma unroll
    for (int j = 0; j < Access; ++j) sum[j] *= scale;
    store_run<Access>(out + c, sum);
  }
}

}  // namespace kernelgen
