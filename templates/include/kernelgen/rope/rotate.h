// Rotation of one head's row by the angles of its token.
//
// The angles of a token are written once, as a table of 2 * rotary_dim values in the accumulator's type, and used by all
// of its heads:
//   split halves   cosines of the pairs, then sines (rotary_dim values in all)
//   interleaved    each cosine twice, then each sine twice, the first of the two negated
#pragma once

#include <limits>

#include "kernelgen/rope/sincos.h"

namespace kernelgen {

template <class Sum, bool Interleaved>
struct TokenAngles {
  static int64_t bytes(int64_t rotary_dim) { return 2 * rotary_dim * static_cast<int64_t>(sizeof(Sum)); }

  Sum* table;
  int64_t rotary_dim;

  KERNELGEN_INLINE void put(int64_t pair, Sum cosine, Sum sine) const {
    if constexpr (Interleaved) {
      table[2 * pair] = table[2 * pair + 1] = cosine;
      table[rotary_dim + 2 * pair] = -sine;
      table[rotary_dim + 2 * pair + 1] = sine;
    } else {
      table[pair] = cosine;
      table[rotary_dim / 2 + pair] = sine;
    }
  }

  // Angles position * frequency, in double whatever Sum is.
  void fill(const double* frequencies, int64_t position) const {
    using V = Simd<double>;
    const int64_t pairs = rotary_dim / 2;
    for (int64_t i = 0; i < pairs; i += V::kLanes) {
      V::Reg sine, cosine;
      sincos(V::load_first(frequencies + i, pairs - i) * V::broadcast(static_cast<double>(position)), sine, cosine);
      alignas(64) double sines[V::kLanes], cosines[V::kLanes];
      V::store(sines, sine);
      V::store(cosines, cosine);
      for (int64_t l = 0; l < V::kLanes && i + l < pairs; ++l) {
        put(i + l, static_cast<Sum>(cosines[l]), static_cast<Sum>(sines[l]));
      }
    }
  }

  // A row of a cosine and sine cache; NaN for a position that it does not have.
  template <class Cached>
  void look_up(const Cached* cache, int64_t rows, int64_t stride, int64_t position) const {
    const int64_t pairs = rotary_dim / 2;
    const bool known = position >= 0 && position < rows;
    const Cached* row = cache + (known ? position : 0) * stride;
    for (int64_t i = 0; i < pairs; ++i) {
      put(i, known ? static_cast<Sum>(widen(row[i])) : std::numeric_limits<Sum>::quiet_NaN(),
          known ? static_cast<Sum>(widen(row[pairs + i])) : std::numeric_limits<Sum>::quiet_NaN());
    }
  }
};

#if defined(__AVX512F__)
KERNELGEN_INLINE __m512 swap_pairs(__m512 x) { return _mm512_permute_ps(x, 0xb1); }
KERNELGEN_INLINE __m512d swap_pairs(__m512d x) { return _mm512_permute_pd(x, 0x55); }
#else
KERNELGEN_INLINE __m256 swap_pairs(__m256 x) { return _mm256_permute_ps(x, 0xb1); }
KERNELGEN_INLINE __m256d swap_pairs(__m256d x) { return _mm256_permute_pd(x, 0x5); }
#endif

template <class V, class T>
KERNELGEN_INLINE typename V::Reg load_up_to(const T* p, int64_t n) {
  return n >= V::kLanes ? V::load(p) : V::load_first(p, n);
}
template <class V, class T>
KERNELGEN_INLINE void store_up_to(T* p, typename V::Reg x, int64_t n) {
  if (n >= V::kLanes) V::store(p, x);
  else V::store_first(p, x, n);
}

// Rotates the first rotary_dim of `width` elements and passes the others on. `out` may be `x`: every element is read in
// the step that writes it. Out is T, or the accumulator's type to round later.
template <class T, class Out, bool Interleaved>
KERNELGEN_INLINE void rotate_row(const T* x, Out* out, const TokenAngles<Accumulator<T>, Interleaved>& angles, int64_t width) {
  using V = Simd<Accumulator<T>>;
  using Reg = typename V::Reg;
  const int64_t rotary = angles.rotary_dim;
  if constexpr (Interleaved) {
    const auto *cosines = angles.table, *sines = angles.table + rotary;
    for (int64_t c = 0; c < rotary; c += V::kLanes) {
      const Reg v = load_up_to<V>(x + c, rotary - c);
      const Reg turned = swap_pairs(v) * load_up_to<V>(sines + c, rotary - c);
      store_up_to<V>(out + c, V::fma(v, load_up_to<V>(cosines + c, rotary - c), turned), rotary - c);
    }
  } else {
    const int64_t half = rotary / 2;
    const auto *cosines = angles.table, *sines = angles.table + half;
    for (int64_t c = 0; c < half; c += V::kLanes) {
      const int64_t n = half - c;
      const Reg a = load_up_to<V>(x + c, n), b = load_up_to<V>(x + half + c, n);
      const Reg cosine = load_up_to<V>(cosines + c, n), sine = load_up_to<V>(sines + c, n);
      store_up_to<V>(out + c, V::fma(a, cosine, -(b * sine)), n);
      store_up_to<V>(out + half + c, V::fma(b, cosine, a * sine), n);
    }
  }
  if (static_cast<const void*>(out) == static_cast<const void*>(x)) return;
  for (int64_t c = rotary; c < width; c += V::kLanes) store_up_to<V>(out + c, load_up_to<V>(x + c, width - c), width - c);
}

}  // namespace kernelgen
