// Attention forward on a CPU: out = softmax(mask(bias(cap(scale * q k^T)))) v, with online softmax. The body that dense,
// ragged and paged calls share.
//
// Everything is computed transposed: a register lane is a query row. One panel is kWidth rows (32 floats with AVX-512),
//
//   scores  S^T[key][row] = K[key][:]  . Q^T[:][row]      K is broadcast element by element, Q^T is packed once a task
//   weights P^T[key][row] = exp(S^T - peak[row])          maximum, sum and rescaling are vertical: no shuffles
//   output  O^T[col][row] += V^T[col][:] . P^T[:][row]    V is broadcast, P^T is read where the softmax left it
//
// so that neither K nor V is ever transposed, and rows never mix: what a lane holds beyond its own row, a NaN included,
// stays there. The query heads of a group lie side by side: row r of a request is query r / group_size of head
// r % group_size, so one load of K and V serves the whole group, and a single query of a large group still fills lanes.
//
// A task is `task_rows` consecutive rows against one key head:
//
//   for each tile of kBlockK keys that any of its rows may see          (tile borders at multiples of kBlockK)
//     copy K [key][D] and V [D / kRows][key][kRows] into scratch, widened to the operand type      (pack_cpu.h)
//     for each panel of the task
//       scores with running maximum; weights and their sum; O^T = O^T * alpha + V^T P^T
//
// Operands are those of ProductFor<Query, KeyValue>: bf16 pairs along the depth with AVX512_BF16, else float (double for
// double). Packed Q^T [D][row], P^T and V of a pair product hold two neighbours of the depth in each 32-bit lane.
//
// Causality and windows are ranges: a row sees keys first[row] .. end[row] - 1. Tiles inside every row's range skip the
// mask; keys past every row's range are never read. Given masks and variants decide key by key (visibility_cpu.h). A tile
// that some rows see only in part has weight 0 times V there, so its V is searched for NaN and inf first; if there are
// any, that tile goes through `careful_output`, which selects.
//
// A variant may do without the softmax (kSoftmax false): the scores themselves are P^T, 0 where a row does not see a key, and
// there is neither maximum nor sum.
//
// The result of a row depends on nothing but its own request: panels and tiles begin at fixed rows and keys of it, and
// sums run in key order.
#pragma once

#include "kernelgen/attention/logit_cpu.h"
#include "kernelgen/attention/pack_cpu.h"
#include "kernelgen/attention/thin_cpu.h"
#include "kernelgen/attention/visibility_cpu.h"

namespace kernelgen {

template <class Options_>
struct AttentionCpu {
  using Options = Options_;
  using G = Geometry<Options>;
  using Params = AttentionCpuParams;
  using Query = typename G::Query;
  using Product = typename G::Product;
  using Operand = typename G::Operand;
  using V = typename G::V;
  using Reg = typename G::Reg;
  using Scalar = typename G::Scalar;
  using Panel = typename G::Panel;
  using Task = typename G::Task;
  using Range = typename G::Range;
  using Buffers = typename G::Buffers;
  using Pack = Packing<G>;
  using Thin = ThinPanel<G>;
  template <int kUsed>
  using TileOf = kernelgen::Tile<Product, kTileRows, kUsed>;

  static constexpr int kHeadDim = G::kHeadDim, kHeadDimV = G::kHeadDimV, kRopeDim = G::kRopeDim, kBlockK = G::kBlockK;
  static constexpr int kRows = G::kRows, kVecs = G::kVecs, kLanes = G::kLanes, kWidth = G::kWidth, kDepth = G::kDepth;
  static constexpr Scalar kMinusInfinity = G::kMinusInfinity;
  // Every sum (over the depth, over keys) is cut into blocks of this many terms. With one chain over a depth of 512 the
  // largest error of a float call was 3.5 times that of torch's matmul, with blocks of 64 it was 1.5 times, with 32
  // about the same as torch's; on Zen 4 none of them costs time.
  static constexpr int kSumBlock = 32;

  // ---- Queries ----------------------------------------------------------------------------------------------------

  // Up to kLanes operand words of depth: floats, or 32-bit pairs moved as floats without arithmetic.
  static KERNELGEN_INLINE Reg load_words(const Query* x, int64_t words) {
    if constexpr (kDepth == 2) return V::load_first(reinterpret_cast<const Scalar*>(x), words);
    else return load_first_as<V>(x, words);
  }

