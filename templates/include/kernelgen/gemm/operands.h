// Operands of a CPU product that are stored narrower than they are multiplied: fp8 values, and packed 4-bit weights.
//
//   e4m3, e5m2     one byte each (cpu/fp8.h); exact in bf16, so that they are multiplied as pairs where the CPU can
//   Int4           codes 0 .. 15, two to a byte, the even k low; worth code - zero
//   Mxfp4          E2M1 codes, two to a byte
//
// What they are worth is multiplied by scales of rows, columns, or segments of k: see scales.h.
#pragma once

#include "kernelgen/cpu/fp8.h"
#include "kernelgen/cpu/microkernel.h"

namespace kernelgen {

struct Int4 {
  uint8_t bits;
};
struct Mxfp4 {
  uint8_t bits;
};
template <class T>
constexpr bool is_packed = false;
template <>
constexpr bool is_packed<Int4> = true;
template <>
constexpr bool is_packed<Mxfp4> = true;

#if defined(__AVX512BF16__)
template <>
struct ProductOf<e4m3> {
  using type = PairProduct;
};
template <>
struct ProductOf<e5m2> {
  using type = PairProduct;
};
#endif

// Eight values as they are multiplied.
KERNELGEN_INLINE __m256 widen8(bf16, __m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
KERNELGEN_INLINE __m256 widen8(fp16, __m128i halves) { return _mm256_cvtph_ps(halves); }

template <class T>
KERNELGEN_INLINE __m256 load8(const T* p) {
  return widen8(T{}, sizeof(T) == 1 ? _mm_loadl_epi64((const __m128i*)p) : _mm_loadu_si128((const __m128i*)p));
}

// 16 codes of eight bytes, in the order of k.
KERNELGEN_INLINE __m128i split_nibbles(__m128i bytes) {
  const __m128i mask = _mm_set1_epi8(15);
  return _mm_unpacklo_epi8(_mm_and_si128(bytes, mask), _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
}
// Codes as whole numbers of kUnit, before a zero point is taken off.
template <class T>
struct Nibble;
template <>
struct Nibble<Int4> {
  static constexpr float kUnit = 1;
  static KERNELGEN_INLINE __m128i whole_numbers(__m128i codes) { return codes; }
};
template <>
struct Nibble<Mxfp4> {
  static constexpr float kUnit = 0.5f;
  static KERNELGEN_INLINE __m128i whole_numbers(__m128i codes) {
    return _mm_shuffle_epi8(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), codes);
  }
};


// `Count` codes from k on (a multiple of 8) of a row as whole numbers; from `n` on they mean nothing and are not read.
template <int Count, class T>
KERNELGEN_INLINE __m128i load_whole_numbers(const T* row, int64_t k, int64_t n) {
  __m128i bytes = _mm_setzero_si128();
  if (n >= Count) {
    std::memcpy(&bytes, row + k / 2, Count / 2);
  } else {
    std::memcpy(&bytes, row + k / 2, size_t(n + 1) / 2);
  }
  return Nibble<T>::whole_numbers(split_nibbles(bytes));
}
template <class T>
KERNELGEN_INLINE __m256 load8_nibbles(const T* row, int64_t k, int64_t n) {
  const __m128i numbers = load_whole_numbers<8>(row, k, n);
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(numbers)) * _mm256_set1_ps(Nibble<T>::kUnit);
}
#if defined(__AVX512F__)
template <class T>
KERNELGEN_INLINE __m512 load16_nibbles(const T* row, int64_t k, int64_t n) {
  const __m128i numbers = load_whole_numbers<16>(row, k, n);
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(numbers)) * _mm512_set1_ps(Nibble<T>::kUnit);
}
#endif

}  // namespace kernelgen
