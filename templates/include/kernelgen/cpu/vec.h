// One SIMD register of an ISA level behind one interface: Simd<float> and Simd<double>.
//
//   x86-64-v3        AVX2 + FMA + F16C   8 floats   4 doubles
//   x86-64-v4        AVX-512            16 floats   8 doubles
//   x86-64-v4-bf16   + AVX512_BF16      bf16 stores and pair products in hardware (flush denormals, unlike the others)
//
// Loads and stores of bf16 and fp16 convert from and to float. `_first(n)` forms touch only the first n lanes of memory
// (any n: 0 or below touches nothing, kLanes and above everything); the lanes not loaded are zero.
// min and max return their second operand when either is a NaN, as the instructions do: max(x, bound) drops a NaN in
// x, max(bound, x) keeps it.
#pragma once

#include "kernelgen/cpu/types.h"

#define KERNELGEN_INLINE inline __attribute__((always_inline))

namespace kernelgen {

template <class T>
struct Simd;

#if defined(__AVX512F__)

template <>
struct Simd<float> {
  using Scalar = float;
  using Reg = __m512;
  using Mask = __mmask16;
  static constexpr int kLanes = 16;

  static KERNELGEN_INLINE Mask first(int64_t n) {
    return n >= kLanes ? Mask(0xffff) : n <= 0 ? Mask(0) : Mask((1u << n) - 1u);
  }

  static KERNELGEN_INLINE Reg zero() { return _mm512_setzero_ps(); }
  static KERNELGEN_INLINE Reg broadcast(float x) { return _mm512_set1_ps(x); }
  static KERNELGEN_INLINE Reg iota() {
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }

  static KERNELGEN_INLINE Reg load(const float* p) { return _mm512_loadu_ps(p); }
  static KERNELGEN_INLINE Reg load(const bf16* p) { return widen_bf16(_mm256_loadu_si256((const __m256i*)p)); }
  static KERNELGEN_INLINE Reg load(const fp16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  static KERNELGEN_INLINE Reg load_first(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static KERNELGEN_INLINE Reg load_first(const bf16* p, int64_t n) {
    return widen_bf16(_mm256_maskz_loadu_epi16(first(n), p));
  }
  static KERNELGEN_INLINE Reg load_first(const fp16* p, int64_t n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
  }

  static KERNELGEN_INLINE void store(float* p, Reg x) { _mm512_storeu_ps(p, x); }
  static KERNELGEN_INLINE void store(bf16* p, Reg x) { _mm256_storeu_si256((__m256i*)p, narrow_bf16(x)); }
  static KERNELGEN_INLINE void store(fp16* p, Reg x) { _mm256_storeu_si256((__m256i*)p, narrow_fp16(x)); }
  static KERNELGEN_INLINE void store_first(float* p, Reg x, int64_t n) { _mm512_mask_storeu_ps(p, first(n), x); }
  static KERNELGEN_INLINE void store_first(bf16* p, Reg x, int64_t n) {
    _mm256_mask_storeu_epi16(p, first(n), narrow_bf16(x));
  }
  static KERNELGEN_INLINE void store_first(fp16* p, Reg x, int64_t n) {
    _mm256_mask_storeu_epi16(p, first(n), narrow_fp16(x));
  }

  static KERNELGEN_INLINE Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
  static KERNELGEN_INLINE Reg min(Reg a, Reg b) { return _mm512_min_ps(a, b); }
  static KERNELGEN_INLINE Reg max(Reg a, Reg b) { return _mm512_max_ps(a, b); }
  static KERNELGEN_INLINE Reg abs(Reg a) { return _mm512_abs_ps(a); }
  static KERNELGEN_INLINE Reg round(Reg a) { return _mm512_roundscale_ps(a, 8); }  // to nearest even, no exception
  static KERNELGEN_INLINE Reg sqrt(Reg a) { return _mm512_sqrt_ps(a); }
  static KERNELGEN_INLINE Reg copy_sign(Reg magnitude, Reg sign) {
    const __m512i bit = _mm512_set1_epi32(int(0x80000000u));
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(bit, _mm512_castps_si512(sign), _mm512_castps_si512(magnitude), 0xca));
  }
  // 2^n * a for an integral n of any size, with IEEE underflow and overflow.
  static KERNELGEN_INLINE Reg scale_by_power(Reg a, Reg n) { return _mm512_scalef_ps(a, n); }

  static KERNELGEN_INLINE Mask less(Reg a, Reg b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static KERNELGEN_INLINE Mask equal(Reg a, Reg b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  static KERNELGEN_INLINE Mask both(Mask a, Mask b) { return a & b; }
  static KERNELGEN_INLINE bool any(Mask m) { return m != 0; }
  static KERNELGEN_INLINE Reg select(Mask m, Reg yes, Reg no) { return _mm512_mask_blend_ps(m, no, yes); }

  // x[i][l] becomes x[l][i]. Each round swaps the off-diagonal blocks of 2s x 2s squares.
  static KERNELGEN_INLINE void transpose(Reg (&x)[kLanes]) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma GCC unroll 4
    for (int s = 1; s < kLanes; s *= 2) {
      const __mmask16 odd = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(s));
      const __m512i low = _mm512_mask_add_epi32(lane, odd, lane, _mm512_set1_epi32(kLanes - s));
      const __m512i shift = _mm512_mask_mov_epi32(_mm512_set1_epi32(s), odd, _mm512_set1_epi32(kLanes));
      const __m512i high = _mm512_add_epi32(lane, shift);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if (i & s) continue;
        const Reg a = x[i], b = x[i + s];
        x[i] = _mm512_permutex2var_ps(a, low, b);
        x[i + s] = _mm512_permutex2var_ps(a, high, b);
      }
    }
  }

