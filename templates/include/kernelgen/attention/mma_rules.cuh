// From scores to logits, and which keys a row may attend to.
//
// Without alibi, variants and scales a logit is a positive factor times the score (or times its soft-capped form): softmax
// applies the factor, and scores are touched here only in tiles that some rows see in part. With any of these features a
// pass over every score computes the logit in natural units and then times log2(e), in this order:
//
//   s = scale * q_scale * k_scale * score;  soft-cap;  - slope * |key - position|;  variant.score;  masks by selection
//
// `Layout` says where things lie: query(), head(), visible_keys() of a row, see mma_dense.cuh and mma_paged.cuh.
#pragma once

#include <kernelgen/attention/mma_shape.cuh>

namespace kernelgen {

template <class Shape, class Layout>
struct Rules {
  using Params = typename Layout::Params;
  using Work = typename Layout::Work;
  static constexpr int kLaneRows = Shape::kLaneRows;
  static constexpr int kKeyTiles = Shape::kKeyTiles;

  // The score of a key that a row may not attend to.
  __device__ static float hidden_score() { return Shape::kSoftmax ? -infinity() : 0.0f; }

  // A float32 scale by two strides; null is 1.
  __device__ static float scale_at(const float* scales, int64_t first, int64_t second) {
    return scales == nullptr ? 1.0f : scales[first + second];
  }

  // Everything about one row that its keys share. Rows past the request's last stand for that one: their results are not
  // stored, and what masks and variants index stays inside.
  struct Row {
    Interval keys;
    VariantContext context;
    const uint8_t* mask;   // of key 0; packed: of the byte that holds bit `mask_bit`
    int mask_bit;
    float factor, slope;
  };

  __device__ static Row row_of(const Params& p, const Work& work, int row_in_block) {
    const int query = min(Layout::query(p, work, row_in_block), work.seq_q - 1);
    const int head = Layout::head(p, work, row_in_block);
    Row row;
    row.keys = Layout::visible_keys(p, work, query);
    row.context = {work.request, head, Layout::kv_head(p, work), query, query + work.seq_k - work.seq_q, 0, work.seq_q, work.seq_k};
    if constexpr (Shape::kMask == kDenseMask) {
      row.mask = p.mask + work.request * p.mask_batch + head * p.mask_head + query * p.mask_row;
    } else if constexpr (Shape::kMask == kFlatMask) {
      row.mask = p.mask + p.mask_indptr[work.request] + int64_t{query} * work.seq_k;
    } else if constexpr (Shape::kMask == kPackedMask) {
      const int64_t bit = p.mask_indptr[work.request] + int64_t{query} * work.seq_k;
      row.mask = p.mask + (bit >> 3);
      row.mask_bit = static_cast<int>(bit & 7);
    }
    row.factor = Shape::kSoftCap ? p.cap_scale : p.logit_scale;
    if constexpr (Shape::kScales) {
      row.factor *= scale_at(p.q_scale, work.request * p.q_scale_batch, head * p.q_scale_head);
      if constexpr (!Shape::kPageScales && !Shape::kPlainRope) {
        row.factor *= scale_at(p.k_scale, work.request * p.k_scale_batch, Layout::kv_head(p, work) * p.k_scale_head);
      }
    }
    if constexpr (Shape::kAlibi) row.slope = p.alibi_slopes[work.request * p.alibi_batch + head * p.alibi_head];
    return row;
  }

  // Whether the row may attend to the key by the given mask and the variant; the key is one of the request.
  __device__ static bool admitted(const Params& p, const Row& row, const VariantContext& at) {
    bool admitted = true;
    if constexpr (Shape::kMask == kDenseMask) {
      admitted = row.mask[at.k_pos * p.mask_key] != 0;
    } else if constexpr (Shape::kMask == kFlatMask) {
      admitted = row.mask[at.k_pos] != 0;
    } else if constexpr (Shape::kMask == kPackedMask) {
      const unsigned bit = row.mask_bit + at.k_pos;
      admitted = (row.mask[bit >> 3] >> (bit & 7)) & 1;
    }
    if constexpr (Shape::kVariant) admitted = admitted && Layout::Variant::visible(at, p.variant_words);
    return admitted;
  }

  // Products of the latent parts of keys beside a plain rope part, which is not scaled: takes their scales.
  __device__ static void scale_latent(typename Shape::Scores& scores, const Params& p, const Work& work, uint32_t key_scales) {
    float factor = p.k_factor;
    if constexpr (Shape::kScales && !Shape::kPageScales) factor *= scale_at(p.k_scale, work.request * p.k_scale_batch, 0);
#pragma unroll
    for (int i = 0; i < Shape::kRowTiles * kKeyTiles * 4; ++i) {
      float of_key = factor;
      if constexpr (Shape::kPageScales) {
        of_key *= __uint_as_float(load_word(key_scales + (lane_id() % 4 * 2 + i / 4 % kKeyTiles * 8 + i % 2) * 4));
      }
      scores[i / (kKeyTiles * 4)][i / 4 % kKeyTiles][i % 4] *= of_key;
    }
  }