  // Depth [first, first + kDim) of Q^T from a tensor whose rows begin at `base`.
  template <int kDim>
  static void pack_depth(const Params& p, Panel& panel, const Query* base, int64_t row_stride, int64_t head_stride, int first,
                         int64_t row, int64_t rows) {
    constexpr int kWords = kDim / kDepth;
    Scalar* packed = reinterpret_cast<Scalar*>(panel.queries) + first / kDepth * kWidth;
    for (int v = 0; v < kVecs; ++v) {
      const Query* source[kLanes];
      for (int l = 0; l < kLanes; ++l) {
        const int64_t r = row + v * kLanes + l;
        source[l] = base + r / p.group_size * row_stride + r % p.group_size * head_stride;
      }
      for (int w = 0; w < kWords; w += kLanes) {
        Reg x[kLanes];
        for (int l = 0; l < kLanes; ++l)
          x[l] = v * kLanes + l < rows ? load_words(source[l] + w * kDepth, kWords - w) : V::zero();
        V::transpose(x);
        for (int i = 0; i < kLanes && w + i < kWords; ++i) V::store(packed + (w + i) * kWidth + v * kLanes, x[i]);
      }
    }
  }

  static void pack_queries(const Params& p, const Task& t, Panel& panel, int64_t row, int64_t rows) {
    const int64_t first_head = t.head * p.group_size;
    const Query* base = static_cast<const Query*>(p.q) + t.batch * p.q_batch + t.q_begin * p.q_row + first_head * p.q_head;
    pack_depth<kHeadDim - kRopeDim>(p, panel, base, p.q_row, p.q_head, 0, row, rows);
    if constexpr (kRopeDim > 0) {
      const Query* rope = static_cast<const Query*>(p.q_rope) + t.q_begin * p.q_rope_row + first_head * p.q_rope_head;
      pack_depth<kRopeDim>(p, panel, rope, p.q_rope_row, p.q_rope_head, kHeadDim - kRopeDim, row, rows);
    }
    const Scalar factor = Logit<G>::query_factor(p);
    if constexpr (Options::kScales != Scales::kNone || G::kPlainRope) scale_queries(p, t, panel, row, factor);
    else if (factor != 1)
      for (Operand& x : panel.queries) x = narrow<Operand>(widen(x) * factor);
  }

  // Scales of a row's query and, where they do not change from page to page, of its keys. `plain`: for the rope part of keys
  // that has no scale.
  static Scalar query_scale(const Params& p, const Task& t, int64_t row, bool plain = false) {
    Scalar scale = 1;
    if constexpr (Options::kScales != Scales::kNone) {
      const int64_t head = t.head * p.group_size + row % p.group_size;
      if (p.q_scale) scale = p.q_scale[t.batch * p.q_scale_batch + head * p.q_scale_head];
      if (!G::kPageScales && !plain && p.k_scale) scale *= p.k_scale[t.batch * p.k_scale_batch + t.head * p.k_scale_head];
    }
    if constexpr (G::kPlainRope)
      if (!plain) scale *= Scalar(p.k_factor);
    return scale;
  }

  static void scale_queries(const Params& p, const Task& t, Panel& panel, int64_t row, Scalar factor) {
    constexpr int kScaled = kHeadDim - (G::kPlainRope ? kRopeDim : 0);
    scale_depth(p, t, panel, row, factor, 0, kScaled);
    if constexpr (G::kPlainRope) scale_depth(p, t, panel, row, factor, kScaled, kHeadDim);
  }
  static void scale_depth(const Params& p, const Task& t, Panel& panel, int64_t row, Scalar factor, int first, int end) {
    alignas(64) Scalar of_row[kWidth];
    for (int l = 0; l < kWidth; ++l) of_row[l] = factor * query_scale(p, t, row + l, first > 0);
    for (int d = first; d < end; ++d)
      for (int v = 0; v < kVecs; ++v) {
        Operand* x = panel.queries + d * kWidth + v * kLanes;
        V::store(x, V::load(x) * V::load(of_row + v * kLanes));
      }
  }

