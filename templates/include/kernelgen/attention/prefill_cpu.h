// Dense and ragged attention forward on a CPU: out = softmax(mask(cap(scale * q k^T))) v, with online softmax.
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
//     copy K [key][D] and V [D / kRows][key][kRows] into scratch, widened to the operand type
//     for each panel of the task
//       scores with running maximum; weights and their sum; O^T = O^T * alpha + V^T P^T
//
// Operands are those of ProductOf<Element>: bf16 pairs along the depth with AVX512_BF16, else float (double for
// double). Packed Q^T [D][row], P^T and V of a pair product hold two neighbours of the depth in each 32-bit lane.
//
// Masks are ranges: a row sees keys first[row] .. end[row] - 1. Tiles inside every row's range skip the mask; keys
// past every row's range are never read. A tile that some rows see only in part has weight 0 times V there, so its V is
// searched for NaN and inf first; if there are any, that tile goes through `careful_output`, which selects.
//
// The result of a row depends on nothing but its own request: panels and tiles begin at fixed rows and keys of it, and
// sums run in key order.
#pragma once

#include "kernelgen/cpu/math.h"
#include "kernelgen/cpu/microkernel.h"
#include "kernelgen/cpu/vec.h"

namespace kernelgen {

// Strides in elements. *_batch is 0 in a ragged call.
struct PrefillCpuParams {
  const void* q;              // [batch][row][head][D]
  const void* k;              // [batch][row][head][D]
  const void* v;              // [batch][row][head][Dv]
  void* out;                  // [batch][row][head][Dv]
  float* lse;                 // [batch][row][head], natural logarithm
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;
  const int32_t* kv_lens;     // [batch]
  int64_t q_batch, q_row, q_head;
  int64_t k_batch, k_row, k_head;
  int64_t v_batch, v_row, v_head;
  int64_t out_batch, out_row, out_head;
  int64_t lse_batch, lse_row, lse_head;
  int64_t batch, seq_q, seq_k;  // ragged: total tokens
  int64_t num_kv_heads, group_size;
  int64_t task_rows;            // a multiple of kWidth
  int64_t window_left, window_right;
  double scale, soft_cap;
};

template <class Options>
struct PrefillCpu {
  using Params = PrefillCpuParams;
  using Element = typename Options::Element;
  using Product = typename ProductOf<Element>::type;
  using Operand = typename Product::Element;
  template <int kUsed>
  using TileOf = Tile<Product, kTileRows, kUsed>;
  using V = typename Product::V;
  using Reg = typename V::Reg;
  using Scalar = typename V::Scalar;

  static constexpr int kHeadDim = Options::kHeadDim, kHeadDimV = Options::kHeadDimV, kBlockK = Options::kBlockK;
  static constexpr int kRows = kTileRows;        // keys, or value columns, of one register tile
  static constexpr int kVecs = kTileVecs;        // registers across a panel
  static constexpr int kLanes = V::kLanes;
  static constexpr int kWidth = kVecs * kLanes;  // query rows of a panel
  static constexpr int kDepth = Product::kDepth;
  // Outputs of 16 bits keep 8 or 11 of them: the shorter polynomial's error of 9e-8 is far below that.
  static constexpr int kExpDegree = sizeof(Element) == 2 ? 5 : 6;
  // Every sum (over the depth, over keys) is cut into blocks of this many terms. With one chain over a depth of 512 the
  // largest error of a float call was 3.5 times that of torch's matmul, with blocks of 64 it was 1.5 times, with 32
  // about the same as torch's; on Zen 4 none of them costs time.
  static constexpr int kSumBlock = 32;
  // One more cache line between the column strips of V, else they all begin in the same L1 set.
  static constexpr int kValueStrip = kBlockK * kRows + 64 / int(sizeof(Operand));
  static_assert(kHeadDim % 8 == 0 && kHeadDimV % 8 == 0 && kBlockK % kRows == 0 && 8 % kRows == 0, "tile shape");

  // Scratch: one tile of keys and values, one panel's scores and weights, then the panels of the task.
  static constexpr int64_t kKeyBytes = int64_t(sizeof(Operand)) * kBlockK * kHeadDim;
  static constexpr int64_t kValueBytes = int64_t(sizeof(Operand)) * (kHeadDimV / kRows) * kValueStrip;
  static constexpr int64_t kScoreBytes = int64_t(sizeof(Scalar)) * kBlockK * kWidth;
  static constexpr int64_t kWeightBytes = kDepth == 1 ? 0 : int64_t(sizeof(Operand)) * kBlockK * kWidth;
  static constexpr int64_t kTileBytes = kKeyBytes + kValueBytes + kScoreBytes + kWeightBytes;
  static_assert(kTileBytes % 64 == 0, "the panels begin at a cache line");

