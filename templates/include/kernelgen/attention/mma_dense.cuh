// Where dense and ragged attention has its rows: a block owns consecutive queries of one head.
//
// Query i of a request has position i + seq_k - seq_q. By position it attends to the interval of keys [position - left,
// position + right] within [0, seq_k): causal attention is right = 0.
#pragma once

#include <kernelgen/attention/mma_copy.cuh>

namespace kernelgen {

// Strides are in elements. Ragged tensors have no batch stride (0). Pointers of features that are off are null.
struct PrefillMmaParams {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;                   // null when not asked for
  const int32_t* cu_seqlens_q;  // (batch + 1), null when dense
  const int32_t* cu_seqlens_k;
  const int32_t* kv_lens;       // (batch), null when every key counts
  const float* sinks;           // (heads)
  const float* alibi_slopes;
  const uint8_t* mask;          // see MaskForm
  const int64_t* mask_indptr;   // (batch + 1): first byte or bit of each request's mask
  const int64_t* variant_words;
  const float* q_scale;         // scales by request and head, null = 1
  const float* k_scale;
  const float* v_scale;
  int64_t q_batch, q_row, q_head;
  int64_t k_batch, k_row, k_head;
  int64_t v_batch, v_row, v_head;
  int64_t out_batch, out_row, out_head;
  int64_t lse_batch, lse_row, lse_head;
  int64_t alibi_batch, alibi_head;
  int64_t mask_batch, mask_row, mask_head, mask_key;
  int64_t q_scale_batch, q_scale_head, k_scale_batch, k_scale_head, v_scale_batch, v_scale_head;
  int32_t seq_q, seq_k;  // dense lengths; ragged requests read theirs from cu_seqlens
  int32_t batch;
  int32_t group_size;  // query heads per key/value head
  int32_t window_left, window_right;
  uint32_t q_keep, q_flip;  // bit masks applied to each query element: negates for a negative scale, clears for 0
  // Scores to base-2 exponents: |scale| * log2(e), or soft_cap * log2(e). Natural logits: the same without log2(e).
  float logit_scale;
  float cap_scale;  // |scale| / soft_cap
  float v_factor;   // fp8 values: a plain number among their scales
  int32_t grid_tiles, grid_parts;  // kFlatGrid: what would be gridDim.x and gridDim.y
};

// Which request, head and query each row of a block is, and where its results go. Params has out, lse and their strides, the windows and
// group_size.
template <class Shape, class ParamsOfKernel>
struct DenseRows {
  using Params = ParamsOfKernel;
  using Variant = typename Shape::VariantFunctions;

  // What this block works on.
  struct Work {
    int warp;                // of this thread
    int request, head_, value_column;
    int first_query;         // of the tile, within the request
    int seq_q, seq_k;        // of the request
    int q_start, k_start;    // rows in front of the request (ragged)
  };

  __device__ static int query(const Params&, const Work& work, int row) { return work.first_query + row; }
  // The query of the last row in front of row `end` of the block.
  __device__ static int last_query(const Params&, const Work& work, int end) {
    return min(work.first_query + end, work.seq_q) - 1;
  }
  __device__ static int head(const Params&, const Work& work, int) { return work.head_; }
  __device__ static int kv_head(const Params& p, const Work& work) { return work.head_ / p.group_size; }
  __device__ static int num_rows(const Work& work) { return work.seq_q - work.first_query; }  // of this block and later ones
  __device__ static bool row_exists(const Work& work, int row) { return work.first_query + row < work.seq_q; }
  __device__ static float value_reference(const Work&) { return 1.0f; }

  // Keys that the query may attend to by position.
  __device__ static Interval visible_keys(const Params& p, const Work& work, int query) {
    const int position = query + work.seq_k - work.seq_q;
    Interval keys{0, work.seq_k};
    if constexpr (Shape::kBoundedLeft) keys.first = max(0, position - p.window_left);
    if constexpr (Shape::kBoundedRight) keys.last = min(work.seq_k, position + p.window_right + 1);
    return keys;
  }

  __device__ static float* lse(const Params& p, const Work& work, int row) {
    const int query = work.first_query + row;
    return p.lse + (work.request * p.lse_batch + int64_t{work.q_start + query} * p.lse_row + work.head_ * p.lse_head);
  }
  // row of the block -> address of the first of this block's value columns
  __device__ static auto output(const Params& p, const Work& work) {
    using Out = typename Shape::OutElement;
    Out* out = static_cast<Out*>(p.out) + work.request * p.out_batch + work.head_ * p.out_head + work.value_column;
    return [out, &p, &work](int row) { return out + int64_t{work.q_start + (work.first_query + row)} * p.out_row; };
  }
};

template <class Shape>
struct DenseLayout : DenseRows<Shape, PrefillMmaParams> {
  using Base = DenseRows<Shape, PrefillMmaParams>;
  using Params = PrefillMmaParams;
  using Work = typename Base::Work;
  using T = typename Shape::T;
  using KeyElement = typename Shape::KeyElement;
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  using KeyCopier = Copier<Shape, KeyTile>;
  using ValueCopier = Copier<Shape, ValueTile>;
  using Base::num_rows;
  static constexpr int kBlockQ = Shape::kBlockQ;
  static constexpr int kBlockK = Shape::kBlockK;
  static constexpr bool kPartials = false;

