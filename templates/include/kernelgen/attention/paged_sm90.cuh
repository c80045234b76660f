// Planned attention over paged caches on Hopper: attention/prefill_sm90 with keys and values that lie in pages.
//
// A tile of keys is several boxes of kPageRows rows, each within a page: what the page size and the tile have as a common factor, of a
// contiguous cache the whole tile. Each lane of the copying warp looks up the page of one box of a tile and starts its copies; it does so
// before it waits for the tile's place in the ring, which hides the look-up. Rows of the last page behind the request's last key come along
// (what they hold is hidden like anything that rows must not see: sm90_values.cuh); boxes that begin behind it are not looked up, and read zeros.
//
// The copy engine swizzles by groups of eight rows, so that boxes have multiples of eight. Other pages are copied row by row (kGathers):
// each lane looks up kBlockK / 32 keys, and all lanes bring their rows by cp.async, to where the copy engine would have put them; consumers
// fence before the tensor core reads them.
#pragma once

#include <kernelgen/attention/mma_dense.cuh>
#include <kernelgen/attention/sm90_shape.cuh>
#include <kernelgen/cuda/cp_async.cuh>
#include <kernelgen/sm90/tma.cuh>

namespace kernelgen {

// Maps have (columns, rows in the page, heads, pages); of queries (columns, rows, heads, 1). Strides are in elements.
// Pointers of features that are off are null.
struct PagedSm90Params {
  TensorMap map_q, map_k, map_v;
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;
  const int32_t* q_indptr;
  const int32_t* kv_lens;
  const int32_t* page_begin;
  const int32_t* page_indices;
  int32_t* counter;  // see sm90_tiles.cuh
  const float* sinks;
  const float* alibi_slopes;
  const uint8_t* mask;
  const int64_t* mask_indptr;
  const int64_t* variant_words;
  int64_t k_page, k_row, k_head;
  int64_t v_page, v_row, v_head;
  int64_t out_row, out_head;
  int64_t lse_row, lse_head;
  int64_t alibi_batch, alibi_head;
  int32_t batch, num_q_heads, group_size;
  int32_t q_rows;  // of q and out: an update may plan more than a captured run has
  int32_t page_size;
  int32_t window_left, window_right;
  uint32_t q_keep, q_flip;
  float logit_scale, cap_scale;
};

template <class Shape>
struct PagedSm90 : DenseRows<Shape, PagedSm90Params> {
  using Base = DenseRows<Shape, PagedSm90Params>;
  using Params = PagedSm90Params;
  using T = typename Shape::T;
  using Base::kv_head;
  static constexpr bool kPaged = true;
  static constexpr int kBlockK = Shape::kBlockK;

  // k_start: where the request's page numbers begin.
  struct Work : Base::Work {
    int rows;  // of the request that q has
  };
  __device__ static bool row_exists(const Work& work, int row) { return work.first_query + row < work.rows; }

  __device__ static int num_queries(const Params& p, int request) {
    const int first = p.q_indptr[request];
    return max(min(p.q_indptr[request + 1], p.q_rows) - first, 0);
  }
  __device__ static void find_request(const Params& p, Work& work) {
    work.q_start = p.q_indptr[work.request];
    work.seq_q = p.q_indptr[work.request + 1] - work.q_start;
    work.rows = num_queries(p, work.request);
    work.seq_k = p.kv_lens[work.request];
    work.k_start = p.page_begin[work.request];
  }

  __device__ static float* lse(const Params& p, const Work& work, int row) {
    return p.lse + (int64_t{work.q_start + work.first_query + row} * p.lse_row + work.head_ * p.lse_head);
  }
  __device__ static auto output(const Params& p, const Work& work) {
    using Out = typename Shape::OutElement;
    Out* out = static_cast<Out*>(p.out) + (int64_t{work.q_start + work.first_query} * p.out_row + work.head_ * p.out_head);
    return [out, &p](int row) { return out + row * p.out_row; };
  }

  // The page of a key in use, and its row there.
  struct Place {
    int page, row;
  };
  __device__ static Place place_of(const Params& p, const Work& work, int key) {
    const int index = static_cast<unsigned>(key) / static_cast<unsigned>(p.page_size);
    return {p.page_indices[work.k_start + index], key - index * p.page_size};
  }
  __device__ static const T* key_row(const Params& p, const Work& work, int key) {
    const Place at = place_of(p, work, key);
    return static_cast<const T*>(p.k) + (at.page * p.k_page + at.row * p.k_row + kv_head(p, work) * p.k_head);
  }