  static KERNELGEN_INLINE float sum(Reg a) { return _mm512_reduce_add_ps(a); }
  static KERNELGEN_INLINE float reduce_max(Reg a) { return _mm512_reduce_max_ps(a); }

  static KERNELGEN_INLINE Reg widen_bf16(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  static KERNELGEN_INLINE __m256i narrow_fp16(Reg x) {
    return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static KERNELGEN_INLINE __m256i narrow_bf16(Reg x) {
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    const __m512i word = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(word, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(word, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i quiet = _mm512_or_si512(word, _mm512_set1_epi32(0x400000));
    const Mask nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
#endif
  }
};

template <>
struct Simd<double> {
  using Scalar = double;
  using Reg = __m512d;
  using Mask = __mmask8;
  static constexpr int kLanes = 8;

  static KERNELGEN_INLINE Mask first(int64_t n) {
    return n >= kLanes ? Mask(0xff) : n <= 0 ? Mask(0) : Mask((1u << n) - 1u);
  }

  static KERNELGEN_INLINE Reg zero() { return _mm512_setzero_pd(); }
  static KERNELGEN_INLINE Reg broadcast(double x) { return _mm512_set1_pd(x); }
  static KERNELGEN_INLINE Reg iota() { return _mm512_setr_pd(0, 1, 2, 3, 4, 5, 6, 7); }

  static KERNELGEN_INLINE Reg load(const double* p) { return _mm512_loadu_pd(p); }
  static KERNELGEN_INLINE Reg load_first(const double* p, int64_t n) { return _mm512_maskz_loadu_pd(first(n), p); }
  static KERNELGEN_INLINE void store(double* p, Reg x) { _mm512_storeu_pd(p, x); }
  static KERNELGEN_INLINE void store_first(double* p, Reg x, int64_t n) { _mm512_mask_storeu_pd(p, first(n), x); }

  static KERNELGEN_INLINE Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_pd(a, b, c); }
  static KERNELGEN_INLINE Reg min(Reg a, Reg b) { return _mm512_min_pd(a, b); }
  static KERNELGEN_INLINE Reg max(Reg a, Reg b) { return _mm512_max_pd(a, b); }
  static KERNELGEN_INLINE Reg abs(Reg a) { return _mm512_abs_pd(a); }
  static KERNELGEN_INLINE Reg round(Reg a) { return _mm512_roundscale_pd(a, 8); }
  static KERNELGEN_INLINE Reg sqrt(Reg a) { return _mm512_sqrt_pd(a); }
  static KERNELGEN_INLINE Reg copy_sign(Reg magnitude, Reg sign) {
    const __m512i bit = _mm512_set1_epi64(int64_t(0x8000000000000000u));
    return _mm512_castsi512_pd(
        _mm512_ternarylogic_epi64(bit, _mm512_castpd_si512(sign), _mm512_castpd_si512(magnitude), 0xca));
  }
  static KERNELGEN_INLINE Reg scale_by_power(Reg a, Reg n) { return _mm512_scalef_pd(a, n); }

  static KERNELGEN_INLINE Mask less(Reg a, Reg b) { return _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ); }
  static KERNELGEN_INLINE Mask equal(Reg a, Reg b) { return _mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ); }
  static KERNELGEN_INLINE Mask both(Mask a, Mask b) { return a & b; }
  static KERNELGEN_INLINE bool any(Mask m) { return m != 0; }
  static KERNELGEN_INLINE Reg select(Mask m, Reg yes, Reg no) { return _mm512_mask_blend_pd(m, no, yes); }

  static KERNELGEN_INLINE void transpose(Reg (&x)[kLanes]) {
    const __m512i lane = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
#pragma GCC unroll 3
    for (int s = 1; s < kLanes; s *= 2) {
      const __mmask8 odd = _mm512_test_epi64_mask(lane, _mm512_set1_epi64(s));
      const __m512i low = _mm512_mask_add_epi64(lane, odd, lane, _mm512_set1_epi64(kLanes - s));
      const __m512i shift = _mm512_mask_mov_epi64(_mm512_set1_epi64(s), odd, _mm512_set1_epi64(kLanes));
      const __m512i high = _mm512_add_epi64(lane, shift);
#pragma GCC unroll 8
      for (int i = 0; i < kLanes; ++i) {
        if (i & s) continue;
        const Reg a = x[i], b = x[i + s];
        x[i] = _mm512_permutex2var_pd(a, low, b);
        x[i + s] = _mm512_permutex2var_pd(a, high, b);
      }
    }
  }

  static KERNELGEN_INLINE double sum(Reg a) { return _mm512_reduce_add_pd(a); }
  static KERNELGEN_INLINE double reduce_max(Reg a) { return _mm512_reduce_max_pd(a); }
};

#else  // AVX2

template <>
struct Simd<float> {
  using Scalar = float;
  using Reg = __m256;
  using Mask = __m256;  // all bits of a lane set, or none
  static constexpr int kLanes = 8;

