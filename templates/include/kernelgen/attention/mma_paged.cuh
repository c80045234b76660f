// Where planned attention has its rows and keys (docs/design/attention_inference.md): a block takes one item, that is
// kBlockQ packed rows of a request (mma_packed.cuh) against one chunk of its keys, for one key/value head.
//
// Keys lie in pages. Which page a row of a tile is in is looked up by the warp that copies the row, a tile before it is
// needed: a lane holds the page of one row, and hands it to the lanes that copy parts of that row by a shuffle. That keeps
// the look-up off the critical path and needs neither shared memory nor a barrier.
#pragma once

#include <kernelgen/attention/mma_copy.cuh>
#include <kernelgen/attention/mma_packed.cuh>
#include <kernelgen/attention/paged_params.cuh>
#include <kernelgen/cuda/warp_search.cuh>

namespace kernelgen {

template <class Shape>
struct PagedLayout : PackedRows<Shape, PagedMmaParams> {
  using Params = PagedMmaParams;
  using Rows = PackedRows<Shape, Params>;
  using T = typename Shape::T;
  using KeyElement = typename Shape::KeyElement;
  using QueryElement = typename Shape::QueryElement;
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  using Variant = typename Shape::VariantFunctions;
  using Rows::head;
  using Rows::kBlockK;
  using Rows::kBlockQ;
  using Rows::query;
  static constexpr PageKind kPageKind = Shape::kPageKind;
  static constexpr int kLatentDim = Shape::kHeadDim - Shape::kRopeDim;
  static_assert(kChunkUnit % kBlockK == 0, "tiles start where chunks do");

  // Keys and values are copied by the same spread of threads, so that one look-up serves both.
  static constexpr int kUnitChunks = Shape::kStaged ? 2 : 1;
  static constexpr int kTilesAcross =
      min_of(widest_across(KeyTile::kChunks / kUnitChunks), widest_across(ValueTile::kChunks / kUnitChunks));
  static constexpr int kAcross = Shape::kPlainRope ? min_of(kTilesAcross, widest_across(Shape::RopeTile::kChunks)) : kTilesAcross;
  using KeyCopier = Copier<Shape, KeyTile, kAcross>;
  using ValueCopier = Copier<Shape, ValueTile, kAcross>;

  struct Work : PackedWork {
    const int32_t* pages;
    float value_reference;
  };

  __device__ static float value_reference(const Work& work) {
    return Shape::kPageScales && is_same_v<T, fp16> ? work.value_reference : 1.0f;
  }

  __device__ static float* lse(const Params& p, const Work& work, int row) {
    return p.lse + (int64_t{work.q_start + query(p, work, row)} * p.lse_row + head(p, work, row) * p.lse_head);
  }
  __device__ static auto output(const Params& p, const Work& work) {
    using Out = typename Shape::OutElement;
    Out* out = static_cast<Out*>(p.out) + work.value_column;
    return [out, &p, &work](int row) {
      return out + int64_t{work.q_start + query(p, work, row)} * p.out_row + head(p, work, row) * p.out_head;
    };
  }

  // The grid is a bound on the items. False past the last one.
  __device__ static bool find_work(const Params& p, Work& work) {
    Rows::take_part(p, work);
    work.request = warp_count_up_to(p.item_indptr + 1, p.batch, work.item);
    if (work.request >= p.batch) return false;
    const int first_item = p.item_indptr[work.request], items = p.item_indptr[work.request + 1] - first_item;
    work.q_start = p.q_indptr[work.request];
    work.seq_q = p.q_indptr[work.request + 1] - work.q_start;
    work.seq_k = p.kv_lens[work.request];
    work.num_packed = min(work.seq_q, p.q_rows - work.q_start) * p.group_size;
    const int chunk = *p.chunk;
    const int splits = max((work.seq_k + chunk - 1) / chunk, 1);
    int local = work.item - first_item;
    if constexpr (Shape::kBoundedRight) {  // later rows see more keys: they start first, see mma_dense.cuh
      local = items - 1 - local;
      work.item = first_item + local;
    }
    const int tile = local / splits;
    work.first_row = tile * kBlockQ;
    if (work.first_row >= work.num_packed) return false;  // rows that q does not have
    Rows::take_chunk(work, 0, chunk, local - tile * splits, splits);
    work.pages = p.page_indices + p.page_begin[work.request];
    if constexpr (Shape::kPageScales) work.value_reference = largest_value_scale(p, work);
    return true;
  }

