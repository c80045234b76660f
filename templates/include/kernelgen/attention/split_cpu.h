// Dense and ragged attention of few rows over many keys: the keys of a request are cut into chunks, so that every thread has
// some. The cut is that of a plan (kernels/attention/schedule.py) without its arrays: what the host knows is among the
// parameters, the rest each task works out from the lengths, of which there are few.
#pragma once

#include "kernelgen/attention/prefill_cpu.h"
#include "kernelgen/attention/splits_cpu.h"

namespace kernelgen {

template <class Options>
struct SplitCpu {
  using Splits = SplitItems<Options>;
  using G = typename Splits::G;
  using Params = AttentionCpuParams;
  using Task = typename G::Task;
  using Item = typename Splits::Item;
  using Source = typename PrefillCpu<Options>::Source;
  static constexpr int64_t kChunkUnit = 64;

  // Rows and keys of a request, and how they are cut.
  struct Request {
    int64_t q_begin, q_len, k_begin, k_len;
    int64_t first_key;  // no row sees a key before it
    int64_t tiles;

    int64_t keys() const { return k_len - first_key; }
    int64_t splits(int64_t chunk) const { return keys() > chunk ? (keys() + chunk - 1) / chunk : 1; }
  };

  static Request request(const Params& p, int64_t b) {
    Request r{0, p.seq_q, 0, p.seq_k, 0, 0};
    if constexpr (Options::kRagged) {
      r.q_begin = clamp(p.q_indptr[b], 0, p.seq_q);
      r.q_len = clamp(p.q_indptr[b + 1], r.q_begin, p.seq_q) - r.q_begin;
      r.k_begin = clamp(p.k_indptr[b], 0, p.seq_k);
      r.k_len = clamp(p.k_indptr[b + 1], r.k_begin, p.seq_k) - r.k_begin;
    }
    if constexpr (Options::kKvLens) r.k_len = clamp(p.kv_lens[b], 0, r.k_len);
    if constexpr (Options::kBoundedLeft) {
      r.first_key = clamp(r.k_len - r.q_len - p.window_left, 0, r.k_len) / kChunkUnit * kChunkUnit;
    }
    r.tiles = (r.q_len * p.group_size + p.task_rows - 1) / p.task_rows;
    return r;
  }

  static int64_t round_up(int64_t keys) { return (keys + kChunkUnit - 1) / kChunkUnit * kChunkUnit; }

  // Keys of a chunk: such that about `slots` items result, where the host has not chosen.
  static int64_t chunk_of(const Params& p) {
    if (p.split_chunk > 0) return p.split_chunk;
    int64_t tiles = 0, work = 0, longest = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      const Request r = request(p, b);
      tiles += r.tiles;
      work += r.tiles * r.keys();
      longest = r.keys() > longest ? r.keys() : longest;
    }
    const int64_t whole = longest > 0 ? round_up(longest) : kChunkUnit;
    if (tiles >= p.slots) return whole;
    const int64_t share = round_up((work + p.slots - 1) / p.slots), chunk = share > p.min_chunk ? share : p.min_chunk;
    return chunk < whole ? chunk : whole;
  }

  // Tasks beyond the last item, or the last chunk of a request cut as its longer neighbours are, have no rows.
  static Item locate(const Params& p, int64_t task) {
    Item item{};
    Task& t = item.task;
    const int64_t chunk = chunk_of(p);
    item.index = task / p.num_kv_heads;
    t.head = task % p.num_kv_heads;
    int64_t within = item.index, stride = p.splits;
    if (p.splits > 0) {  // requests alike: skip to the one in question
      const int64_t items = (p.seq_q * p.group_size + p.task_rows - 1) / p.task_rows * p.splits;
      t.batch = within / items;
      within %= items;
    }
    Request r{};
    for (;; ++t.batch) {
      if (t.batch >= p.batch) return item;
      r = request(p, t.batch);
      stride = p.splits > 0 ? p.splits : r.splits(chunk);
      if (within < r.tiles * stride) break;
      within -= r.tiles * stride;
    }
    t.q_begin = r.q_begin;
    t.q_len = r.q_len;
    t.k_begin = r.k_begin;
    t.k_len = r.k_len;
    item.splits = r.splits(chunk);
    item.split = within % stride;
    if (item.split >= item.splits) return item;
    t.row = within / stride * p.task_rows;
    t.rows = clamp(t.q_len * p.group_size - t.row, 0, p.task_rows);
    t.chunk_begin = r.first_key + item.split * chunk;
    t.chunk_end = t.chunk_begin + chunk < t.k_len ? t.chunk_begin + chunk : t.k_len;
    return item;
  }

  static void run(const Params& p, int64_t task, void* scratch) { Splits::template run<Source>(p, locate(p, task), scratch); }
  static void merge(const Params& p, int64_t task) { Splits::merge(p, locate(p, task)); }
};

}  // namespace kernelgen