  // As pack_queries, row by row.
  static void pack_thin_queries(const Params& p, const Task& t, Panel& panel, int64_t row, int64_t rows) {
    std::memset(panel.queries, 0, sizeof panel.queries);
    for (int l = 0; l < rows; ++l) {
      const int64_t query = t.q_begin + (row + l) / p.group_size, head = t.head * p.group_size + (row + l) % p.group_size;
      const Scalar sign = Logit<G>::query_factor(p), factor = sign * query_scale(p, t, row + l);
      Scalar* packed = Thin::query(panel, l);
      Thin::template pack_row<kHeadDim - kRopeDim>(
          static_cast<const Query*>(p.q) + t.batch * p.q_batch + query * p.q_row + head * p.q_head, packed, factor);
      if constexpr (kRopeDim > 0)
        Thin::template pack_row<kRopeDim>(static_cast<const Query*>(p.q_rope) + query * p.q_rope_row + head * p.q_rope_head,
                                          packed + Thin::padded(kHeadDim - kRopeDim),
                                          G::kPlainRope ? sign * query_scale(p, t, row + l, true) : factor);
    }
  }

  // The keys each row sees, and their union and intersection.
  static void set_ranges(const Params& p, const Task& t, Panel& panel, int64_t row, int64_t rows) {
    Range range = Range::of_no_row(t.k_len);
    for (int l = 0; l < kWidth; ++l) {
      int64_t first = t.chunk_begin, end = t.chunk_end;
      const int64_t r = row + (l < rows ? l : rows - 1);
      const int64_t position = r / p.group_size + t.k_len - t.q_len;
      if constexpr (Options::kBoundedRight) end = clamp(position + p.window_right + 1, first, end);
      if constexpr (Options::kBoundedLeft) first = clamp(position - p.window_left, first, end);
      panel.first[l] = first;
      panel.end[l] = end;
      range.join({first, end, first, end});
    }
    panel.range = range;
  }

  static void set_lane_ids(const Params& p, const Task& t, Panel& panel, int64_t row, int64_t rows) {
    for (int l = 0; l < kWidth; ++l) {
      const int64_t r = row + (l < rows ? l : rows - 1), head = t.head * p.group_size + r % p.group_size;
      panel.ids.query[l] = int32_t(r / p.group_size);
      panel.ids.head[l] = int32_t(head);
      if constexpr (Options::kAlibi)
        panel.ids.slope[l] = p.alibi_slopes[t.batch * p.alibi_batch + head * p.alibi_head];
    }
  }

  static void begin_panel(const Params& p, const Task& t, Panel& panel, int64_t row, int64_t rows) {
    (Thin::fits(rows) ? pack_thin_queries : pack_queries)(p, t, panel, row, rows);
    set_ranges(p, t, panel, row, rows);
    panel.rows = rows < kWidth ? rows : kWidth;
    if constexpr (G::kBits || G::kNatural) set_lane_ids(p, t, panel, row, rows);
    std::memset(panel.output, 0, sizeof panel.output);
    std::memset(panel.total, 0, sizeof panel.total);
    for (int l = 0; l < kWidth; ++l) panel.peak[l] = kMinusInfinity;
  }

  // ---- One panel against one tile ---------------------------------------------------------------------------------
  // kUsed: how many of a panel's kVecs registers hold rows; a panel of few rows (decoding) computes only the first.

  // The rows that the next tile will pack. Their cache lines are asked for while the first panel computes: the tokens
  // of one head lie far apart, and hardware prefetching stops at the end of each row. Decoding (fp32, 16 heads, 2048
  // keys, one core of Zen 4): 5.7 ms without, 5.2 ms with prefetching 8 rows ahead of the packing, 3.9 ms with this.
  template <class Tile>
  struct NextTile {
    const Tile& tile;
    int begin, end;

    KERNELGEN_INLINE void prefetch(int from) const { prefetch_rows(from > begin ? from : begin, from + kRows); }
    // The thin path has no packing that would begin at a multiple of kRows.
    KERNELGEN_INLINE void prefetch_some(int done, int count) const { prefetch_rows(begin + done, begin + done + count); }