  // Page and row within the page of a key.
  struct Place {
    int page, slot;
  };
  __device__ static Place place_of(const Params& p, int key) {
    if constexpr (kPageKind == PageKind::contiguous) {
      return {0, key};
    } else if constexpr (kPageKind == PageKind::pow2) {
      return {key >> p.page_shift, key & (p.page_size - 1)};
    } else {
      const int page = key / p.page_size;
      return {page, key - page * p.page_size};
    }
  }

  // Weights are rounded to 16 bits after they took along their value's scale. fp16 has the range for that only if the
  // scales are near 1, so they are divided by the largest of the chunk; bf16 needs no such care.
  __device__ static float largest_value_scale(const Params& p, const Work& work) {
    if constexpr (is_same_v<T, fp16>) {
      float largest = 0.0f;
      if (p.v_scale != nullptr && work.chunk.last > work.chunk.first) {
        const int first = place_of(p, work.chunk.first).page, last = place_of(p, work.chunk.last - 1).page;
        for (int page = first + lane_id(); page <= last; page += kWarpSize) {
          largest = fmaxf(largest, fabsf(p.v_scale[work.pages[page] * p.v_scale_batch + work.kv_head_ * p.v_scale_head]));
        }
      }
      largest = warp_max(largest);
      return largest > 0.0f && largest < infinity() ? largest : 1.0f;
    }
    return 1.0f;
  }

  __device__ static void load_queries(const Params& p, const Work& work, uint32_t shared) {
    const QueryElement* q = static_cast<const QueryElement*>(p.q);
    const QueryElement* q_rope = static_cast<const QueryElement*>(p.q_rope);
    load_query_rows<Shape>(shared, [&](int row) {
      const int64_t token = work.q_start + query(p, work, row);
      const int head = Rows::head(p, work, row);
      const QueryElement* from = q + token * p.q_row + head * p.q_head;
      const QueryElement* rope = Shape::kRopeDim > 0 ? q_rope + token * p.q_rope_row + head * p.q_rope_head - kLatentDim : nullptr;
      return [from, rope](int column) { return (Shape::kRopeDim > 0 && column >= kLatentDim ? rope : from) + column; };
    }, work.num_packed - work.first_row);
  }

  // The pages of the rows of one tile that the lanes of this warp copy.
  struct Pages {
    using S = Spread<Shape, kBlockK, KeyTile::kChunks / kUnitChunks, kAcross>;
    static constexpr int kWarpStepRows = kWarpSize / kAcross;  // rows of a warp in one step of the copy
    static constexpr int kRegisters = ceil_div(kWarpStepRows * S::kSteps, kWarpSize);
    int page[kRegisters];

    __device__ void look_up(const Params& p, const Work& work, int first_key) {
      const int warp_row = static_cast<int>(Shape::thread_in_group()) / kWarpSize * kWarpStepRows;
#pragma unroll
      for (int i = 0; i < kRegisters; ++i) {
        if constexpr (kPageKind == PageKind::contiguous) {
          page[i] = work.chunk.first < work.chunk.last ? work.pages[0] : 0;
        } else {
          const int held = i * kWarpSize + lane_id();
          const int row = held / kWarpStepRows * S::kRowStep + warp_row + held % kWarpStepRows;
          const int key = first_key + row;
          const bool used = row < kBlockK && key < work.chunk.last;  // table entries of other keys are never read
          page[i] = used ? work.pages[place_of(p, key).page] : 0;
        }
      }
    }
    // A collective: the page of this lane's row in step `step`, a constant once unrolled.
    __device__ int of(int step) const {
      if constexpr (kPageKind == PageKind::contiguous) return page[0];
      const int held = step * kWarpStepRows;
      return __shfl_sync(kFullWarp, page[held / kWarpSize], held % kWarpSize + lane_id() / kAcross);
    }
  };

  // Copies tiles of keys and values in order, each once; a group's tiles are kKeyWarps apart.
  struct Loader {
    const Params& p;
    const Work& work;
    const KeyElement* k;
    const KeyElement* k_rope;
    const KeyElement* v;
    int value_columns;
    Pages next;    // of the tile whose keys are loaded next
    Pages loaded;  // of the tile whose keys were loaded last

