// Attention over a paged cache, as a plan has cut it into items (docs/design/attention_inference.md): which rows and keys an
// item has, where its keys lie, and the merge of items that saw different keys. The rest is in body_cpu.h.
#pragma once

#include "kernelgen/attention/body_cpu.h"

namespace kernelgen {

template <class Options>
struct PagedCpu {
  using Body = AttentionCpu<Options>;
  using G = typename Body::G;
  using Params = AttentionCpuParams;
  using Task = typename G::Task;
  using KeyValue = typename G::KeyValue;
  using Second = typename G::Second;
  using Output = typename G::Output;
  using V = typename G::V;
  using Reg = typename G::Reg;
  static constexpr int kHeadDimV = G::kHeadDimV, kLanes = G::kLanes;

  struct Item {
    Task task;
    int64_t index, splits;  // number of the item, and of those that share its rows

    // Its first row in the partial results.
    int64_t partial_row(const Params& p) const { return (index * p.num_kv_heads + task.head) * p.task_rows; }
  };

  // Tasks beyond the last item have no rows.
  static Item locate(const Params& p, int64_t task) {
    Item item{};
    Task& t = item.task;
    item.index = task / p.num_kv_heads;
    t.head = task % p.num_kv_heads;
    if (item.index >= p.item_indptr[p.batch]) return item;
    int64_t low = 0, high = p.batch;  // item_indptr[low] <= index < item_indptr[high]
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (p.item_indptr[middle] <= item.index ? low : high) = middle;
    }
    t.batch = low;
    t.q_begin = p.q_indptr[low];
    t.q_len = p.q_indptr[low + 1] - t.q_begin;
    t.k_len = p.kv_lens[low];
    const int64_t chunk = *p.chunk, within = item.index - p.item_indptr[low];
    item.splits = t.k_len > chunk ? (t.k_len + chunk - 1) / chunk : 1;
    t.row = within / item.splits * p.task_rows;
    t.rows = clamp(t.q_len * p.group_size - t.row, 0, p.task_rows);
    t.chunk_begin = within % item.splits * chunk;
    t.chunk_end = t.chunk_begin + chunk < t.k_len ? t.chunk_begin + chunk : t.k_len;
    return item;
  }

  // ---- Where keys lie ---------------------------------------------------------------------------------------------

  // Addresses of one tile's rows. Only slots of keys in use are looked up.
  struct PagedTile {
    const KeyValue* key_row[G::kBlockK];
    const Second* second_row[G::kBlockK];  // the value, or of MLA the rest of the key
    float key_scale[G::kPageScales ? G::kBlockK : 1], value_scale[G::kPageScales ? G::kBlockK : 1];

    KERNELGEN_INLINE const KeyValue* key(int j) const { return key_row[j]; }
    KERNELGEN_INLINE const Second* value(int j) const { return second_row[j]; }
    KERNELGEN_INLINE const Second* rope(int j) const { return second_row[j]; }
    KERNELGEN_INLINE float key_factor(int j) const { return key_scale[j]; }
    KERNELGEN_INLINE float value_factor(int j) const { return value_scale[j]; }
  };

  struct Source {
    using Tile = PagedTile;
    const Params& p;
    const KeyValue* keys;
    const Second* seconds;
    int64_t second_page, second_row, head;
    const int32_t* pages;

    Source(const Params& params, const Task& t) : p(params), head(t.head), pages(params.page_indices + params.page_begin[t.batch]) {
      keys = static_cast<const KeyValue*>(p.k) + t.head * p.k_head;
      if constexpr (G::kRopeDim > 0) {
        seconds = static_cast<const Second*>(p.k_rope);
        second_page = p.k_rope_page;
        second_row = p.k_rope_row;
      } else {
        seconds = static_cast<const Second*>(p.v) + t.head * p.v_head;
        second_page = p.v_batch;
        second_row = p.v_row;
      }
    }

    // Page of a key (its place in the request's table) and its row in the page.
    KERNELGEN_INLINE void split(int64_t key, int64_t& page, int64_t& row) const {
      if constexpr (Options::kPages == Pages::kContiguous) {
        page = 0;
        row = key;
      } else if constexpr (Options::kPages == Pages::kPowerOfTwo) {
        page = key >> p.page_shift;
        row = key & (p.page_size - 1);
      } else {
        page = key / p.page_size;
        row = key - page * p.page_size;
      }
    }

    void locate(Tile& found, int64_t tile, int begin, int end) const {
      int64_t page, row;
      split(tile + begin, page, row);
      for (int j = begin; j < end; ++page, row = 0) {
        const int64_t number = pages[page], left = p.page_size - row;
        const int stop = end - j < left || Options::kPages == Pages::kContiguous ? end : j + int(left);
        const KeyValue* key = keys + number * p.k_batch + row * p.k_row;
        const Second* second = seconds + number * second_page + row * second_row;
        for (; j < stop; ++j, key += p.k_row, second += second_row) {
          found.key_row[j] = key;
          found.second_row[j] = second;
          if constexpr (G::kPageScales) {
            found.key_scale[j] = p.k_scale ? p.k_scale[number * p.k_scale_batch + head * p.k_scale_head] : 1;
            found.value_scale[j] = p.v_scale ? p.v_scale[number * p.v_scale_batch + head * p.v_scale_head] : 1;
          }
        }
      }
    }
  };

  // ---- Phases -----------------------------------------------------------------------------------------------------

  static void run(const Params& p, int64_t task, void* scratch) {
    const Item item = locate(p, task);
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
  static void merge(const Params& p, int64_t task) {
    if constexpr (sizeof(typename G::Scalar) == 4) {
      const Item item = locate(p, task);
      if (item.task.rows == 0 || item.splits == 1 || item.task.chunk_begin != 0) return;
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
    if constexpr (Options::kSinks) total = __builtin_exp(Body::sink_of(p, item.task, row) - top);
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