  // Which keys a set of rows sees: every row those in [every_first, every_end), some row those in [any_first, any_end).
  struct Range {
    int64_t any_first, any_end, every_first, every_end;

    static Range of_no_row(int64_t keys) { return {keys, 0, 0, keys}; }
    void join(const Range& other) {
      any_first = other.any_first < any_first ? other.any_first : any_first;
      any_end = other.any_end > any_end ? other.any_end : any_end;
      every_first = other.every_first > every_first ? other.every_first : every_first;
      every_end = other.every_end < every_end ? other.every_end : every_end;
    }
  };

  struct alignas(64) Panel {
    Operand queries[kHeadDim * kWidth];   // Q^T [D / kDepth][row][kDepth]
    Scalar output[kHeadDimV * kWidth];    // O^T [Dv][row], not yet divided by total
    Scalar peak[kWidth], total[kWidth];   // running maximum of S and sum of P
    int64_t first[kWidth], end[kWidth];   // keys that each row sees; rows past the last repeat its range
    Range range;
  };
  static constexpr int64_t kPanelBytes = sizeof(Panel);

  struct Task {
    int64_t batch, head;         // request and key head
    int64_t row, rows;           // of the request's rows: the first of this task, and how many
    int64_t q_begin, q_len, k_begin, k_len;
  };

  struct Buffers {
    Operand* keys;
    Operand* values;
    Scalar* scores;
    Operand* weights;
    Panel* panels;
  };

  // ---- Which task -------------------------------------------------------------------------------------------------

  static int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

  // Ragged: request b owns the slots from here to that of b + 1, enough for all of its rows wherever they begin; so the
  // owner of a slot is found without knowing any other request's length.
  static int64_t first_slot(const Params& p, int64_t b) {
    return clamp(p.cu_seqlens_q[b], 0, p.seq_q) * p.group_size / p.task_rows + b;
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
      t.q_begin = clamp(p.cu_seqlens_q[low], 0, p.seq_q);
      t.q_len = clamp(p.cu_seqlens_q[low + 1], t.q_begin, p.seq_q) - t.q_begin;
      t.k_begin = clamp(p.cu_seqlens_k[low], 0, p.seq_k);
      t.k_len = clamp(p.cu_seqlens_k[low + 1], t.k_begin, p.seq_k) - t.k_begin;
    } else {
      const int64_t heads = p.batch * p.num_kv_heads, blocks = (p.seq_q * p.group_size + p.task_rows - 1) / p.task_rows;
      block = blocks - 1 - task / heads;
      t.batch = task % heads / p.num_kv_heads;
      t.head = task % p.num_kv_heads;
      t.q_len = p.seq_q;
      t.k_len = p.seq_k;
    }
    if constexpr (Options::kKvLens) t.k_len = clamp(p.kv_lens[t.batch], 0, t.k_len);
    t.row = block * p.task_rows;
    t.rows = clamp(t.q_len * p.group_size - t.row, 0, p.task_rows);
    return t;
  }

  // ---- Packing ----------------------------------------------------------------------------------------------------

  // Up to kLanes operand words of depth: floats, or 32-bit pairs moved as floats without arithmetic.
  static KERNELGEN_INLINE Reg load_words(const Element* x, int64_t words) {
    if constexpr (kDepth == 2) return V::load_first(reinterpret_cast<const Scalar*>(x), words);
    else return V::load_first(x, words);
  }

  static void pack_queries(const Params& p, const Task& t, Panel& panel, int64_t row, int64_t rows) {
    const Element* base = static_cast<const Element*>(p.q) + t.batch * p.q_batch + t.q_begin * p.q_row +
                          t.head * p.group_size * p.q_head;
    constexpr int kWords = kHeadDim / kDepth;
    Scalar* packed = reinterpret_cast<Scalar*>(panel.queries);
    for (int v = 0; v < kVecs; ++v) {
      const Element* source[kLanes];
      for (int l = 0; l < kLanes; ++l) {
        const int64_t r = row + v * kLanes + l;
        source[l] = base + r / p.group_size * p.q_row + r % p.group_size * p.q_head;
      }
      for (int w = 0; w < kWords; w += kLanes) {
        Reg x[kLanes];
        for (int l = 0; l < kLanes; ++l)
          x[l] = v * kLanes + l < rows ? load_words(source[l] + w * kDepth, kWords - w) : V::zero();
        V::transpose(x);
        for (int i = 0; i < kLanes && w + i < kWords; ++i) V::store(packed + (w + i) * kWidth + v * kLanes, x[i]);
      }
    }
    if (const Scalar factor = Logit::query_factor(p); factor != 1)
      for (Operand& x : panel.queries) x = narrow<Operand>(widen(x) * factor);
  }

