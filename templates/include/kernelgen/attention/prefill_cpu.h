// Dense and ragged attention: which rows and keys a task has. The rest is in body_cpu.h.
#pragma once

#include "kernelgen/attention/body_cpu.h"

namespace kernelgen {

template <class Options>
struct PrefillCpu {
  using Body = AttentionCpu<Options>;
  using G = typename Body::G;
  using Params = AttentionCpuParams;
  using Task = typename G::Task;

  // Ragged: request b owns the slots from here to that of b + 1, enough for all of its rows wherever they begin; so the
  // owner of a slot is found without knowing any other request's length.
  static int64_t first_slot(const Params& p, int64_t b) {
    return clamp(p.q_indptr[b], 0, p.seq_q) * p.group_size / p.task_rows + b;
  }

  // Later rows see more keys under a causal mask, so they come first: short tasks fill the gaps at the end.
  static Task locate(const Params& p, int64_t task) {
    Task t{};
    int64_t block;
    if constexpr (Options::kRagged) {
      const int64_t slot = first_slot(p, p.batch) - 1 - task / p.num_kv_heads;
      if (slot < first_slot(p, 0)) return t;  // also where the first request begins behind other tokens
      t.head = task % p.num_kv_heads;
      int64_t low = 0, high = p.batch;  // first_slot(low) <= slot < first_slot(high)
      while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (first_slot(p, middle) <= slot ? low : high) = middle;
      }
      t.batch = low;
      block = slot - first_slot(p, low);
      if (block < 0) return t;  // boundaries that decrease: nonsense, but in bounds
      t.q_begin = clamp(p.q_indptr[low], 0, p.seq_q);
      t.q_len = clamp(p.q_indptr[low + 1], t.q_begin, p.seq_q) - t.q_begin;
      t.k_begin = clamp(p.k_indptr[low], 0, p.seq_k);
      t.k_len = clamp(p.k_indptr[low + 1], t.k_begin, p.seq_k) - t.k_begin;
    } else {
      const int64_t heads = p.batch * p.num_kv_heads, blocks = (p.seq_q * p.group_size + p.task_rows - 1) / p.task_rows;
      block = blocks - 1 - task / heads;
      t.batch = task % heads / p.num_kv_heads;
      t.head = task % p.num_kv_heads;
      t.q_len = p.seq_q;
      t.k_len = p.seq_k;
    }
    if constexpr (Options::kKvLens) t.k_len = clamp(p.kv_lens[t.batch], 0, t.k_len);
    t.chunk_end = t.k_len;
    t.row = block * p.task_rows;
    t.rows = clamp(t.q_len * p.group_size - t.row, 0, p.task_rows);
    return t;
  }

  struct Source {
    using KeyValue = typename G::KeyValue;
    using Tile = StridedTile<KeyValue>;
    Tile request;

    Source(const Params& p, const Task& t)
        : request{static_cast<const KeyValue*>(p.k) + t.batch * p.k_batch + t.k_begin * p.k_row + t.head * p.k_head,
                  static_cast<const KeyValue*>(p.v) + t.batch * p.v_batch + t.k_begin * p.v_row + t.head * p.v_head,
                  p.k_row, p.v_row} {}
    void locate(Tile& found, int64_t tile, int, int) const {
      found = {request.keys + tile * request.key_stride, request.values + tile * request.value_stride, request.key_stride,
               request.value_stride};
    }
  };

  static void run(const Params& p, int64_t task, void* scratch) {
    const Task t = locate(p, task);
    if (t.rows == 0) return;
    const typename G::Buffers buffers(scratch);
    const Logit<G> logit(p);
    Body::attend(p, t, Source(p, t), buffers, logit);
    Body::store_outputs(p, t, buffers, logit);
  }
};

}  // namespace kernelgen
