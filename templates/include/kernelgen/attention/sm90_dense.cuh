// Where attention/prefill_sm90 has its rows, keys and values: dense and ragged tensors.
#pragma once

#include <kernelgen/attention/mma_dense.cuh>
#include <kernelgen/attention/sm90_params.cuh>

namespace kernelgen {

template <class Shape>
struct DenseSm90 : DenseRows<Shape, PrefillSm90Params> {
  using Base = DenseRows<Shape, PrefillSm90Params>;
  using Params = PrefillSm90Params;
  using Work = typename Base::Work;
  using T = typename Shape::T;
  static constexpr bool kPaged = false;

  // Of a request of a ragged batch.
  __device__ static int num_queries(const Params& p, int request) { return p.cu_seqlens_q[request + 1] - p.cu_seqlens_q[request]; }
  __device__ static int num_keys(const Params& p, int request) { return p.cu_seqlens_k[request + 1] - p.cu_seqlens_k[request]; }
  __device__ static void find_request(const Params& p, Work& work) {
    work.q_start = p.cu_seqlens_q[work.request];
    work.k_start = p.cu_seqlens_k[work.request];
    work.seq_q = p.cu_seqlens_q[work.request + 1] - work.q_start;
    work.seq_k = p.cu_seqlens_k[work.request + 1] - work.k_start;
  }

  // Nothing has to be found out about a tile before it is loaded.
  struct Places {
    __device__ void find(const Params&, const Work&, int) {}
  };

  // The row of a key of the request.
  __device__ static const T* key_row(const Params& p, const Work& work, int key) {
    return static_cast<const T*>(p.k) + work.request * p.k_batch + Base::kv_head(p, work) * p.k_head + int64_t{work.k_start + key} * p.k_row;
  }
};

}  // namespace kernelgen
