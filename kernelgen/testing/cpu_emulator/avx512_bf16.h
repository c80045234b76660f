// The AVX512_BF16 intrinsics that kernels use, on a processor that has AVX-512 without them: compiled in front of a kernel
// (-include). Rounds to nearest even, treats denormals as zero and flushes them, as the instructions do.
#pragma once

#include <immintrin.h>  // before the macro: it would take the compiler's word for the real ones

#define __AVX512BF16__ 1

namespace emulated {

inline __m512 flush(__m512 x) {
  const __mmask16 tiny = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(1.17549435e-38f), _CMP_LT_OQ);
  return _mm512_mask_and_ps(x, tiny, x, _mm512_castsi512_ps(_mm512_set1_epi32(int(0x80000000u))));
}

inline __m256i narrow(__m512 x) {
  const __m512i word = _mm512_castps_si512(flush(x));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(word, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(word, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(word, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
}

inline __m512 dot(__m512 acc, __m512i a, __m512i b) {
  const __m512i high = _mm512_set1_epi32(int(0xffff0000u));
  const auto odd = [&](__m512i x) { return flush(_mm512_castsi512_ps(_mm512_and_si512(x, high))); };
  const auto even = [](__m512i x) { return flush(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16))); };
  acc = flush(_mm512_fmadd_ps(odd(a), odd(b), flush(acc)));
  return flush(_mm512_fmadd_ps(even(a), even(b), acc));
}

}  // namespace emulated

#define __m512bh __m512i
#define _mm512_dpbf16_ps(acc, a, b) emulated::dot(acc, a, b)
#define _mm512_cvtneps_pbh(x) emulated::narrow(x)
#define _mm256_cvtneps_pbh(x) _mm256_castsi256_si128(emulated::narrow(_mm512_castps256_ps512(x)))
#define _mm512_cvtne2ps_pbh(high, low) \
  _mm512_inserti64x4(_mm512_castsi256_si512(emulated::narrow(low)), emulated::narrow(high), 1)