    KERNELGEN_INLINE void prefetch_rows(int from, int to) const {
      constexpr int kLine = 64 / int(sizeof(typename G::KeyValue)), kRopeLine = 64 / int(sizeof(typename G::Rope));
      for (int j = from; j < to && j < end; ++j) {
        for (int d = 0; d < kHeadDim - kRopeDim; d += kLine) __builtin_prefetch(tile.key(j) + d, 0, 2);
        if constexpr (kRopeDim > 0)
          for (int d = 0; d < kRopeDim; d += kRopeLine) __builtin_prefetch(tile.rope(j) + d, 0, 2);
        else
          for (int d = 0; d < kHeadDimV; d += kLine) __builtin_prefetch(tile.value(j) + d, 0, 2);
      }
    }
  };

  // Tile sums over `count` elements of depth, in blocks of kSumBlock. b is a packed panel from its first element on.
  // With AVX2 a call of its own: one tile fills the 16 registers, and amid other code GCC 12 spills accumulators in the
  // inner loop, which halves its speed. "+m" keeps the sums in memory for the same reason.
  template <int kUsed, int kRowStride, int kStepStride>
#if defined(__AVX512F__)
  static KERNELGEN_INLINE
#else
  static __attribute__((noinline))
#endif
  TileOf<kUsed> product(const Operand* a, const Operand* b, int count) {
    TileOf<kUsed> sum;
    sum.clear();
#pragma GCC unroll 1
    for (int at = 0; at < count; at += kSumBlock) {
      TileOf<kUsed> part;
      part.clear();
#if !defined(__AVX512F__)
      asm volatile("" : "+m"(sum));
#endif
      part.multiply(a + at / kDepth * kStepStride, kRowStride, kStepStride, b + at * kWidth,
                    (count - at < kSumBlock ? count - at : kSumBlock) / kDepth, kWidth * kDepth);
      sum.add(part);
    }
    return sum;
  }

  // S^T of keys [begin, end) of the tile, -inf where a row does not see a key; raises `peak` to the new maxima.
  template <int kUsed, class SightOf, class BiasOf, class Next>
  static void scores(const Panel& panel, const Buffers& b, const Logit<G>& logit, const SightOf& sight, const BiasOf& bias,
                     const Next& next, int begin, int end, Reg (&peak)[kUsed]) {
    Reg top[kUsed];
    for (int v = 0; v < kUsed; ++v) top[v] = peak[v];
    for (int j = begin; j < end; j += kRows) {
      next.prefetch(j);
      const TileOf<kUsed> t = product<kUsed, kHeadDim, kDepth>(b.keys + j * kHeadDim, panel.queries, kHeadDim);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kUsed; ++v) {
          const Reg s = bias.add(j + r, v, logit.kept(t.acc[r][v]));
          V::store(b.scores + (j + r) * kWidth + v * kLanes, keep_visible(sight, j + r, v, s, top[v]));
        }
    }
    for (int v = 0; v < kUsed; ++v) peak[v] = top[v];
  }

  // A variant may yet change the score: it is masked, and its maximum taken, behind it.
  template <class SightOf>
  static KERNELGEN_INLINE Reg keep_visible(const SightOf& sight, int j, int v, Reg score, Reg& top) {
    if constexpr (G::kVariant) return score;
    const Reg s = sight.choose(j, v, score, V::broadcast(kMinusInfinity));
    top = V::max(s, top);  // drops a NaN, which reaches the result through its weight
    return s;
  }

  // score() of each logit that a row sees, then what `scores` left undone.
  template <int kUsed>
  static void vary_scores(const Params& p, const Task& t, const Panel& panel, const Buffers& b, const BitSight<G>& sight,
                          int64_t tile, int begin, int end, Reg (&peak)[kUsed]) {
    for (int j = begin; j < end; ++j) {
      Scalar* s = b.scores + j * kWidth;
      for (uint32_t left = sight.seen[j]; left; left &= left - 1) {
        const int l = __builtin_ctz(left);
        s[l] = Options::Variant::score(s[l], Visibility<G>::context(p, t, panel, l, tile + j), p.variant_words);
      }
      for (int v = 0; v < kUsed; ++v) {
        const Reg unseen = G::kSoftmax ? V::broadcast(kMinusInfinity) : V::zero();
        const Reg x = sight.choose(j, v, V::load(s + v * kLanes), unseen);
        if constexpr (G::kSoftmax) peak[v] = V::max(x, peak[v]);
        V::store(s + v * kLanes, x);
      }
    }
  }