  static KERNELGEN_INLINE Mask first(int64_t n) {
    const int count = n >= kLanes ? kLanes : n <= 0 ? 0 : int(n);
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
  }

  static KERNELGEN_INLINE Reg zero() { return _mm256_setzero_ps(); }
  static KERNELGEN_INLINE Reg broadcast(float x) { return _mm256_set1_ps(x); }
  static KERNELGEN_INLINE Reg iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }

  static KERNELGEN_INLINE Reg load(const float* p) { return _mm256_loadu_ps(p); }
  static KERNELGEN_INLINE Reg load(const bf16* p) { return widen_bf16(_mm_loadu_si128((const __m128i*)p)); }
  static KERNELGEN_INLINE Reg load(const fp16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  static KERNELGEN_INLINE Reg load_first(const float* p, int64_t n) {
    return _mm256_maskload_ps(p, _mm256_castps_si256(first(n)));
  }
  static KERNELGEN_INLINE Reg load_first(const bf16* p, int64_t n) { return widen_bf16(load_halves(p, n)); }
  static KERNELGEN_INLINE Reg load_first(const fp16* p, int64_t n) { return _mm256_cvtph_ps(load_halves(p, n)); }

  static KERNELGEN_INLINE void store(float* p, Reg x) { _mm256_storeu_ps(p, x); }
  static KERNELGEN_INLINE void store(bf16* p, Reg x) { _mm_storeu_si128((__m128i*)p, narrow_bf16(x)); }
  static KERNELGEN_INLINE void store(fp16* p, Reg x) { _mm_storeu_si128((__m128i*)p, narrow_fp16(x)); }
  static KERNELGEN_INLINE void store_first(float* p, Reg x, int64_t n) {
    _mm256_maskstore_ps(p, _mm256_castps_si256(first(n)), x);
  }
  static KERNELGEN_INLINE void store_first(bf16* p, Reg x, int64_t n) { store_halves(p, narrow_bf16(x), n); }
  static KERNELGEN_INLINE void store_first(fp16* p, Reg x, int64_t n) { store_halves(p, narrow_fp16(x), n); }

  static KERNELGEN_INLINE Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
  static KERNELGEN_INLINE Reg min(Reg a, Reg b) { return _mm256_min_ps(a, b); }
  static KERNELGEN_INLINE Reg max(Reg a, Reg b) { return _mm256_max_ps(a, b); }
  static KERNELGEN_INLINE Reg abs(Reg a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static KERNELGEN_INLINE Reg round(Reg a) { return _mm256_round_ps(a, 8); }
  static KERNELGEN_INLINE Reg sqrt(Reg a) { return _mm256_sqrt_ps(a); }
  static KERNELGEN_INLINE Reg copy_sign(Reg magnitude, Reg sign) {
    const Reg bit = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_and_ps(bit, sign), _mm256_andnot_ps(bit, magnitude));
  }
  // In two steps of half the power each, so that results below 2^-126 and infinity come out right.
  static KERNELGEN_INLINE Reg scale_by_power(Reg a, Reg n) {
    const Reg bounded = min(broadcast(252.0f), max(broadcast(-252.0f), n));
    const __m256i power = to_int(bounded);
    const __m256i half = _mm256_srai_epi32(power, 1);
    return a * power_of_two(half) * power_of_two(_mm256_sub_epi32(power, half));
  }
  static KERNELGEN_INLINE __m256i to_int(Reg n) { return _mm256_cvtps_epi32(n); }
  static KERNELGEN_INLINE Reg power_of_two(__m256i n) {  // -126 <= n <= 127, and -127 gives 0
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }

  static KERNELGEN_INLINE Mask less(Reg a, Reg b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  static KERNELGEN_INLINE Mask equal(Reg a, Reg b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
  static KERNELGEN_INLINE Mask both(Mask a, Mask b) { return _mm256_and_ps(a, b); }
  static KERNELGEN_INLINE bool any(Mask m) { return _mm256_movemask_ps(m) != 0; }
  static KERNELGEN_INLINE Reg select(Mask m, Reg yes, Reg no) { return _mm256_blendv_ps(no, yes, m); }

  static KERNELGEN_INLINE void transpose(Reg (&x)[kLanes]) {
    for (int i = 0; i < 8; i += 2) {
      const Reg a = x[i], b = x[i + 1];
      x[i] = _mm256_blend_ps(a, _mm256_moveldup_ps(b), 0xaa);
      x[i + 1] = _mm256_blend_ps(_mm256_movehdup_ps(a), b, 0xaa);
    }
    for (int i = 0; i < 8; ++i) {
      if (i & 2) continue;
      const Reg a = x[i], b = x[i + 2];
      x[i] = _mm256_shuffle_ps(a, b, 0x44);
      x[i + 2] = _mm256_shuffle_ps(a, b, 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      const Reg a = x[i], b = x[i + 4];
      x[i] = _mm256_permute2f128_ps(a, b, 0x20);
      x[i + 4] = _mm256_permute2f128_ps(a, b, 0x31);
    }
  }

  static KERNELGEN_INLINE float sum(Reg a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }
  static KERNELGEN_INLINE float reduce_max(Reg a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }

  static KERNELGEN_INLINE Reg widen_bf16(__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  }
  static KERNELGEN_INLINE __m128i narrow_fp16(Reg x) {
    return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static KERNELGEN_INLINE __m128i narrow_bf16(Reg x) {
    const __m256i word = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(word, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(word, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(word, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  }

 private:
  // AVX2 masks no 16-bit accesses: a short row goes through a register-sized buffer.
  static KERNELGEN_INLINE __m128i load_halves(const void* p, int64_t n) {
    uint16_t buffer[kLanes] = {};
    std::memcpy(buffer, p, 2 * size_t(n >= kLanes ? kLanes : n <= 0 ? 0 : n));
    return _mm_loadu_si128((const __m128i*)buffer);
  }
  static KERNELGEN_INLINE void store_halves(void* p, __m128i x, int64_t n) {
    uint16_t buffer[kLanes];
    _mm_storeu_si128((__m128i*)buffer, x);
    std::memcpy(p, buffer, 2 * size_t(n >= kLanes ? kLanes : n <= 0 ? 0 : n));
  }
};

template <>
struct Simd<double> {
  using Scalar = double;
  using Reg = __m256d;
  using Mask = __m256d;
  static constexpr int kLanes = 4;

  static KERNELGEN_INLINE Mask first(int64_t n) {
    return _mm256_castsi256_pd(_mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3)));
  }

  static KERNELGEN_INLINE Reg zero() { return _mm256_setzero_pd(); }
  static KERNELGEN_INLINE Reg broadcast(double x) { return _mm256_set1_pd(x); }
  static KERNELGEN_INLINE Reg iota() { return _mm256_setr_pd(0, 1, 2, 3); }

  static KERNELGEN_INLINE Reg load(const double* p) { return _mm256_loadu_pd(p); }
  static KERNELGEN_INLINE Reg load_first(const double* p, int64_t n) {
    return _mm256_maskload_pd(p, _mm256_castpd_si256(first(n)));
  }
  static KERNELGEN_INLINE void store(double* p, Reg x) { _mm256_storeu_pd(p, x); }
  static KERNELGEN_INLINE void store_first(double* p, Reg x, int64_t n) {
    _mm256_maskstore_pd(p, _mm256_castpd_si256(first(n)), x);
  }

  static KERNELGEN_INLINE Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_pd(a, b, c); }
  static KERNELGEN_INLINE Reg min(Reg a, Reg b) { return _mm256_min_pd(a, b); }
  static KERNELGEN_INLINE Reg max(Reg a, Reg b) { return _mm256_max_pd(a, b); }
  static KERNELGEN_INLINE Reg abs(Reg a) { return _mm256_andnot_pd(_mm256_set1_pd(-0.0), a); }
  static KERNELGEN_INLINE Reg round(Reg a) { return _mm256_round_pd(a, 8); }
  static KERNELGEN_INLINE Reg sqrt(Reg a) { return _mm256_sqrt_pd(a); }
  static KERNELGEN_INLINE Reg copy_sign(Reg magnitude, Reg sign) {
    const Reg bit = _mm256_set1_pd(-0.0);
    return _mm256_or_pd(_mm256_and_pd(bit, sign), _mm256_andnot_pd(bit, magnitude));
  }
  static KERNELGEN_INLINE Reg scale_by_power(Reg a, Reg n) {
    const Reg bounded = min(broadcast(2044.0), max(broadcast(-2044.0), n));
    const __m128i power = to_int(bounded);
    const __m128i half = _mm_srai_epi32(power, 1);
    return a * power_of_two(half) * power_of_two(_mm_sub_epi32(power, half));
  }
  static KERNELGEN_INLINE __m128i to_int(Reg n) { return _mm256_cvtpd_epi32(n); }
  static KERNELGEN_INLINE Reg power_of_two(__m128i n) {  // -1022 <= n <= 1023, and -1023 gives 0
    const __m256i biased = _mm256_add_epi64(_mm256_cvtepi32_epi64(n), _mm256_set1_epi64x(1023));
    return _mm256_castsi256_pd(_mm256_slli_epi64(biased, 52));
  }

  static KERNELGEN_INLINE Mask less(Reg a, Reg b) { return _mm256_cmp_pd(a, b, _CMP_LT_OQ); }
  static KERNELGEN_INLINE Mask equal(Reg a, Reg b) { return _mm256_cmp_pd(a, b, _CMP_EQ_OQ); }
  static KERNELGEN_INLINE Mask both(Mask a, Mask b) { return _mm256_and_pd(a, b); }
  static KERNELGEN_INLINE bool any(Mask m) { return _mm256_movemask_pd(m) != 0; }
  static KERNELGEN_INLINE Reg select(Mask m, Reg yes, Reg no) { return _mm256_blendv_pd(no, yes, m); }

  static KERNELGEN_INLINE void transpose(Reg (&x)[kLanes]) {
    for (int i = 0; i < 4; i += 2) {
      const Reg a = x[i], b = x[i + 1];
      x[i] = _mm256_unpacklo_pd(a, b);
      x[i + 1] = _mm256_unpackhi_pd(a, b);
    }
    for (int i = 0; i < 2; ++i) {
      const Reg a = x[i], b = x[i + 2];
      x[i] = _mm256_permute2f128_pd(a, b, 0x20);
      x[i + 2] = _mm256_permute2f128_pd(a, b, 0x31);
    }
  }

  static KERNELGEN_INLINE double sum(Reg a) {
    const __m128d x = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_add_sd(x, _mm_unpackhi_pd(x, x)));
  }
  static KERNELGEN_INLINE double reduce_max(Reg a) {
    const __m128d x = _mm_max_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_max_sd(x, _mm_unpackhi_pd(x, x)));
  }
};

#endif

}  // namespace kernelgen