  // The keys each row sees, and their union and intersection.
  static Range set_ranges(const Params& p, const Task& t, Panel& panel, int64_t row, int64_t rows) {
    Range range = Range::of_no_row(t.k_len);
    for (int l = 0; l < kWidth; ++l) {
      int64_t first = 0, end = t.k_len;
      const int64_t r = row + (l < rows ? l : rows - 1);
      const int64_t position = r / p.group_size + t.k_len - t.q_len;
      if constexpr (Options::kBoundedRight) end = clamp(position + p.window_right + 1, 0, t.k_len);
      if constexpr (Options::kBoundedLeft) first = clamp(position - p.window_left, 0, end);
      panel.first[l] = first;
      panel.end[l] = end;
      range.join({first, end, first, end});
    }
    return panel.range = range;
  }

  // source[0 .. Count) as operands; widened in whole registers and a masked rest.
  template <int Count>
  static KERNELGEN_INLINE void widen_row(const Element* source, Operand* target) {
    if constexpr (sizeof(Operand) == sizeof(Element)) {
      std::memcpy(target, source, sizeof(Element) * Count);
    } else {
      constexpr int kWhole = Count / kLanes * kLanes;
      for (int d = 0; d < kWhole; d += kLanes) V::store(target + d, V::load(source + d));
      if constexpr (kWhole < Count)
        V::store_first(target + kWhole, V::load_first(source + kWhole, Count - kWhole), Count - kWhole);
    }
  }

  // Rows [begin, end) of the tile. What lies behind, up to a multiple of kRows, is stale and always masked.
  static void pack_keys(const Element* k, int64_t stride, Operand* keys, int begin, int end) {
    for (int j = begin; j < end; ++j) widen_row<kHeadDim>(k + j * stride, keys + j * kHeadDim);
  }

  // As pack_keys, but stale rows would meet weights of 0 in a product: up to the next multiple of kRows they are 0.
  static void pack_values(const Element* v, int64_t stride, Operand* values, int begin, int end) {
    static constexpr Element kNothing[kHeadDimV] = {};
    const int padded = (end + kRows - 1) / kRows * kRows;
    for (int j = begin; j < padded; j += kDepth) {
      const Element* even = j < end ? v + j * stride : kNothing;
      if constexpr (kDepth == 2) {
        const Element* odd = j + 1 < end ? v + (j + 1) * stride : kNothing;
        for (int d = 0; d < kHeadDimV; d += 8)
          Product::interleave8(even + d, odd + d, values + d / 8 * kValueStrip + j * kRows);
      } else {
        alignas(64) Operand wide[kHeadDimV];
        const Operand* source = wide;
        if constexpr (sizeof(Operand) == sizeof(Element)) source = even;
        else widen_row<kHeadDimV>(even, wide);
        for (int d = 0; d < kHeadDimV; d += kRows)
          std::memcpy(values + d / kRows * kValueStrip + j * kRows, source + d, sizeof(Operand) * kRows);
      }
    }
  }

  static bool all_finite(const Element* v, int64_t stride, int begin, int end) {
    constexpr int kWhole = kHeadDimV / kLanes * kLanes;
    Reg sum = V::zero();  // 0 * x is 0, or NaN for a NaN or an infinity
    for (int j = begin; j < end; ++j) {
      const Element* row = v + j * stride;
      for (int d = 0; d < kWhole; d += kLanes) sum = V::fma(V::load(row + d), V::zero(), sum);
      if constexpr (kWhole < kHeadDimV)
        sum = V::fma(V::load_first(row + kWhole, kHeadDimV - kWhole), V::zero(), sum);
    }
    return V::sum(sum) == 0;
  }

  // ---- One panel against one tile ---------------------------------------------------------------------------------
  // kUsed: how many of a panel's kVecs registers hold rows; a panel of few rows (decoding) computes only the first.