  // P^T: in place, or as pairs in their own buffer. Returns the sums in `total`.
  template <int kUsed, bool kPairs = kDepth == 2>
  static void weights(const Buffers& b, const Logit<G>& logit, int begin, int end, const Reg (&peak)[kUsed],
                      Reg (&total)[kUsed]) {
    constexpr int kDegree = G::kExpDegree;
    for (int v = 0; v < kUsed; ++v) total[v] = V::zero();
    for (int block = begin; block < end; block += kSumBlock) {
      Reg sum[kUsed];
      for (int v = 0; v < kUsed; ++v) sum[v] = V::zero();
      for (int j = block; j < end && j < block + kSumBlock; j += kPairs ? 2 : 1) {
#pragma GCC unroll 8
        for (int v = 0; v < kUsed; ++v) {
          Scalar* s = b.scores + j * kWidth + v * kLanes;
          const Reg p = logit.template weight<kDegree>(V::load(s), peak[v]);
          sum[v] = sum[v] + p;
          if constexpr (kPairs) {
            const Reg next = logit.template weight<kDegree>(V::load(s + kWidth), peak[v]);
            sum[v] = sum[v] + next;
            _mm512_storeu_si512(b.weights + j * kWidth + v * kLanes * 2, Product::narrow_pairs(p, next));
          } else {
            V::store(s, p);
          }
        }
      }
      for (int v = 0; v < kUsed; ++v) total[v] = total[v] + sum[v];
    }
  }