  // The full rule, for one key of a tile.
  __device__ static bool visible(const Params& p, const Work& work, int row_in_block, int key) {
    if constexpr (!Shape::kAnyHidden) {
      const Interval keys = Layout::visible_keys(p, work, Layout::query(p, work, row_in_block));
      return key >= keys.first && key < keys.last;
    } else {
      const Row row = row_of(p, work, row_in_block);
      if (key < row.keys.first || key >= row.keys.last) return false;
      VariantContext at = row.context;
      at.k_pos = key;
      return admitted(p, row, at);
    }
  }

  // Scores to logits in units of softmax's `scale`, or to weights without one; hidden ones to hidden_score(). `partial`: some row of the warp sees the tile in
  // part by position. key_scales: shared address of the tile's key scales (kPageScales).
  __device__ static void apply(
      typename Shape::Scores& scores, const Params& p, const Work& work, int first_key, bool partial, uint32_t key_scales) {
    if constexpr (Shape::kNatural || Shape::kAnyHidden) {
      one_by_one(scores, p, work, first_key, key_scales);
    } else {
      if constexpr (Shape::kSoftCap) {
#pragma unroll
        for (int i = 0; i < Shape::kRowTiles * kKeyTiles * 4; ++i) {
          float& score = scores[i / (kKeyTiles * 4)][i / 4 % kKeyTiles][i % 4];
          score = tanh_exp(score * p.cap_scale);
        }
      }
      if (partial) hide_outside(scores, p, work, first_key);
    }
  }

  // Sets scores outside each row's interval to -inf, whatever they are (K may hold NaN there).
  __device__ static void hide_outside(typename Shape::Scores& scores, const Params& p, const Work& work, int first_key) {
    const int column = first_key + lane_id() % 4 * 2;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const Interval keys = Layout::visible_keys(p, work, Layout::query(p, work, Shape::row_in_block(work.warp, r)));
      const int first = keys.first - column, last = keys.last - column;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[r / 2][n][r % 2 * 2 + e];
          const bool hidden = 8 * n + e >= last || (Shape::kBoundedLeft && 8 * n + e < first);
          score = hidden ? -infinity() : score;
        }
      }
    }
  }

  __device__ static void one_by_one(
      typename Shape::Scores& scores, const Params& p, const Work& work, int first_key, uint32_t key_scales) {
    const int lane_column = lane_id() % 4 * 2;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const Row row = row_of(p, work, Shape::row_in_block(work.warp, r));
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[r / 2][n][r % 2 * 2 + e];
          const int column = lane_column + 8 * n + e, key = first_key + column;
          VariantContext at = row.context;
          at.k_pos = min(key, work.seq_k - 1);  // keys past the last are hidden below; nothing is read for them
          if constexpr (Shape::kNatural) {
            score = logit(score, p, row, at, key_scales + column * 4);
          } else if constexpr (Shape::kSoftCap) {
            score = tanh_exp(score * p.cap_scale);
          }
          const bool hidden = key < row.keys.first || key >= row.keys.last || !admitted(p, row, at);
          score = hidden ? hidden_score() : score;
        }
      }
    }
  }

  // The natural logit times log2(e), or without a softmax the weight.
  __device__ static float logit(float score, const Params& p, const Row& row, const VariantContext& at, uint32_t key_scale) {
    float factor = row.factor;
    if constexpr (Shape::kPageScales && !Shape::kPlainRope) factor *= __uint_as_float(load_word(key_scale));
    float s = score * factor;
    if constexpr (Shape::kSoftCap) s = tanh_exp(s) * p.logit_scale;
    if constexpr (Shape::kAlibi) s = fmaf(-row.slope, fabsf(static_cast<float>(at.k_pos - at.q_pos)), s);
    if constexpr (Shape::kVariant) s = Layout::Variant::score(s, at, p.variant_words);
    return Shape::kSoftmax ? s * kLog2E : s;
  }
  // What softmax multiplies the scores with to get base-2 exponents. Soft-capped scores of a plain kernel are in units of
  // the cap; masked ones without any natural feature keep their factor.
  __device__ static float softmax_scale(const Params& p) {
    if constexpr (Shape::kNatural) return 1.0f;
    return p.logit_scale;
  }
};

}  // namespace kernelgen