  // The rows that the next tile will pack. Their cache lines are asked for while the first panel computes: the tokens
  // of one head lie far apart, and hardware prefetching stops at the end of each row. Decoding (fp32, 16 heads, 2048
  // keys, one core of Zen 4): 5.7 ms without, 5.2 ms with prefetching 8 rows ahead of the packing, 3.9 ms with this.
  struct NextTile {
    const Element *keys, *values;
    int64_t key_stride, value_stride;
    int rows;

    KERNELGEN_INLINE void prefetch(int begin) const {
      constexpr int kLine = 64 / int(sizeof(Element));
      for (int j = begin; j < begin + kRows && j < rows; ++j) {
        for (int d = 0; d < kHeadDim; d += kLine) __builtin_prefetch(keys + j * key_stride + d, 0, 2);
        for (int d = 0; d < kHeadDimV; d += kLine) __builtin_prefetch(values + j * value_stride + d, 0, 2);
      }
    }
  };

  // Rows as lanes: which keys of the tile that begins at key `tile` does each row see? Halves keep comparisons exact.
  struct Sight {
    Reg lower[kVecs], upper[kVecs];

    Sight(const Panel& panel, int64_t tile) {
      alignas(64) Scalar low[kWidth], high[kWidth];
      for (int l = 0; l < kWidth; ++l) {
        low[l] = Scalar(clamp(panel.first[l] - tile, 0, kBlockK)) - Scalar(0.5);
        high[l] = Scalar(clamp(panel.end[l] - tile, 0, kBlockK)) - Scalar(0.5);
      }
      for (int v = 0; v < kVecs; ++v) {
        lower[v] = V::load(low + v * kLanes);
        upper[v] = V::load(high + v * kLanes);
      }
    }
    KERNELGEN_INLINE Reg choose(int j, int v, Reg seen, Reg unseen) const {
      const Reg key = V::broadcast(Scalar(j));
      const typename V::Mask before_end = V::less(key, upper[v]);
      if constexpr (Options::kBoundedLeft) return V::select(V::both(V::less(lower[v], key), before_end), seen, unseen);
      else return V::select(before_end, seen, unseen);
    }
  };
  struct FullSight {
    KERNELGEN_INLINE Reg choose(int, int, Reg seen, Reg) const { return seen; }
  };

  // Logits are kept without their positive factor, which is applied to the difference from the maximum: such
  // differences are exact for logits of any size. The sign of the scale, and a scale of 0, go into the queries.
  struct Logit {
    Reg inner, factor;  // kept = tanh(dot * inner) or dot; log2 of a weight = (kept - peak) * factor
    double natural;     // natural logarithm of a weight = (kept - peak) * natural

    explicit Logit(const Params& p) {
      constexpr double kLog2E = 1.4426950408889634074, kSmallest = sizeof(Scalar) == 4 ? 1e-37 : 1e-307;
      natural = __builtin_fabs(Options::kSoftCap ? p.soft_cap : p.scale);
      if (!Options::kSoftCap && natural == 0) natural = 1;
      if (natural < kSmallest) natural = kSmallest;  // times -inf must not become NaN
      factor = V::broadcast(Scalar(natural * kLog2E));
      inner = V::broadcast(Scalar(Options::kSoftCap ? p.scale / natural : 0.0));
    }
    static Scalar query_factor(const Params& p) { return Options::kSoftCap || p.scale > 0 ? 1 : p.scale < 0 ? -1 : 0; }

    KERNELGEN_INLINE Reg kept(Reg dot) const {
      if constexpr (Options::kSoftCap) return kernelgen::tanh<V>(dot * inner);
      else return dot;
    }
    template <int Degree = 6>
    KERNELGEN_INLINE Reg weight(Reg kept, Reg peak) const {
      return exp2_of_negative<V, Degree>((kept - peak) * factor);
    }
  };

