// The register tile that every dense product of the CPU backend is built from.
//
//   acc[r][v] += sum over s of  left(r, s) * right(s, v)        r < Rows, v < Vecs registers
//
// The left operand is broadcast one element at a time, straight from memory, with any row and step stride; the right
// operand is read in whole registers. So only one side needs vector-friendly storage, and a caller chooses which of its
// two operands that is by computing C or its transpose.
//
// A Product says what one step multiplies:
//   FmaProduct<float>, FmaProduct<double>   one element of depth a step
//   PairProduct (AVX512_BF16 only)          two bf16 elements of depth a step, accumulated in float: the left operand
//                                           holds the two next to each other, the right one lane by lane:
//                                           [step][lane][2] ("pairs")
//
// Zen 4, 3.7 GHz, one core, operands in L1. AVX-512: 8x2, 8x3, 12x2, 14x2, 6x4 and 4x4 all issue 3.6 - 3.7 G products a
// second, the peak of one 512-bit FMA (or pair product) a cycle; 8x2 suits head dimensions that are multiples of 8.
// AVX2: 4x3 and 6x2 issue 7.3 G, the peak of two 256-bit FMAs a cycle; 4x2 6.9 G, 8x1 5.2 - 6.2 G. These tiles fill all
// 16 registers: call multiply() from a function that does little else (noinline), or GCC 12 may spill accumulators.
#pragma once

#include "kernelgen/cpu/vec.h"

namespace kernelgen {

template <class T>
struct FmaProduct {
  using V = Simd<T>;
  using Element = T;                 // of both operands as stored
  static constexpr int kDepth = 1;   // elements of depth in one step
  static KERNELGEN_INLINE typename V::Reg left(const Element* a) { return V::broadcast(*a); }
  static KERNELGEN_INLINE typename V::Reg right(const Element* b) { return V::load(b); }
  static KERNELGEN_INLINE typename V::Reg multiply_add(typename V::Reg l, typename V::Reg r, typename V::Reg acc) {
    return V::fma(l, r, acc);
  }
};

#if defined(__AVX512BF16__)
struct PairProduct {
  using V = Simd<float>;
  using Element = bf16;
  static constexpr int kDepth = 2;
  static KERNELGEN_INLINE __m512i left(const Element* a) {
    int32_t pair;
    std::memcpy(&pair, a, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
  static KERNELGEN_INLINE __m512i right(const Element* b) { return _mm512_loadu_si512(b); }
  static KERNELGEN_INLINE __m512 multiply_add(__m512i l, __m512i r, __m512 acc) {
    return _mm512_dpbf16_ps(acc, (__m512bh)l, (__m512bh)r);
  }

  // One register of right operand from two registers of floats: lane l holds (even[l], odd[l]) rounded to bf16.
  static KERNELGEN_INLINE __m512i narrow_pairs(__m512 even, __m512 odd) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i upper = _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(16)), 16);
    const __m512i interleave = _mm512_or_si512(lane, upper);
    return _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
  }
  // Eight elements each of two rows as eight pairs.
  static KERNELGEN_INLINE void interleave8(const bf16* even, const bf16* odd, bf16* pairs) {
    const __m128i a = _mm_loadu_si128((const __m128i*)even), b = _mm_loadu_si128((const __m128i*)odd);
    _mm_storeu_si128((__m128i*)pairs, _mm_unpacklo_epi16(a, b));
    _mm_storeu_si128((__m128i*)(pairs + 8), _mm_unpackhi_epi16(a, b));
  }
};
#endif

// How operands of type T are multiplied at this ISA level. Where Element differs from T they are widened when packed.
template <class T>
struct ProductOf {
  using type = FmaProduct<Accumulator<T>>;
};
#if defined(__AVX512BF16__)
template <>
struct ProductOf<bf16> {
  using type = PairProduct;
};
#endif

// Tile sizes that fill the register file: 16 accumulators of 32 registers (AVX-512), 12 of 16 (AVX2).
#if defined(__AVX512F__)
constexpr int kTileRows = 8, kTileVecs = 2;
#else
constexpr int kTileRows = 4, kTileVecs = 3;
#endif

template <class Product, int Rows = kTileRows, int Vecs = kTileVecs>
struct Tile {
  using V = typename Product::V;
  using Reg = typename V::Reg;
  using Element = typename Product::Element;
  static constexpr int kRows = Rows, kVecs = Vecs, kWidth = Vecs * V::kLanes;

  Reg acc[Rows][Vecs];

  KERNELGEN_INLINE void clear() {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < Vecs; ++v) acc[r][v] = V::zero();
  }

  KERNELGEN_INLINE void add(const Tile& other) {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < Vecs; ++v) acc[r][v] = acc[r][v] + other.acc[r][v];
  }

  // left(r, s) at a[r * row_stride + s * step_stride], right(s, .) at b[s * b_stride]: by default a packed panel of
  // this tile's width. Strides in elements; compile-time constants become address displacements once inlined.
  KERNELGEN_INLINE void multiply(const Element* a, int64_t row_stride, int64_t step_stride, const Element* b,
                                 int64_t steps, int64_t b_stride = kWidth * Product::kDepth) {
#pragma GCC unroll 1
    for (int64_t s = 0; s < steps; ++s) {
      decltype(Product::right(b)) right[Vecs];
#pragma GCC unroll 8
      for (int v = 0; v < Vecs; ++v) right[v] = Product::right(b + v * V::kLanes * Product::kDepth);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const auto left = Product::left(a + r * row_stride);
#pragma GCC unroll 8
        for (int v = 0; v < Vecs; ++v) acc[r][v] = Product::multiply_add(left, right[v], acc[r][v]);
      }
      a += step_stride;
      b += b_stride;
    }
  }
};

}  // namespace kernelgen