    __device__ Loader(const Params& params, const Work& block, int tile, bool any) : p(params), work(block) {
      k = static_cast<const KeyElement*>(p.k) + work.kv_head_ * p.k_head;
      k_rope = Shape::kRopeDim > 0 && !Shape::kPlainRope ? static_cast<const KeyElement*>(p.k_rope) - kLatentDim : nullptr;
      v = static_cast<const KeyElement*>(p.v) + work.kv_head_ * p.v_head + work.value_column;
      value_columns = min(Shape::kSplitColumns, Shape::kHeadDimV - work.value_column);
      if (any) next.look_up(p, work, tile * kBlockK);
    }

    // Where rows of the tile at first_key are, for Copier::load_rows.
    __device__ auto keys_at(const Pages& pages, int first_key) const {
      return [this, &pages, first_key](int step, int row) {
        const int64_t page = pages.of(step), slot = place_of(p, first_key + row).slot;
        const KeyElement* latent = k + (page * p.k_page + slot * p.k_row);
        const bool two = Shape::kRopeDim > 0 && !Shape::kPlainRope;
        const KeyElement* rope = two ? k_rope + (page * p.k_rope_page + slot * p.k_rope_row) : nullptr;
        return [latent, rope](int column) { return (two && column >= kLatentDim ? rope : latent) + column; };
      };
    }
    // Rope rows in the type of the products: they need no widening.
    __device__ auto plain_rope_at(const Pages& pages, int first_key) const {
      return [this, &pages, first_key](int step, int row) {
        const int64_t page = pages.of(step), slot = place_of(p, first_key + row).slot;
        const T* from = static_cast<const T*>(p.k_rope) + (page * p.k_rope_page + slot * p.k_rope_row);
        return [from](int column) { return from + column; };
      };
    }
    __device__ auto values_at(const Pages& pages, int first_key) const {
      return [this, &pages, first_key](int step, int row) {
        const int64_t page = pages.of(step), slot = place_of(p, first_key + row).slot;
        const KeyElement* from = v + (page * p.v_page + slot * p.v_row);
        return [from](int column) { return from + column; };
      };
    }
    __device__ void advance(int first_key) {
      loaded = next;
      next.look_up(p, work, first_key + Shape::kKeyWarps * kBlockK);
    }

    __device__ void load_keys(uint32_t shared, int first_key) {
      KeyCopier::load_rows(shared, keys_at(next, first_key), work.chunk.last - first_key, Shape::kHeadDim);
      advance(first_key);
    }
    // After load_keys of the same tile.
    __device__ void load_values(uint32_t shared, int first_key) {
      ValueCopier::load_rows(shared, values_at(loaded, first_key), work.chunk.last - first_key, value_columns);
    }

    using KeyBytes = ByteCopier<Shape, KeyTile, kAcross>;
    using ValueBytes = ByteCopier<Shape, ValueTile, kAcross>;
    __device__ void load_bytes(uint32_t slot, uint32_t scales, uint32_t rope, int first_key) {
      const int rows = work.chunk.last - first_key;
      KeyBytes::load_rows(slot, keys_at(next, first_key), rows, Shape::kKeyColumns);
      if constexpr (Shape::kPlainRope) {
        Copier<Shape, typename Shape::RopeTile, kAcross>::load_rows(rope, plain_rope_at(next, first_key), rows, Shape::kRopeDim);
      }
      ValueBytes::load_rows(slot + Shape::kKeyStageBytes, values_at(next, first_key), rows, value_columns);
      if constexpr (Shape::kPageScales) load_scales(scales, rows);
      advance(first_key);
    }

    __device__ static void copy_scale(uint32_t target, const float* scales, int64_t index, bool valid) {
      if (scales == nullptr) {
        store_word(target, __float_as_uint(1.0f));
      } else {
        cp_async_4(target, scales + (valid ? index : 0), valid);
      }
    }
    // The scales of the tile's keys and values: the first lane of each row copies them.
    __device__ void load_scales(uint32_t scales, int rows) {
      using S = typename Pages::S;
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
        const int64_t page = next.of(step);
        const int row = static_cast<int>(S::row()) + step * S::kRowStep;
        if (S::unit() != 0 || row >= kBlockK) continue;
        copy_scale(scales + row * 4, p.k_scale, page * p.k_scale_batch + work.kv_head_ * p.k_scale_head, row < rows);
        copy_scale(scales + (kBlockK + row) * 4, p.v_scale, page * p.v_scale_batch + work.kv_head_ * p.v_scale_head, row < rows);
      }
    }
  };
};

}  // namespace kernelgen
