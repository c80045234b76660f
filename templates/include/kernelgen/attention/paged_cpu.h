// Attention over a paged cache, as a plan has cut it into items (docs/design/attention_inference.md): which rows and keys an
// item has, and where its keys lie. The rest is in body_cpu.h and splits_cpu.h.
#pragma once

#include "kernelgen/attention/splits_cpu.h"

namespace kernelgen {

template <class Options>
struct PagedCpu {
  using Splits = SplitItems<Options>;
  using G = typename Splits::G;
  using Params = AttentionCpuParams;
  using Task = typename G::Task;
  using Item = typename Splits::Item;
  using KeyValue = typename G::KeyValue;
  using Second = typename G::Second;

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
    item.split = within % item.splits;
    t.row = within / item.splits * p.task_rows;
    const int64_t present = clamp(p.seq_q - t.q_begin, 0, t.q_len);  // an update may plan more rows than this run's q has
    t.rows = clamp(present * p.group_size - t.row, 0, p.task_rows);
    t.chunk_begin = item.split * chunk;
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

  static void run(const Params& p, int64_t task, void* scratch) { Splits::template run<Source>(p, locate(p, task), scratch); }
  static void merge(const Params& p, int64_t task) { Splits::merge(p, locate(p, task)); }
};

}  // namespace kernelgen