  static constexpr Scalar kMinusInfinity = -__builtin_inf();

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
  template <int kUsed, class SightOf>
  static void scores(const Panel& panel, const Buffers& b, const Logit& logit, const SightOf& sight,
                     const NextTile& next, int begin, int end, Reg (&peak)[kUsed]) {
    Reg top[kUsed];
    for (int v = 0; v < kUsed; ++v) top[v] = peak[v];
    for (int j = begin; j < end; j += kRows) {
      next.prefetch(j);
      const TileOf<kUsed> t = product<kUsed, kHeadDim, kDepth>(b.keys + j * kHeadDim, panel.queries, kHeadDim);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kUsed; ++v) {
          const Reg s = sight.choose(j + r, v, logit.kept(t.acc[r][v]), V::broadcast(kMinusInfinity));
          top[v] = V::max(s, top[v]);  // drops a NaN, which reaches the result through its weight
          V::store(b.scores + (j + r) * kWidth + v * kLanes, s);
        }
    }
    for (int v = 0; v < kUsed; ++v) peak[v] = top[v];
  }

  // P^T: in place, or as pairs in their own buffer. Returns the sums in `total`.
  template <int kUsed>
  static void weights(const Buffers& b, const Logit& logit, int begin, int end, const Reg (&peak)[kUsed],
                      Reg (&total)[kUsed]) {
    for (int v = 0; v < kUsed; ++v) total[v] = V::zero();
    for (int block = begin; block < end; block += kSumBlock) {
      Reg sum[kUsed];
      for (int v = 0; v < kUsed; ++v) sum[v] = V::zero();
      for (int j = block; j < end && j < block + kSumBlock; j += kDepth) {
#pragma GCC unroll 8
        for (int v = 0; v < kUsed; ++v) {
          Scalar* s = b.scores + j * kWidth + v * kLanes;
          const Reg p = logit.template weight<kExpDegree>(V::load(s), peak[v]);
          sum[v] = sum[v] + p;
          if constexpr (kDepth == 2) {
            const Reg next = logit.template weight<kExpDegree>(V::load(s + kWidth), peak[v]);
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
          product<kUsed, kDepth, kRows * kDepth>(values + d / kRows * kValueStrip, weights, end - begin);
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
  template <int kUsed>
  static void careful_output(Panel& panel, const Buffers& b, const Element* value, int64_t stride, int64_t tile,
                             int begin, int end, const Reg (&alpha)[kUsed]) {
    const Sight sight(panel, tile);
    for (int d = 0; d < kHeadDimV; ++d)
      for (int v = 0; v < kUsed; ++v) {
        Reg acc = V::zero();
        for (int j = begin; j < end; ++j) {
          const Reg sum = V::fma(weight_at(b, j, v), V::broadcast(widen(value[j * stride + d])), acc);
          acc = sight.choose(j, v, sum, acc);
        }
        Scalar* o = panel.output + d * kWidth + v * kLanes;
        V::store(o, V::fma(V::load(o), alpha[v], acc));
      }
  }

  // ---- A task -----------------------------------------------------------------------------------------------------

  static void store_rows(const Params& p, const Task& t, const Panel& panel, const Logit& logit, int64_t row,
                         int64_t rows) {
    Element* out = static_cast<Element*>(p.out) + t.batch * p.out_batch + t.q_begin * p.out_row +
                   t.head * p.group_size * p.out_head;
    for (int v = 0; v < kVecs; ++v) {
      const Reg total = V::load(panel.total + v * kLanes);
      const Reg factor = V::broadcast(1) / V::select(V::equal(total, V::zero()), V::broadcast(1), total);
      for (int d = 0; d < kHeadDimV; d += kLanes) {
        Reg x[kLanes];
        for (int i = 0; i < kLanes; ++i)
          x[i] = d + i < kHeadDimV ? V::load(panel.output + (d + i) * kWidth + v * kLanes) * factor : V::zero();
        V::transpose(x);
        for (int l = 0; l < kLanes && v * kLanes + l < rows; ++l) {
          const int64_t r = row + v * kLanes + l;
          Element* target = out + r / p.group_size * p.out_row + r % p.group_size * p.out_head;
          V::store_first(target + d, x[l], kHeadDimV - d);
        }
      }
    }
    if constexpr (Options::kLse) {
      float* lse = p.lse + t.batch * p.lse_batch + t.q_begin * p.lse_row + t.head * p.group_size * p.lse_head;
      for (int64_t l = 0; l < rows; ++l) {
        const int64_t r = row + l;
        const double log = panel.peak[l] * logit.natural + __builtin_log(double(panel.total[l]));
        const bool empty = panel.total[l] == 0;
        lse[r / p.group_size * p.lse_row + r % p.group_size * p.lse_head] = float(empty ? kMinusInfinity : log);
      }
    }
  }

  template <int kUsed>
  static void step(Panel& panel, const Buffers& b, const Logit& logit, const Element* value, int64_t stride,
                   int64_t tile, int loaded_end, bool finite, const NextTile& next) {
    const Range& range = panel.range;
    const int begin = int(clamp(range.any_first - tile, 0, kBlockK)) / kRows * kRows;
    const int last = int(clamp(range.any_end - tile, 0, loaded_end));
    const int end = (last + kRows - 1) / kRows * kRows;
    if (begin >= end) return;
    const bool whole = range.every_first <= tile + begin && range.every_end >= tile + end;

    Reg before[kUsed], peak[kUsed], alpha[kUsed], total[kUsed];
    for (int v = 0; v < kUsed; ++v) before[v] = peak[v] = V::load(panel.peak + v * kLanes);
    if (whole) scores(panel, b, logit, FullSight{}, next, begin, end, peak);
    else scores(panel, b, logit, Sight(panel, tile), next, begin, end, peak);
    const Reg minus_infinity = V::broadcast(kMinusInfinity);
    for (int v = 0; v < kUsed; ++v) {
      V::store(panel.peak + v * kLanes, peak[v]);
      // A row that has seen nothing yet: -inf - 0 stays -inf, where -inf - -inf would be NaN.
      peak[v] = V::select(V::equal(peak[v], minus_infinity), V::zero(), peak[v]);
      alpha[v] = logit.weight(before[v], peak[v]);
    }
    weights(b, logit, begin, end, peak, total);
    for (int v = 0; v < kUsed; ++v) {
      Scalar* sum = panel.total + v * kLanes;
      V::store(sum, V::fma(V::load(sum), alpha[v], total[v]));
    }
    if (whole || finite) output(panel, b, begin, end, alpha);
    else careful_output(panel, b, value, stride, tile, begin, last, alpha);
  }

  static void run(const Params& p, int64_t task, void* scratch) {
    const Task t = locate(p, task);
    if (t.rows == 0) return;
    char* at = static_cast<char*>(scratch);
    Buffers b;
    b.keys = reinterpret_cast<Operand*>(at);
    b.values = reinterpret_cast<Operand*>(at + kKeyBytes);
    b.scores = reinterpret_cast<Scalar*>(at + kKeyBytes + kValueBytes);
    b.weights = reinterpret_cast<Operand*>(at + kKeyBytes + kValueBytes + (kDepth == 1 ? 0 : kScoreBytes));
    b.panels = reinterpret_cast<Panel*>(at + kTileBytes);
    const int panels = int((t.rows + kWidth - 1) / kWidth);

    Range range = Range::of_no_row(t.k_len);
    for (int i = 0; i < panels; ++i) {
      Panel& panel = b.panels[i];
      pack_queries(p, t, panel, t.row + i * kWidth, t.rows - i * kWidth);
      range.join(set_ranges(p, t, panel, t.row + i * kWidth, t.rows - i * kWidth));
      std::memset(panel.output, 0, sizeof panel.output);
      std::memset(panel.total, 0, sizeof panel.total);
      for (int l = 0; l < kWidth; ++l) panel.peak[l] = kMinusInfinity;
    }

    const Logit logit(p);
    const Element* k = static_cast<const Element*>(p.k) + t.batch * p.k_batch + t.k_begin * p.k_row + t.head * p.k_head;
    const Element* v = static_cast<const Element*>(p.v) + t.batch * p.v_batch + t.k_begin * p.v_row + t.head * p.v_head;
    for (int64_t tile = range.any_first / kBlockK * kBlockK; tile < range.any_end; tile += kBlockK) {
      const int begin = int(clamp(range.any_first - tile, 0, kBlockK)) / kRows * kRows;
      const int end = int(clamp(range.any_end - tile, 0, kBlockK));
      const Element* values = v + tile * p.v_row;
      pack_keys(k + tile * p.k_row, p.k_row, b.keys, begin, end);
      pack_values(values, p.v_row, b.values, begin, end);
      const bool whole = range.every_first <= tile + begin && range.every_end >= tile + end;
      const bool finite = whole || all_finite(values, p.v_row, begin, end);
      NextTile next{k + (tile + kBlockK) * p.k_row, values + kBlockK * p.v_row, p.k_row, p.v_row,
                    int(clamp(range.any_end - tile - kBlockK, 0, kBlockK))};
      for (int i = 0; i < panels; ++i) {
        const bool narrow = t.rows - i * kWidth <= kLanes;
        (narrow ? step<1> : step<kVecs>)(b.panels[i], b, logit, values, p.v_row, tile, end, finite, next);
        next.rows = 0;
      }
    }
    for (int i = 0; i < panels; ++i) store_rows(p, t, b.panels[i], logit, t.row + i * kWidth, t.rows - i * kWidth);
  }
};

}  // namespace kernelgen
