// Where dense and ragged attention has its rows and keys when the keys are split: a block takes one item (split_cut.cuh), that
// is kBlockQ packed rows of a request (mma_packed.cuh) against one chunk of its keys, for one key/value head.
#pragma once

#include <kernelgen/attention/mma_copy.cuh>
#include <kernelgen/attention/mma_packed.cuh>
#include <kernelgen/attention/paged_merge.cuh>
#include <kernelgen/attention/split_cut.cuh>
#include <kernelgen/cuda/warp_search.cuh>

namespace kernelgen {

template <class Shape>
struct SplitLayout : PackedRows<Shape, SplitMmaParams> {
  using Params = SplitMmaParams;
  using Rows = PackedRows<Shape, Params>;
  using Cut = SplitCut<Shape>;
  using T = typename Shape::T;
  using KeyElement = typename Shape::KeyElement;
  using QueryElement = typename Shape::QueryElement;
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  using KeyCopier = Copier<Shape, KeyTile>;
  using ValueCopier = Copier<Shape, ValueTile>;
  using Variant = typename Shape::VariantFunctions;
  using Rows::head;
  using Rows::query;
  static_assert(kChunkUnit % Shape::kBlockK == 0, "tiles start where chunks do");

  struct Work : PackedWork {
    int k_start;  // keys in front of the request (ragged)
  };

  __device__ static float value_reference(const Work&) { return 1.0f; }

  __device__ static float* lse(const Params& p, const Work& work, int row) {
    return p.lse + (work.request * p.lse_batch + int64_t{work.q_start + query(p, work, row)} * p.lse_row +
                    head(p, work, row) * p.lse_head);
  }
  __device__ static auto output(const Params& p, const Work& work) {
    using Out = typename Shape::OutElement;
    Out* out = static_cast<Out*>(p.out) + work.request * p.out_batch + work.value_column;
    return [out, &p, &work](int row) {
      return out + int64_t{work.q_start + query(p, work, row)} * p.out_row + head(p, work, row) * p.out_head;
    };
  }

  // The grid is a bound on the items. False for a block without one.
  __device__ static bool find_work(const Params& p, Work& work) {
    Rows::take_part(p, work);
    const int chunk = Cut::chunk(p);
    int first_item;
    if (!Cut::find(p, work.item, chunk, work.request, first_item)) return false;
    const typename Cut::Request r = Cut::request(p, work.request);
    work.q_start = r.q_start;
    work.k_start = r.k_start;
    work.seq_q = r.seq_q;
    work.seq_k = r.seq_k;
    work.num_packed = r.seq_q * p.group_size;
    const int stride = Cut::stride(p, r, chunk), splits = r.splits(chunk);
    int local = work.item - first_item;
    if constexpr (Shape::kBoundedRight) {  // later rows see more keys: they start first, see mma_dense.cuh
      local = r.tiles * stride - 1 - local;
      work.item = first_item + local;
    }
    const int tile = local / stride, split = local - tile * stride;
    if (split >= splits) return false;  // of a request shorter than the others
    work.first_row = tile * Shape::kBlockQ;
    Rows::take_chunk(work, r.first_key, chunk, split, splits);
    return true;
  }

  __device__ static void load_queries(const Params& p, const Work& work, uint32_t shared) {
    const QueryElement* q = static_cast<const QueryElement*>(p.q) + work.request * p.q_batch;
    load_query_rows<Shape>(shared, [&](int row) {
      const QueryElement* from = q + int64_t{work.q_start + query(p, work, row)} * p.q_row + head(p, work, row) * p.q_head;
      return [from](int column) { return from + column; };
    }, work.num_packed - work.first_row);
  }

  // Copies tiles of keys and values, each once.
  struct Loader {
    const Params& p;
    const Work& work;
    const KeyElement* k;
    const KeyElement* v;
    int value_columns;

    __device__ Loader(const Params& params, const Work& block, int /*tile*/, bool /*any*/) : p(params), work(block) {
      k = static_cast<const KeyElement*>(p.k) + work.request * p.k_batch + work.kv_head_ * p.k_head + int64_t{work.k_start} * p.k_row;
      v = static_cast<const KeyElement*>(p.v) + work.request * p.v_batch + work.kv_head_ * p.v_head +
          int64_t{work.k_start} * p.v_row + work.value_column;
      value_columns = min(Shape::kSplitColumns, Shape::kHeadDimV - work.value_column);
    }

    __device__ void load_keys(uint32_t shared, int first_key) {
      const T* from = KeyCopier::start(k + first_key * p.k_row, p.k_row);
      KeyCopier::load(shared, from, p.k_row, work.chunk.last - first_key, Shape::kHeadDim);
    }
    __device__ void load_values(uint32_t shared, int first_key) {
      const T* from = ValueCopier::start(v + first_key * p.v_row, p.v_row);
      ValueCopier::load(shared, from, p.v_row, work.chunk.last - first_key, value_columns);
    }

    using KeyBytes = ByteCopier<Shape, KeyTile, widest_across(KeyTile::kChunks / 2)>;
    using ValueBytes = ByteCopier<Shape, ValueTile, widest_across(ValueTile::kChunks / 2)>;
    __device__ void load_bytes(uint32_t slot, uint32_t /*scales*/, uint32_t /*rope*/, int first_key) {
      auto rows = [first_key](const KeyElement* from, int64_t stride) {
        return [from, stride, first_key](int, int row) {
          const KeyElement* address = from + (first_key + row) * stride;
          return [address](int column) { return address + column; };
        };
      };
      const int count = work.chunk.last - first_key;
      KeyBytes::load_rows(slot, rows(k, p.k_row), count, Shape::kHeadDim);
      ValueBytes::load_rows(slot + Shape::kKeyStageBytes, rows(v, p.v_row), count, value_columns);
    }
  };
};

// Rows of the merge.
template <class Options>
struct SplitRows {
  using Params = SplitMmaParams;
  using Cut = SplitCut<Options>;

  __device__ static bool find(const Params& p, int token, SplitRow& row) {
    row.token = token;
    if constexpr (Options::kRagged) {
      row.request = warp_count_up_to(p.cu_seqlens_q + 1, p.batch, token);
      if (row.request >= p.batch || token < p.cu_seqlens_q[row.request]) return false;  // before the first or past the last
      row.query = token - p.cu_seqlens_q[row.request];
    } else {
      row.request = token / p.seq_q;
      row.query = token - row.request * p.seq_q;
      row.token = row.query;
    }
    const int chunk = Cut::chunk(p);
    const typename Cut::Request r = Cut::request(p, row.request);
    row.splits = r.splits(chunk);
    if (row.splits == 1) return false;
    row.stride = Cut::stride(p, r, chunk);
    row.first_item = Cut::first_item(p, row.request, chunk);
    return true;
  }
  __device__ static int64_t output(const Params& p, const SplitRow& row, int head) {
    return row.request * p.out_batch + row.token * p.out_row + head * p.out_head;
  }
  __device__ static int64_t lse(const Params& p, const SplitRow& row, int head) {
    return row.request * p.lse_batch + row.token * p.lse_row + head * p.lse_head;
  }
};

}  // namespace kernelgen