  // Where a tile's rows are, found before its place in the ring is free: that of lane's box.
  struct Boxes {
    static constexpr int kRows = Shape::kPageRows, kCount = kBlockK / kRows;
    static_assert(kBlockK % kRows == 0 && kCount <= kWarpSize && kRows % 8 == 0, "a lane for each box of whole groups of eight rows");
    Place at;

    __device__ void find(const Params& p, const Work& work, int tile) {
      const int key = tile * kBlockK + lane_id() * kRows;
      at = {0, p.page_size};  // zeros: behind the last row of a page
      if (lane_id() < kCount && key < work.seq_k) at = place_of(p, work, key);
    }
    __device__ void load_keys(const Params& p, const Work& work, uint32_t target, uint32_t full) const {
      load<Shape::kKeyBoxes, Shape::KeyBox::kBytes>(target, p.map_k, full, kv_head(p, work));
    }
    __device__ void load_values(const Params& p, const Work& work, uint32_t target, uint32_t full) const {
      load<Shape::kValueBoxes, Shape::Values::kBoxBytes>(target, p.map_v, full, kv_head(p, work));
    }

   private:
    template <int Across, int BoxBytes>
    __device__ void load(uint32_t target, const TensorMap& map, uint32_t full, int head) const {
      if (lane_id() == 0) barrier_arrive_expect(full, Across * BoxBytes);
      __syncwarp();
      if (lane_id() >= kCount) return;
#pragma unroll
      for (int i = 0; i < Across; ++i) {
        tma_load(target + i * BoxBytes + lane_id() * kRows * kSwizzleRowBytes, map, full, i * Shape::kBoxColumns, at.row, head, at.page);
      }
    }
  };

  // The same row by row: those of keys lane, lane + 32 .. of the tile.
  struct SingleRows {
    static constexpr int kHeld = ceil_div(kBlockK, kWarpSize);
    Place at[kHeld];
    int used;  // rows of the tile that have a key; zeros for the others

    __device__ void find(const Params& p, const Work& work, int tile) {
      used = work.seq_k - tile * kBlockK;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int row = i * kWarpSize + lane_id();
        at[i] = {0, 0};
        if (row < min(used, kBlockK)) at[i] = place_of(p, work, tile * kBlockK + row);
      }
    }
    __device__ void load_keys(const Params& p, const Work& work, uint32_t target, uint32_t full) const {
      const T* from = static_cast<const T*>(p.k) + kv_head(p, work) * p.k_head;
      load<Shape::kKeyBoxes, Shape::KeyBox::kBytes, Shape::kHeadDim>(target, from, p.k_page, p.k_row, full);
    }
    __device__ void load_values(const Params& p, const Work& work, uint32_t target, uint32_t full) const {
      const T* from = static_cast<const T*>(p.v) + kv_head(p, work) * p.v_head;
      load<Shape::kValueBoxes, Shape::Values::kBoxBytes, Shape::kHeadDimV>(target, from, p.v_page, p.v_row, full);
    }

   private:
    // Eight lanes bring 128 bytes of a row, a warp those of four rows, whose addresses come from the lanes that found them.
    template <int Across, int BoxBytes, int Columns>
    __device__ void load(uint32_t target, const T* tensor, int64_t page_stride, int64_t row_stride, uint32_t full) const {
      constexpr int kAtOnce = kWarpSize / 8;
      const int lane_row = lane_id() / 8, chunk = lane_id() % 8;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const uint64_t held = reinterpret_cast<uint64_t>(tensor + (at[i].page * page_stride + at[i].row * row_stride));
        const uint32_t low = static_cast<uint32_t>(held), high = static_cast<uint32_t>(held >> 32);
#pragma unroll 4
        for (int first = 0; first < min_of(kWarpSize, kBlockK - i * kWarpSize); first += kAtOnce) {
          const int row = i * kWarpSize + first + lane_row;
          const uint64_t from = uint64_t{__shfl_sync(kFullWarp, high, first + lane_row)} << 32 | __shfl_sync(kFullWarp, low, first + lane_row);
          const T* source = reinterpret_cast<const T*>(from) + chunk * 8;
          const uint32_t to = target + swizzled_chunk(row, chunk);
#pragma unroll
          for (int box = 0; box < Across; ++box) {
            const int column = box * Shape::kBoxColumns;
            const bool there = Columns % Shape::kBoxColumns == 0 || column + chunk * 8 < Columns;
            cp_async_16(to + box * BoxBytes, there ? source + column : tensor, there && row < used);
          }
        }
      }
      cp_async_arrive(full);
    }
  };

  template <bool Single, class Unused = void>
  struct Chosen {
    using Type = Boxes;
  };
  template <class Unused>
  struct Chosen<true, Unused> {
    using Type = SingleRows;
  };
  using Places = typename Chosen<Shape::kGathers>::Type;
};

}  // namespace kernelgen
