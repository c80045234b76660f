// Requests whose keys are split over several items: partial results of an item, and the merge of items that saw different keys.
// Items: docs/design/attention_inference.md. The rest is in body_cpu.h.
#pragma once

#include "kernelgen/attention/body_cpu.h"

namespace kernelgen {

template <class Options>
struct SplitItems {
  using Body = AttentionCpu<Options>;
  using G = typename Body::G;
  using Params = AttentionCpuParams;
  using Task = typename G::Task;
  using Output = typename G::Output;
  using V = typename G::V;
  using Reg = typename G::Reg;
  static constexpr int kHeadDimV = G::kHeadDimV, kLanes = G::kLanes;

  struct Item {
    Task task;
    int64_t index, split, splits;  // number of the item; which of those that share its rows, and how many they are

    // Its first row in the partial results.
    int64_t partial_row(const Params& p) const { return (index * p.num_kv_heads + task.head) * p.task_rows; }
  };

  template <class Source>
  static void run(const Params& p, const Item& item, void* scratch) {
    const Task& t = item.task;
    if (t.rows == 0) return;
    const typename G::Buffers buffers(scratch);
    const Logit<G> logit(p);
    Body::attend(p, t, Source(p, t), buffers, logit);
    if (item.splits == 1) Body::store_outputs(p, t, buffers, logit);
    else if constexpr (sizeof(typename G::Scalar) == 4) store_partials(p, item, buffers, logit);
  }

  static void store_partials(const Params& p, const Item& item, const typename G::Buffers& b, const Logit<G>& logit) {
    for (int64_t i = 0; i * G::kWidth < item.task.rows; ++i) {
      const int64_t row = item.partial_row(p) + i * G::kWidth;
      Body::template store_rows<float>(p, item.task, b.panels[i], logit, item.task.row + i * G::kWidth, false,
                                       [&](int l, float*& out, float*& lse) {
                                         out = p.partial_out + (row + l) * kHeadDimV;
                                         lse = G::kSoftmax ? p.partial_lse + row + l : nullptr;
                                       });
    }
  }

  // Second phase: the item of a request's first keys merges its rows over all splits.
  static void merge(const Params& p, const Item& item) {
    if constexpr (sizeof(typename G::Scalar) == 4) {
      if (item.task.rows == 0 || item.splits == 1 || item.split != 0) return;
      for (int64_t l = 0; l < item.task.rows; ++l) merge_row(p, item, l);
    }
  }

  static void merge_row(const Params& p, const Item& item, int64_t l) {
    const int64_t first = item.partial_row(p) + l, distance = p.num_kv_heads * p.task_rows;  // between two splits
    const int64_t row = item.task.row + l;
    // Without a softmax every part counts once: as if its LSE, which was never written, were 0.
    const auto lse_of = [&](int64_t s) { return G::kSoftmax ? p.partial_lse[first + s * distance] : 0.0f; };
    double top = G::kMinusInfinity, total = 0;
    if constexpr (Options::kSinks) top = Body::sink_of(p, item.task, row);
    for (int64_t s = 0; s < item.splits; ++s) top = lse_of(s) > top ? lse_of(s) : top;
    if (top == double(G::kMinusInfinity)) top = 0;
    if constexpr (Options::kSinks) {  // +inf takes all of the weight
      const double sink = Body::sink_of(p, item.task, row);
      total = sink == top ? 1 : __builtin_exp(sink - top);
    }
    alignas(64) float sum[kHeadDimV] = {};
    for (int64_t s = 0; s < item.splits; ++s) {
      const float lse = lse_of(s);
      if (lse == G::kMinusInfinity) continue;  // skipped: 0 times what it left there might be NaN
      const double weight = __builtin_exp(lse - top);
      total += weight;
      const float* part = p.partial_out + (first + s * distance) * kHeadDimV;
      const float factor = float(weight);
      for (int d = 0; d < kHeadDimV; ++d) sum[d] += factor * part[d];
    }
    Output* out;
    float* lse;
    Body::place_row(p, item.task, row, out, lse);
    const Reg factor = V::broadcast(float(!G::kSoftmax || total == 0 ? 1 : 1 / total));
    for (int d = 0; d < kHeadDimV; d += kLanes)
      V::store_first(out + d, V::load_first(sum + d, kHeadDimV - d) * factor, kHeadDimV - d);
    if (lse) *lse = total == 0 ? float(G::kMinusInfinity) : float(top + __builtin_log(total));
  }
};

}  // namespace kernelgen
