// fp8 storage types and loads of any element type into registers of either precision.
//
//   e5m2   an fp16 without its low byte
//   e4m3   (the "fn" form: no infinities, one NaN pattern) has the bits of an fp16 with three fewer exponent values on each
//          side: moved into place it is an fp16 of 1/256 of the value, subnormals included
//
// load_as<V>(p): V::kLanes elements in V's precision; load_first_as<V>(p, n): the first n of them, the rest zero.
#pragma once

#include "kernelgen/cpu/vec.h"

namespace kernelgen {

struct e4m3 {
  uint8_t bits;
};

struct e5m2 {
  uint8_t bits;
};

inline float widen(e5m2 x) { return _cvtsh_ss(uint16_t(x.bits << 8)); }
inline float widen(e4m3 x) {
  if ((x.bits & 0x7f) == 0x7f) return __builtin_nanf("");
  return _cvtsh_ss(uint16_t((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)) * 256;
}

// Eight values from the low eight bytes.
KERNELGEN_INLINE __m256 widen8(e5m2, __m128i bytes) {
  return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 8));
}
KERNELGEN_INLINE __m256 widen8(e4m3, __m128i bytes) {
  // The sign lands in two bits; the lower one belongs to the exponent.
  const __m128i half = _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7), _mm_set1_epi16(int16_t(0xbfff)));
  const __m256 x = _mm256_cvtph_ps(half) * _mm256_set1_ps(256);
  const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
  // The NaN pattern reads as 480. An OR with all bits set is a NaN.
  return _mm256_or_ps(x, _mm256_cmp_ps(size, _mm256_set1_ps(448), _CMP_GT_OQ));
}

template <class V>
struct Fp8Load;

#if defined(__AVX512F__)
KERNELGEN_INLINE __m512 widen16(e5m2, __m128i bytes) {
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8));
}
KERNELGEN_INLINE __m512 widen16(e4m3, __m128i bytes) {
  const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
  const __m512 x = _mm512_cvtph_ps(_mm256_and_si256(shifted, _mm256_set1_epi16(int16_t(0xbfff)))) * _mm512_set1_ps(256);
  const __mmask16 nan = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(448), _CMP_GT_OQ);
  return _mm512_mask_blend_ps(nan, x, _mm512_set1_ps(__builtin_nanf("")));
}
template <>
struct Fp8Load<Simd<float>> {
  template <class T>
  static KERNELGEN_INLINE __m512 of(T type, __m128i bytes) { return widen16(type, bytes); }
};
template <>
struct Fp8Load<Simd<double>> {
  template <class T>
  static KERNELGEN_INLINE __m512d of(T type, __m128i bytes) { return _mm512_cvtps_pd(widen8(type, bytes)); }
};
#else
template <>
struct Fp8Load<Simd<float>> {
  template <class T>
  static KERNELGEN_INLINE __m256 of(T type, __m128i bytes) { return widen8(type, bytes); }
};
template <>
struct Fp8Load<Simd<double>> {
  template <class T>
  static KERNELGEN_INLINE __m256d of(T type, __m128i bytes) {
    return _mm256_cvtps_pd(_mm256_castps256_ps128(widen8(type, bytes)));
  }
};
#endif

template <class T>
constexpr bool is_fp8 = false;
template <>
constexpr bool is_fp8<e4m3> = true;
template <>
constexpr bool is_fp8<e5m2> = true;

template <class V, class T>
KERNELGEN_INLINE typename V::Reg load_as(const T* p) {
  if constexpr (is_fp8<T>) {
    __m128i bytes = _mm_setzero_si128();
    std::memcpy(&bytes, p, V::kLanes);
    return Fp8Load<V>::of(T{}, bytes);
  } else {
    return V::load(p);
  }
}

template <class V, class T>
KERNELGEN_INLINE typename V::Reg load_first_as(const T* p, int64_t n) {
  if constexpr (is_fp8<T>) {
    __m128i bytes = _mm_setzero_si128();
    std::memcpy(&bytes, p, size_t(n >= V::kLanes ? V::kLanes : n <= 0 ? 0 : n));
    return Fp8Load<V>::of(T{}, bytes);
  } else {
    return V::load_first(p, n);
  }
}

}  // namespace kernelgen
