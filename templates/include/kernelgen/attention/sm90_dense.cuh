// Where attention/prefill_sm90 has its rows, keys and values: dense and ragged tensors.
//
// Packed heads: the query heads that share keys are rows of one tile, so that few queries fill it and keys are read once for the group. Row r
// of a consumer is query r / kPackedHeads of head r % kPackedHeads; a box of the copy engine has these heads of that many whole queries, and rows
// behind them are nobody's.
#pragma once

#include <kernelgen/attention/mma_dense.cuh>
#include <kernelgen/attention/sm90_params.cuh>
#include <kernelgen/sm90/wgmma.cuh>

namespace kernelgen {

template <class Shape, int Heads>
struct RowsSm90 : DenseRows<Shape, PrefillSm90Params> {
  using Params = PrefillSm90Params;
  using Work = typename DenseRows<Shape, Params>::Work;  // head_: the first of the group

  __device__ static int query_in_tile(int row) { return row / kMmaRows * Shape::kQueries + row % kMmaRows / Heads; }
  __device__ static int head_in_group(int row) { return row % kMmaRows % Heads; }
  __device__ static int query(const Params&, const Work& work, int row) { return work.first_query + query_in_tile(row); }
  __device__ static int last_query(const Params&, const Work& work, int end) {
    return min(work.first_query + end / kMmaRows * Shape::kQueries, work.seq_q) - 1;
  }
  __device__ static int head(const Params&, const Work& work, int row) { return work.head_ + head_in_group(row); }
  __device__ static bool row_exists(const Work& work, int row) {
    return row % kMmaRows < Shape::kQueryRows && work.first_query + query_in_tile(row) < work.seq_q;
  }
  __device__ static float* lse(const Params& p, const Work& work, int row) {
    return p.lse + (work.request * p.lse_batch + int64_t{work.q_start + query(p, work, row)} * p.lse_row + head(p, work, row) * p.lse_head);
  }
  __device__ static auto output(const Params& p, const Work& work) {
    using Out = typename Shape::OutElement;
    Out* out = static_cast<Out*>(p.out) + work.request * p.out_batch;
    return [out, &p, &work](int row) {
      return out + int64_t{work.q_start + query(p, work, row)} * p.out_row + head(p, work, row) * p.out_head;
    };
  }
};

template <class Shape>
struct RowsSm90<Shape, 1> : DenseRows<Shape, PrefillSm90Params> {};

template <class Shape>
struct DenseSm90 : RowsSm90<Shape, Shape::kPackedHeads> {
  using Base = RowsSm90<Shape, Shape::kPackedHeads>;
  using Params = PrefillSm90Params;
  struct Work : DenseRows<Shape, PrefillSm90Params>::Work {
    int split;  // of the tile's keys
  };
  using T = typename Shape::T;
  static constexpr bool kPaged = false;

  // Of a request of a ragged batch.
  __device__ static int num_queries(const Params& p, int request) { return p.cu_seqlens_q[request + 1] - p.cu_seqlens_q[request]; }
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