  // O^T = O^T * alpha + V^T P^T over keys [begin, end).
  template <int kUsed>
  static void output(Panel& panel, const Buffers& b, int begin, int end, const Reg (&alpha)[kUsed]) {
    const Operand* weights = b.weights + begin * kWidth;
    const Operand* values = b.values + begin * kRows;
    for (int d = 0; d < kHeadDimV; d += kRows) {
      const TileOf<kUsed> t =
          product<kUsed, kDepth, kRows * kDepth>(values + d / kRows * G::kValueStrip, weights, end - begin);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kUsed; ++v) {
          Scalar* o = panel.output + (d + r) * kWidth + v * kLanes;
          V::store(o, V::fma(V::load(o), alpha[v], t.acc[r][v]));
        }
    }
  }

  static Reg weight_at(const Buffers& b, int j, int v) {
    if constexpr (kDepth == 2) {
      const __m512i pair = _mm512_loadu_si512(b.weights + j / 2 * 2 * kWidth + v * kLanes * 2);
      const __m512i odd = _mm512_and_si512(pair, _mm512_set1_epi32(int(0xffff0000u)));
      return _mm512_castsi512_ps(j % 2 ? odd : _mm512_slli_epi32(pair, 16));
    } else {
      return V::load(b.scores + j * kWidth + v * kLanes);
    }
  }

  // `output` for a tile whose V holds NaN or inf that some rows must not see: a row adds only keys that it sees.
  template <int kUsed, class SightOf>
  static __attribute__((noinline)) void careful_output(Panel& panel, const Buffers& b, const SightOf& sight, int begin,
                                                       int end, const Reg (&alpha)[kUsed]) {
    for (int d = 0; d < kHeadDimV; ++d)
      for (int v = 0; v < kUsed; ++v) {
        Reg acc = V::zero();
        for (int j = begin; j < end; ++j) {
          const Reg value = V::broadcast(Pack::value_at(b.values, j, d));
          acc = sight.choose(j, v, V::fma(weight_at(b, j, v), value, acc), acc);
        }
        Scalar* o = panel.output + d * kWidth + v * kLanes;
        V::store(o, V::fma(V::load(o), alpha[v], acc));
      }
  }

  static auto bias_of([[maybe_unused]] const Task& t, [[maybe_unused]] const Panel& panel, [[maybe_unused]] int64_t tile) {
    if constexpr (Options::kAlibi) return Alibi<G>(t, panel, tile);
    else return NoBias{};
  }

  // use(sight, finite): what rows see of keys [begin, last), and whether 0 times any of their values is 0. Keys up to `end`
  // are stale.
  template <class Use>
  static KERNELGEN_INLINE void with_sight([[maybe_unused]] const Params& p, [[maybe_unused]] const Task& t, const Panel& panel,
                                          int64_t tile, int begin, [[maybe_unused]] int last, int end, Use use) {
    if constexpr (G::kBits) {
      BitSight<G> sight;
      Visibility<G>::fill(p, t, panel, tile, begin, last, end, sight);
      use(sight, false);
    } else if (panel.range.every_first <= tile + begin && panel.range.every_end >= tile + end) {
      use(FullSight<G>{}, true);
    } else {
      use(RangeSight<G>(panel, tile), false);
    }
  }

  template <int kUsed, class Next>
  static void step(const Params& p, const Task& t, Panel& panel, const Buffers& b, const Logit<G>& logit, int64_t tile,
                   int loaded_end, bool finite, const Next& next) {
    const int begin = int(clamp(panel.range.any_first - tile, 0, kBlockK)) / kRows * kRows;
    const int last = int(clamp(panel.range.any_end - tile, 0, loaded_end));
    const int end = (last + kRows - 1) / kRows * kRows;
    if (begin >= end) return;
    const auto bias = bias_of(t, panel, tile);
    with_sight(p, t, panel, tile, begin, last, end, [&](const auto& sight, bool whole) __attribute__((always_inline)) {
      Reg before[kUsed], peak[kUsed], alpha[kUsed];
      for (int v = 0; v < kUsed; ++v) before[v] = peak[v] = V::load(panel.peak + v * kLanes);
      scores(panel, b, logit, sight, bias, next, begin, end, peak);
      if constexpr (G::kVariant) vary_scores(p, t, panel, b, sight, tile, begin, end, peak);
      if constexpr (G::kSoftmax) add_weights<kUsed, kDepth == 2>(panel, b, logit, begin, end, before, peak, alpha);
      else keep_weights<kUsed, kDepth == 2>(b, begin, end, alpha);
      if (whole || finite) output(panel, b, begin, end, alpha);
      else careful_output(panel, b, sight, begin, last, alpha);
    });
  }

  // A panel of few rows, from keys and values as they lie.
  template <class Tile>
  static void thin_step(const Params& p, const Task& t, Panel& panel, const Buffers& b, const Logit<G>& logit, int64_t tile,
                        const Tile& from, int loaded_end, const NextTile<Tile>& next) {
    const int begin = int(clamp(panel.range.any_first - tile, 0, kBlockK));
    const int last = int(clamp(panel.range.any_end - tile, 0, loaded_end));
    if (begin >= last) return;
    const auto bias = bias_of(t, panel, tile);
    Thin::dots(panel, from, next, b.scores, begin, last);
    with_sight(p, t, panel, tile, begin, last, last, [&](const auto& sight, bool whole) __attribute__((always_inline)) {
      Reg before[1] = {V::load(panel.peak)}, peak[1] = {before[0]}, alpha[1];
      for (int j = begin; j < last; ++j) {
        Scalar* s = b.scores + j * kWidth;
        V::store(s, keep_visible(sight, j, 0, bias.add(j, 0, logit.kept(V::load(s))), peak[0]));
      }
      if constexpr (G::kVariant) vary_scores(p, t, panel, b, sight, tile, begin, last, peak);
      if constexpr (G::kSoftmax) add_weights<1, false>(panel, b, logit, begin, last, before, peak, alpha);
      else keep_weights<1, false>(b, begin, last, alpha);
      if constexpr (G::kPageScales) Thin::scale_weights(from, b.scores, begin, last);
      alignas(64) Scalar shrink[kLanes];
      V::store(shrink, alpha[0]);
      if (whole || Thin::all_finite(from, begin, last)) Thin::output(panel, from, b.scores, begin, last, shrink);
      else Thin::careful_output(panel, from, sight, b.scores, begin, last, shrink);
    });
  }

  // Weights and their sums behind the scores of keys [begin, end); `alpha` rescales from the maximum `before` to `peak`.
  template <int kUsed, bool kPairs>
  static KERNELGEN_INLINE void add_weights(Panel& panel, const Buffers& b, const Logit<G>& logit, int begin, int end,
                                           const Reg (&before)[kUsed], Reg (&peak)[kUsed], Reg (&alpha)[kUsed]) {
    Reg total[kUsed];
    const Reg minus_infinity = V::broadcast(kMinusInfinity);
    for (int v = 0; v < kUsed; ++v) {
      V::store(panel.peak + v * kLanes, peak[v]);
      // A row that has seen nothing yet: -inf - 0 stays -inf, where -inf - -inf would be NaN.
      peak[v] = V::select(V::equal(peak[v], minus_infinity), V::zero(), peak[v]);
      alpha[v] = logit.weight(before[v], peak[v]);
    }
    weights<kUsed, kPairs>(b, logit, begin, end, peak, total);
    for (int v = 0; v < kUsed; ++v) {
      Scalar* sum = panel.total + v * kLanes;
      V::store(sum, V::fma(V::load(sum), alpha[v], total[v]));
    }
  }

  // Without a softmax the scores are the weights, and the output is never rescaled.
  template <int kUsed, bool kPairs>
  static KERNELGEN_INLINE void keep_weights(const Buffers& b, int begin, int end, Reg (&alpha)[kUsed]) {
    for (int v = 0; v < kUsed; ++v) alpha[v] = V::broadcast(1);
    if constexpr (kPairs) {
      for (int j = begin; j < end; j += 2)
        for (int v = 0; v < kUsed; ++v) {
          const Scalar* s = b.scores + j * kWidth + v * kLanes;
          _mm512_storeu_si512(b.weights + j * kWidth + v * kLanes * 2, Product::narrow_pairs(V::load(s), V::load(s + kWidth)));
        }
    }
  }

  // ---- A task -----------------------------------------------------------------------------------------------------

  // All keys that the rows of a task see, tile by tile. `source` finds keys: locate(tile, first key, begin, end).
  template <class Source>
  static void attend(const Params& p, const Task& t, const Source& source, const Buffers& b, const Logit<G>& logit) {
    const int panels = int((t.rows + kWidth - 1) / kWidth);
    Range range = Range::of_no_row(t.k_len);
    for (int i = 0; i < panels; ++i) {
      begin_panel(p, t, b.panels[i], t.row + i * kWidth, t.rows - i * kWidth);
      range.join(b.panels[i].range);
    }
    typename Source::Tile tiles[2];
    const auto find = [&](typename Source::Tile& found, int64_t tile, int& begin, int& end) {
      begin = int(clamp(range.any_first - tile, 0, kBlockK)) / kRows * kRows;
      end = int(clamp(range.any_end - tile, 0, kBlockK));
      source.locate(found, tile, begin, end);
    };
    int begin, end, current = 0;
    int64_t tile = range.any_first / kBlockK * kBlockK;
    if (tile >= range.any_end) return;
    find(tiles[0], tile, begin, end);
    const bool packed = panels > 1 || !Thin::fits(t.rows);
    for (; tile < range.any_end; tile += kBlockK, current ^= 1) {
      bool finite = true;
      if (packed) {
        Pack::keys(tiles[current], b.keys, begin, end);
        Pack::values(tiles[current], b.keys, b.values, begin, end);
        const bool whole = !G::kBits && range.every_first <= tile + begin && range.every_end >= tile + end;
        finite = whole || Pack::all_finite(b.values, begin, end);
      }
      const int loaded_end = end;
      find(tiles[current ^ 1], tile + kBlockK, begin, end);
      NextTile<typename Source::Tile> next{tiles[current ^ 1], begin, end};
      for (int i = 0; i < panels; ++i) {
        Panel& panel = b.panels[i];
        if (Thin::fits(panel.rows)) thin_step(p, t, panel, b, logit, tile, tiles[current], loaded_end, next);
        else if (panel.rows <= kLanes) step<1>(p, t, panel, b, logit, tile, loaded_end, finite, next);
        else step<kVecs>(p, t, panel, b, logit, tile, loaded_end, finite, next);
        next.end = 0;
      }
    }
  }

  // ---- Results ----------------------------------------------------------------------------------------------------

  static double sink_of(const Params& p, const Task& t, int64_t row) {
    return p.sinks[(t.head * p.group_size + row % p.group_size) * p.sink_head];
  }

  // The softmax of a row as `total` times exp(peak), and what its output is still to be divided by: 1 without a softmax.
  struct Finished {
    double peak[kWidth], total[kWidth];
    alignas(64) Scalar divisor[kWidth];

    float lse(int lane) const {
      return total[lane] == 0 ? float(kMinusInfinity) : float(peak[lane] + __builtin_log(total[lane]));
    }
  };

  // `sinks`: this is where they enter.
  static void finish(const Params& p, const Task& t, const Panel& panel, const Logit<G>& logit, int64_t row,
                     [[maybe_unused]] bool sinks, Finished& f) {
    for (int l = 0; l < kWidth; ++l) {
      double total = panel.total[l], peak = panel.peak[l] * logit.natural, shrink = 1;
      if constexpr (Options::kSinks) {
        const double sink = l < panel.rows && sinks ? sink_of(p, t, row + l) : double(kMinusInfinity);
        if (sink > peak) {  // also where the row has seen nothing
          shrink = __builtin_exp(peak - sink);
          total = total * shrink + 1;
          peak = sink;
        } else if (sink > double(kMinusInfinity)) {
          total += __builtin_exp(sink - peak);
        }
      }
      f.peak[l] = peak;
      f.total[l] = total;
      f.divisor[l] = Scalar(!G::kSoftmax || total == 0 ? 1 : total / shrink);
    }
  }

  static Scalar value_factor(const Params& p, const Task& t) {
    Scalar factor = Scalar(p.v_factor);
    if constexpr (Options::kScales == Scales::kHead)
      if (p.v_scale) factor *= p.v_scale[t.batch * p.v_scale_batch + t.head * p.v_scale_head];
    return factor;
  }

  template <class Target>
  static void store_transposed(const Panel& panel, const Finished& f, Scalar scale, Target* const (&out)[kWidth]) {
    for (int v = 0; v < kVecs && v * kLanes < panel.rows; ++v) {
      const Reg factor = V::broadcast(scale) / V::load(f.divisor + v * kLanes);
      for (int d = 0; d < kHeadDimV; d += kLanes) {
        Reg x[kLanes];
        for (int i = 0; i < kLanes; ++i)
          x[i] = d + i < kHeadDimV ? V::load(panel.output + (d + i) * kWidth + v * kLanes) * factor : V::zero();
        V::transpose(x);
        for (int l = 0; l < kLanes && v * kLanes + l < panel.rows; ++l)
          V::store_first(out[v * kLanes + l] + d, x[l], kHeadDimV - d);
      }
    }
  }

  // The rows of a panel to where place(lane, out, lse) says.
  template <class Target, class Place>
  static void store_rows(const Params& p, const Task& t, const Panel& panel, const Logit<G>& logit, int64_t row, bool sinks,
                         Place place) {
    Finished f;
    finish(p, t, panel, logit, row, sinks, f);
    const Scalar scale = value_factor(p, t);
    Target* out[kWidth];
    float* lse_at[kWidth];
    for (int l = 0; l < panel.rows; ++l) place(l, out[l], lse_at[l]);
    if (Thin::fits(panel.rows)) {
      for (int l = 0; l < panel.rows; ++l) Thin::store_row(panel, l, scale / f.divisor[l], out[l]);
    } else {
      store_transposed(panel, f, scale, out);
    }
    for (int l = 0; l < panel.rows; ++l)
      if (lse_at[l]) *lse_at[l] = f.lse(l);
  }

  // Row `row` of the request in the call's outputs.
  static void place_row(const Params& p, const Task& t, int64_t row, typename G::Output*& out, float*& lse) {
    const int64_t query = t.q_begin + row / p.group_size, head = t.head * p.group_size + row % p.group_size;
    out = static_cast<typename G::Output*>(p.out) + t.batch * p.out_batch + query * p.out_row + head * p.out_head;
    lse = Options::kLse ? p.lse + t.batch * p.lse_batch + query * p.lse_row + head * p.lse_head : nullptr;
  }

  static void store_outputs(const Params& p, const Task& t, const Buffers& b, const Logit<G>& logit) {
    for (int64_t i = 0; i * kWidth < t.rows; ++i) {
      const int64_t row = t.row + i * kWidth;
      store_rows<typename G::Output>(p, t, b.panels[i], logit, row, true,
                                     [&](int l, auto*& out, float*& lse) { place_row(p, t, row + l, out, lse); });
    }
  }
};

}  // namespace kernelgen
