// Which keys of a tile each row of a panel sees: from ranges alone, or bit by bit with a given mask or a variant.
#pragma once

#include "kernelgen/attention/geometry_cpu.h"
#include "kernelgen/attention/variant.h"

namespace kernelgen {

// Every row sees every key of the tile.
template <class G>
struct FullSight {
  KERNELGEN_INLINE typename G::Reg choose(int, int, typename G::Reg seen, typename G::Reg) const { return seen; }
};

// Rows as lanes: which keys of the tile that begins at key `tile` does each row see? Halves keep comparisons exact.
template <class G>
struct RangeSight {
  using V = typename G::V;
  using Reg = typename G::Reg;
  using Scalar = typename G::Scalar;
  Reg lower[G::kVecs], upper[G::kVecs];

  RangeSight(const typename G::Panel& panel, int64_t tile) {
    alignas(64) Scalar low[G::kWidth], high[G::kWidth];
    for (int l = 0; l < G::kWidth; ++l) {
      low[l] = Scalar(clamp(panel.first[l] - tile, 0, G::kBlockK)) - Scalar(0.5);
      high[l] = Scalar(clamp(panel.end[l] - tile, 0, G::kBlockK)) - Scalar(0.5);
    }
    for (int v = 0; v < G::kVecs; ++v) {
      lower[v] = V::load(low + v * G::kLanes);
      upper[v] = V::load(high + v * G::kLanes);
    }
  }
  KERNELGEN_INLINE Reg choose(int j, int v, Reg seen, Reg unseen) const {
    const Reg key = V::broadcast(Scalar(j));
    const typename V::Mask before_end = V::less(key, upper[v]);
    if constexpr (G::Options::kBoundedLeft) return V::select(V::both(V::less(lower[v], key), before_end), seen, unseen);
    else return V::select(before_end, seen, unseen);
  }
};

// The lanes whose bits are set, from the lowest.
template <class V>
KERNELGEN_INLINE typename V::Mask lanes_of(uint32_t bits) {
#if defined(__AVX512F__)
  return typename V::Mask(bits);
#else
  if constexpr (V::kLanes == 8) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(bits)), lane), lane));
  } else {
    const __m256i lane = _mm256_setr_epi64x(1, 2, 4, 8);
    return _mm256_castsi256_pd(_mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x(int64_t(bits)), lane), lane));
  }
#endif
}

// Bit l of seen[j]: row l sees key j of the tile.
template <class G>
struct BitSight {
  using V = typename G::V;
  using Reg = typename G::Reg;
  uint32_t seen[G::kBlockK];

  KERNELGEN_INLINE Reg choose(int j, int v, Reg yes, Reg no) const {
    return V::select(lanes_of<V>(seen[j] >> v * G::kLanes), yes, no);
  }
};

template <class G>
struct Visibility {
  using Params = AttentionCpuParams;
  using Options = typename G::Options;
  using Panel = typename G::Panel;
  using Task = typename G::Task;

  static VariantContext context(const Params& p, const Task& t, const Panel& panel, int lane, int64_t key) {
    const int64_t query = panel.ids.query[lane];
    return {int32_t(t.batch), panel.ids.head[lane], int32_t(t.head), int32_t(query), int32_t(query + t.k_len - t.q_len),
            int32_t(key), int32_t(t.q_len), int32_t(t.k_len)};
  }

  // Keys [begin, last) of the tile that begins at key `tile`; nobody sees those up to `end`.
  static void fill(const Params& p, const Task& t, const Panel& panel, int64_t tile, int begin, int last, int end,
                   BitSight<G>& sight) {
    for (int j = begin; j < end; ++j) sight.seen[j] = 0;
    for (int l = 0; l < panel.rows; ++l) {
      const int from = int(clamp(panel.first[l] - tile, begin, last)), to = int(clamp(panel.end[l] - tile, from, last));
      const uint32_t bit = uint32_t(1) << l;
      if constexpr (G::kMasked) {
        const GivenRow given(p, t, panel, l, tile);
        for (int j = from; j < to; ++j) sight.seen[j] |= given.sees(j) ? bit : 0;
      } else {
        for (int j = from; j < to; ++j) sight.seen[j] |= bit;
      }
      if constexpr (G::kVariant)
        for (int j = from; j < to; ++j)
          if ((sight.seen[j] & bit) && !Options::Variant::visible(context(p, t, panel, l, tile + j), p.variant_words))
            sight.seen[j] &= ~bit;
    }
  }

 private:
  // One row of the caller's mask, from the tile's first key on.
  struct GivenRow {
    const uint8_t* bytes;
    int64_t step;  // bytes between keys, or the first bit

    GivenRow(const Params& p, const Task& t, const Panel& panel, int lane, int64_t tile) {
      const int64_t query = panel.ids.query[lane], head = panel.ids.head[lane];
      bytes = static_cast<const uint8_t*>(p.mask);
      if constexpr (Options::kMask == Mask::kStrided) {
        step = p.mask_key;
        bytes += t.batch * p.mask_batch + head * p.mask_head + query * p.mask_row + tile * p.mask_key;
      } else {
        const int64_t at = p.mask_indptr[t.batch] + query * t.k_len + tile;
        if constexpr (Options::kMask == Mask::kFlat) bytes += at;
        step = Options::kMask == Mask::kFlat ? 1 : at;
      }
    }
    KERNELGEN_INLINE bool sees(int j) const {
      if constexpr (Options::kMask == Mask::kPacked) return bytes[(step + j) >> 3] >> ((step + j) & 7) & 1;
      else return bytes[j * step] != 0;
    }
  };
};

}  // namespace kernelgen
