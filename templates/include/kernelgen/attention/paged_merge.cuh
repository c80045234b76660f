// Second stage of attention whose keys are split: merges what the chunks of a request's keys gave, and writes output and LSE.
//
// The grid is (query rows, heads or fewer). A block takes one query row and one head after another; its warps divide the
// chunks, and add up through shared memory. Requests with one chunk were written by the first stage. Without a softmax the
// chunks' outputs are added as they are: as if each had an LSE of 0, which was never written, and without the division.
#pragma once

#include <kernelgen/attention/paged_params.cuh>
#include <kernelgen/cuda/conversions.cuh>
#include <kernelgen/cuda/math.cuh>
#include <kernelgen/cuda/warp_search.cuh>

namespace kernelgen {

// One row of the queries and where its partial results are: split s of tile t is item first_item + t * stride + s.
struct SplitRow {
  int request, query;  // of the request
  int64_t token;       // row of the output, or of its request where requests have a stride of their own
  int first_item, splits, stride;
};

// Rows of a planned call.
struct PlannedRows {
  using Params = PagedMmaParams;

  // False where there is nothing to merge. A collective of the warp.
  __device__ static bool find(const Params& p, int token, SplitRow& row) {
    row.request = warp_count_up_to(p.q_indptr + 1, p.batch, token);
    if (row.request >= p.batch) return false;
    const int chunk = *p.chunk, seq_k = p.kv_lens[row.request];
    row.splits = row.stride = max((seq_k + chunk - 1) / chunk, 1);
    row.query = token - p.q_indptr[row.request];
    row.token = token;
    row.first_item = p.item_indptr[row.request];
    return row.splits > 1;
  }
  __device__ static int64_t output(const Params& p, const SplitRow& row, int head) { return row.token * p.out_row + head * p.out_head; }
  __device__ static int64_t lse(const Params& p, const SplitRow& row, int head) { return row.token * p.lse_row + head * p.lse_head; }
};

template <class Options, class Rows = PlannedRows>
struct PagedMerge {
  using Params = typename Rows::Params;
  using Out = typename Options::OutElement;
  static constexpr int kColumns = Options::kHeadDimV;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarpSize;
  // A lane holds pairs of columns: 2 * lane + 64 * i.
  static constexpr int kPairs = ceil_div(kColumns, 2 * kWarpSize);

  struct State {
    float maximum, sum;  // in natural units
    float2 values[kPairs];
  };

  __device__ static bool holds(int i) { return kColumns % (2 * kWarpSize) == 0 || 2 * lane_id() + 64 * i < kColumns; }

  // Takes a chunk into the state: its values count exp(lse - maximum) times. A chunk without any key is skipped, not
  // weighted with 0 (0 * NaN), and a weight never becomes 0 (0 * inf).
  __device__ static void add(State& state, float lse, const float* values) {
    if (lse == -infinity()) return;
    const bool first = state.maximum == -infinity();
    const float next = state.maximum > lse ? state.maximum : lse;  // a NaN stays one, unlike in fmaxf
    const float own = first ? 0.0f : weight(state.maximum - next), other = weight(lse - next);
    state.maximum = next;
    state.sum = (first ? 0.0f : state.sum * own) + other;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (!holds(i)) continue;
      const float2 v = *reinterpret_cast<const float2*>(values + 2 * lane_id() + 64 * i);
      state.values[i].x = (first ? 0.0f : state.values[i].x * own) + v.x * other;
      state.values[i].y = (first ? 0.0f : state.values[i].y * own) + v.y * other;
    }
  }
  __device__ static float weight(float exponent) {
    constexpr float kSmallest = 1.2e-38f;
    const float w = exp2_approx(exponent * kLog2E);
    return w < kSmallest ? kSmallest : w;  // a comparison, so that NaN stays NaN
  }

  __device__ static void run(const Params& p) {
    __shared__ float2 shared_values[kWarps][kPairs * kWarpSize];
    __shared__ float shared_maximum[kWarps], shared_sum[kWarps];
    const int warp = threadIdx.x / kWarpSize, lane = lane_id();
    SplitRow found;
    if (!Rows::find(p, blockIdx.x, found)) return;
    for (int head = blockIdx.y; head < p.num_q_heads; head += gridDim.y) {
      const int kv_head = head / p.group_size, row = found.query * p.group_size + head % p.group_size;
      const int64_t item = found.first_item + row / Options::kBlockQ * found.stride;
      auto slot_of = [&](int split) { return ((item + split) * p.num_kv_heads + kv_head) * Options::kBlockQ + row % Options::kBlockQ; };

      State state{-infinity(), 0.0f, {}};
#pragma unroll 2
      for (int split = warp; split < found.splits; split += kWarps) {
        const int64_t slot = slot_of(split);
        const float lse = Options::kSoftmax ? p.partial_lse[slot] : 0.0f;
        add(state, lse, p.partial_out + slot * kColumns);
      }
#pragma unroll
      for (int i = 0; i < kPairs; ++i) shared_values[warp][i * kWarpSize + lane] = state.values[i];
      if (lane == 0) {
        shared_maximum[warp] = state.maximum;
        shared_sum[warp] = state.sum;
      }
      __syncthreads();  // every warp's part is complete before the first one reads it
      if (warp == 0) write(p, found, head, shared_values, shared_maximum, shared_sum);
      __syncthreads();  // read before the next head's parts overwrite it
    }
  }

  __device__ static void write(
      const Params& p, const SplitRow& found, int head, const float2 (&values)[kWarps][kPairs * kWarpSize],
      const float (&maxima)[kWarps], const float (&sums)[kWarps]) {
    float maximum = -infinity();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) maximum = fmaxf(maximum, maxima[w]);
    if constexpr (Options::kSinks) maximum = fmaxf(maximum, p.sinks[head]);
    const bool nothing = maximum == -infinity();
    float sum = 0.0f;
    float2 total[kPairs] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (maxima[w] == -infinity()) continue;
      const float behind = maxima[w] - maximum;
      const float factor = behind == -infinity() ? 0.0f : weight(behind);  // of a sink of +inf
      sum += sums[w] * factor;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float2 v = values[w][i * kWarpSize + lane_id()];
        total[i].x += v.x * factor;
        total[i].y += v.y * factor;
      }
    }
    if constexpr (Options::kSinks) {  // +inf takes all of the weight
      const float sink = p.sinks[head];
      sum += nothing ? 0.0f : sink == maximum ? 1.0f : exp2_approx((sink - maximum) * kLog2E);
    }
    const float inverse = !Options::kSoftmax ? 1.0f : sum == 0.0f ? 0.0f : reciprocal_approx(sum);
    Out* out = static_cast<Out*>(p.out) + Rows::output(p, found, head);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (!holds(i)) continue;
      const int column = 2 * lane_id() + 64 * i;
      // Single elements: rows of the output may be aligned to no more.
      out[column] = from_float<Out>(total[i].x * inverse);
      out[column + 1] = from_float<Out>(total[i].y * inverse);
    }
    if (Options::kLse && lane_id() == 0) {
      p.lse[Rows::lse(p, found, head)] = sum == 0.0f ? -infinity() : maximum + log2_approx(sum) * kLn2;
    }
  }
};

}  // namespace kernelgen
