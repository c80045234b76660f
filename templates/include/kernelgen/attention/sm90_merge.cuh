// Merges the partial results of sm90_split.cuh.
#pragma once

#include <kernelgen/attention/paged_merge.cuh>
#include <kernelgen/attention/sm90_params.cuh>
#include <kernelgen/sm90/control.cuh>

namespace kernelgen {

// What the merge reads of the argument.
struct MergeSm90Params {
  const PrefillSm90Params& call;
  const float* partial_out;
  const float* partial_lse;
  void* out;
  float* lse;
  const float* sinks;
  int num_q_heads, group_size, num_kv_heads;
};

template <class Options>
struct MergeSm90Rows {
  using Params = MergeSm90Params;

  __device__ static bool find(const Params& m, int token, SplitRow& row) {
    const PrefillSm90Params& p = m.call;
    row.query = token;
    row.first_item = 0;
    row.splits = row.stride = p.splits;
    if constexpr (Options::kRagged) {
      row.request = warp_count_up_to(p.cu_seqlens_q + 1, p.batch, token);
      row.token = token;
      return row.request < p.batch && token >= p.cu_seqlens_q[row.request];  // neither before the first nor past the last
    }
    row.request = token / p.seq_q;
    row.token = token - row.request * p.seq_q;
    return true;
  }
  __device__ static int64_t output(const Params& m, const SplitRow& row, int head) {
    return row.request * m.call.out_batch + row.token * m.call.out_row + head * m.call.out_head;
  }
  __device__ static int64_t lse(const Params& m, const SplitRow& row, int head) {
    return row.request * m.call.lse_batch + row.token * m.call.lse_row + head * m.call.lse_head;
  }
};

// To the second stage all heads are a group, whose rows are tiles of their own: partial results lie in order.
template <class Options>
struct MergeSm90 {
  struct OneRow : Options {
    static constexpr int kBlockQ = 1;
  };
  using Merge = PagedMerge<OneRow, MergeSm90Rows<Options>>;
  static constexpr int kThreads = Merge::kThreads;

  __device__ static void run(const PrefillSm90Params& p) {
    wait_for_previous_kernel();  // its blocks come while the last parts are made
    start_next_kernel();
    Merge::run({p, static_cast<const float*>(p.q), static_cast<const float*>(p.k), p.out, p.lse, p.sinks, p.num_q_heads, p.num_q_heads, 1});
  }
};

}  // namespace kernelgen