  // Finds this block's request, head and query tile. The grid is (query tiles, heads x value splits, requests), for a
  // ragged batch (a bound on the query tiles of all requests, heads x value splits, 1); flat: all of that in one dimension, the
  // tiles fastest. False past the last tile.
  __device__ static bool find_work(const Params& p, Work& work) {
    work.warp = warp_id();
    int tile = blockIdx.x, tiles = gridDim.x;
    unsigned part = blockIdx.y;
    work.request = blockIdx.z;
    if constexpr (Shape::kFlatGrid) {
      tiles = p.grid_tiles;
      const int row = blockIdx.x / tiles;
      tile = blockIdx.x % tiles;
      part = row % p.grid_parts;
      work.request = row / p.grid_parts;
    }
    work.head_ = part / Shape::kValueSplits;
    work.value_column = part % Shape::kValueSplits * Shape::kSplitColumns;
    work.seq_q = p.seq_q;
    work.seq_k = p.seq_k;
    work.q_start = work.k_start = 0;
    if constexpr (Shape::kRagged) {
      // The tile is found by a prefix sum of ceil(length / kBlockQ), 32 requests at a time, in every warp alike.
      int before = 0;
      int first = 0;
      for (;; first += kWarpSize) {
        if (first >= p.batch) return false;
        const int b = first + lane_id();
        const int length = b < p.batch ? p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b] : 0;
        const int own = (length + kBlockQ - 1) / kBlockQ;
        const int through = before + warp_inclusive_scan(own);
        const uint32_t past = __ballot_sync(kFullWarp, through > tile);
        if (past != 0) {
          const int lane = __ffs(past) - 1;
          work.request = first + lane;
          tiles = __shfl_sync(kFullWarp, own, lane);
          tile -= __shfl_sync(kFullWarp, through, lane) - tiles;
          break;
        }
        before = __shfl_sync(kFullWarp, through, kWarpSize - 1);
      }
      work.q_start = p.cu_seqlens_q[work.request];
      work.k_start = p.cu_seqlens_k[work.request];
      work.seq_q = p.cu_seqlens_q[work.request + 1] - work.q_start;
      work.seq_k = p.cu_seqlens_k[work.request + 1] - work.k_start;
    }
    if constexpr (Shape::kKvLens) work.seq_k = min(max(p.kv_lens[work.request], 0), work.seq_k);
    // Under a right bound later tiles see more keys: they start first, so that the last wave is of short ones.
    if constexpr (Shape::kBoundedRight) tile = tiles - 1 - tile;
    work.first_query = tile * kBlockQ;
    return true;
  }

  __device__ static void load_queries(const Params& p, const Work& work, uint32_t shared) {
    using Q = typename Shape::QueryElement;
    const Q* q = static_cast<const Q*>(p.q) + work.request * p.q_batch + work.head_ * p.q_head;
    const int64_t first = int64_t{work.q_start + work.first_query};
    if constexpr (is_fp8_v<Q>) {
      load_query_rows<Shape>(shared, [&](int row) {
        const Q* from = q + (first + row) * p.q_row;
        return [from](int column) { return from + column; };
      }, num_rows(work));
    } else {
      using C = Copier<Shape, typename Shape::QueryTile>;
      const T* q_from = C::start(q + first * p.q_row, p.q_row);
      C::load(shared, q_from, p.q_row, num_rows(work), Shape::kHeadDim);
    }
  }

  // Copies tiles of keys and values in order, each once.
  struct Loader {
    const Params& p;
    const Work& work;
    const KeyElement* k_from;
    const KeyElement* v_from;
    int value_columns;

    __device__ Loader(const Params& params, const Work& block, int tile, bool /*any*/) : p(params), work(block) {
      const int kv_head = DenseLayout::kv_head(p, work);
      const KeyElement* k = static_cast<const KeyElement*>(p.k) + work.request * p.k_batch + kv_head * p.k_head;
      const KeyElement* v =
          static_cast<const KeyElement*>(p.v) + work.request * p.v_batch + kv_head * p.v_head + work.value_column;
      k_from = k + int64_t{work.k_start + tile * kBlockK} * p.k_row;
      v_from = v + int64_t{work.k_start + tile * kBlockK} * p.v_row;
      if constexpr (!Shape::kStaged) {
        k_from = KeyCopier::start(k_from, p.k_row);
        v_from = ValueCopier::start(v_from, p.v_row);
      }
      value_columns = Shape::kHeadDimV % Shape::kSplitColumns == 0 ? Shape::kSplitColumns
                                                                   : min(Shape::kSplitColumns, Shape::kHeadDimV - work.value_column);
    }

    __device__ void load_keys(uint32_t shared, int first_key) {
      KeyCopier::load(shared, k_from, p.k_row, work.seq_k - first_key, Shape::kHeadDim);
    }
    __device__ void load_values(uint32_t shared, int first_key) {
      ValueCopier::load(shared, v_from, p.v_row, work.seq_k - first_key, value_columns);
    }

    using KeyBytes = ByteCopier<Shape, KeyTile, widest_across(KeyTile::kChunks / 2)>;
    using ValueBytes = ByteCopier<Shape, ValueTile, widest_across(ValueTile::kChunks / 2)>;
    __device__ void load_bytes(uint32_t slot, uint32_t /*scales*/, uint32_t /*rope*/, int first_key) {
      auto rows = [](const KeyElement* from, int64_t stride) {
        return [from, stride](int, int row) {
          const KeyElement* address = from + row * stride;
          return [address](int column) { return address + column; };
        };
      };
      KeyBytes::load_rows(slot, rows(k_from, p.k_row), work.seq_k - first_key, Shape::kHeadDim);
      ValueBytes::load_rows(slot + Shape::kKeyStageBytes, rows(v_from, p.v_row), work.seq_k - first_key, value_columns);
      k_from += kBlockK * p.k_row;
      v_from += kBlockK * p.v_row;
    }
  };
};

}  // namespace kernelgen
