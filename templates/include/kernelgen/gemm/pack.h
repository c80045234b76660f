// Packing of 16 to 64-bit elements (pack_bytes.h has the others): a strip of a GEMM operand into the panel that Tile (cpu/microkernel.h) reads.
//
// A strip is `outer` rows of a (or columns of b) by `depth` elements of k, at any two strides. Its panel holds, step
// after step, one group of Product::kDepth consecutive k for each outer index:
//
//   panel[s * pitch + i * kDepth + d] = strip(i, s * kDepth + d)        i < Width
//
// converted to Product::Element, zero where i >= outer or k >= depth: zeros on both sides add nothing to a sum. (What a
// packed weight has at k >= depth is left as it comes: finite, and met by zeros of a.)
// A group is one word of 4 bytes (a float, or a pair of bf16) or 8 bytes (a double), so that both directions of
// contiguous memory are moved a register at a time: along outer by copying, along k by transposing squares of words.
#pragma once

#include <type_traits>

#include "kernelgen/gemm/operands.h"

namespace kernelgen {

// Registers of words: 8 of 4 bytes or 4 of 8, at every ISA level.
template <int WordBytes>
struct Words;

template <>
struct Words<4> {
  static constexpr int kCount = 8;
  using Reg = __m256i;

  static KERNELGEN_INLINE void transpose(Reg (&r)[8]) {
    __m256 low[4], high[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256 even = _mm256_castsi256_ps(r[2 * i]), odd = _mm256_castsi256_ps(r[2 * i + 1]);
      low[i] = _mm256_unpacklo_ps(even, odd);
      high[i] = _mm256_unpackhi_ps(even, odd);
    }
    __m256 quad[8];  // quad[4 * h + j]: word j (low half) and j + 4 (high half) of rows 4h .. 4h + 3
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      quad[4 * h] = _mm256_shuffle_ps(low[2 * h], low[2 * h + 1], 0x44);
      quad[4 * h + 1] = _mm256_shuffle_ps(low[2 * h], low[2 * h + 1], 0xee);
      quad[4 * h + 2] = _mm256_shuffle_ps(high[2 * h], high[2 * h + 1], 0x44);
      quad[4 * h + 3] = _mm256_shuffle_ps(high[2 * h], high[2 * h + 1], 0xee);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      r[j] = _mm256_castps_si256(_mm256_permute2f128_ps(quad[j], quad[4 + j], 0x20));
      r[4 + j] = _mm256_castps_si256(_mm256_permute2f128_ps(quad[j], quad[4 + j], 0x31));
    }
  }
};

template <>
struct Words<8> {
  static constexpr int kCount = 4;
  using Reg = __m256i;

  static KERNELGEN_INLINE void transpose(Reg (&r)[4]) {
    const __m256i a = _mm256_unpacklo_epi64(r[0], r[1]), b = _mm256_unpackhi_epi64(r[0], r[1]);
    const __m256i c = _mm256_unpacklo_epi64(r[2], r[3]), d = _mm256_unpackhi_epi64(r[2], r[3]);
    r[0] = _mm256_permute2x128_si256(a, c, 0x20);
    r[1] = _mm256_permute2x128_si256(b, d, 0x20);
    r[2] = _mm256_permute2x128_si256(a, c, 0x31);
    r[3] = _mm256_permute2x128_si256(b, d, 0x31);
  }
};

template <class T, class Product>
struct Packer {
  using Element = typename Product::Element;
  static constexpr int kDepth = Product::kDepth;
  using Block = Words<sizeof(Element) * kDepth>;
  using Reg = typename Block::Reg;
  static constexpr int kCount = Block::kCount;
  static constexpr bool kSameType = std::is_same<T, Element>::value;

  static KERNELGEN_INLINE Element convert(T x) {
    if constexpr (kSameType) {
      return x;
    } else {
      return widen(x);
    }
  }

  // kCount words from consecutive k.
  static KERNELGEN_INLINE Reg load_along_k(const T* p) {
    if constexpr (kSameType) {
      return _mm256_loadu_si256((const __m256i*)p);
    } else {
      return _mm256_castps_si256(load8(p));
    }
  }

  // kCount words of consecutive outer indices: element k of each and, for pairs, element k + 1.
  static KERNELGEN_INLINE Reg load_along_outer(const T* p, int64_t k_stride) {
    if constexpr (kDepth == 2) {
      const __m128i even = _mm_loadu_si128((const __m128i*)p), odd = _mm_loadu_si128((const __m128i*)(p + k_stride));
      return _mm256_set_m128i(_mm_unpackhi_epi16(even, odd), _mm_unpacklo_epi16(even, odd));
    } else {
      return load_along_k(p);
    }
  }

  static KERNELGEN_INLINE void store(Element* p, Reg words) { _mm256_storeu_si256((__m256i*)p, words); }

  // The first `count` words only: what lies behind belongs to the next step, or to another panel.
  static KERNELGEN_INLINE void store_first(Element* p, Reg words, int count) {
    if (count >= kCount) return store(p, words);
    if constexpr (kCount == 4) {
      const __m256i mask = _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3));
      _mm256_maskstore_epi64((long long*)p, mask, words);
    } else {
      const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
      _mm256_maskstore_epi32((int*)p, mask, words);
    }
  }

  // Indices [i0, i1) of steps [s0, s1), element by element: edges, and strips that are contiguous in no direction.
  static void pack_rest(const T* strip, int64_t outer_stride, int64_t k_stride, int64_t outer, int64_t depth, Element* panel,
                        int64_t pitch, int64_t i0, int64_t i1, int64_t s0, int64_t s1) {
    for (int64_t s = s0; s < s1; ++s) {
      for (int64_t i = i0; i < i1; ++i) {
        for (int64_t d = 0; d < kDepth; ++d) {
          const int64_t k = s * kDepth + d;
          panel[s * pitch + i * kDepth + d] = i < outer && k < depth ? convert(strip[i * outer_stride + k * k_stride]) : Element{};
        }
      }
    }
  }

  // Packs a strip. `pitch` (elements between steps) is at least Width * kDepth. Writes nothing but the panel.
  template <int Width>
  static void pack(const T* strip, int64_t outer_stride, int64_t k_stride, int64_t outer, int64_t depth, Element* panel,
                   int64_t pitch) {
    const int64_t steps = (depth + kDepth - 1) / kDepth, whole_steps = depth / kDepth;
    if (k_stride == 1) {
      const int64_t squares = whole_steps / kCount * kCount;
      for (int64_t i0 = 0; i0 < Width; i0 += kCount) {
        const int64_t rows = outer - i0;
        for (int64_t s = 0; s < squares; s += kCount) {
          Reg r[kCount];
#pragma GCC unroll 8
          for (int i = 0; i < kCount; ++i) {
            r[i] = i < rows && i0 + i < Width ? load_along_k(strip + (i0 + i) * outer_stride + s * kDepth) : _mm256_setzero_si256();
          }
          Block::transpose(r);
#pragma GCC unroll 8
          for (int i = 0; i < kCount; ++i) store_first(panel + (s + i) * pitch + i0 * kDepth, r[i], Width - int(i0));
        }
      }
      pack_rest(strip, outer_stride, k_stride, outer, depth, panel, pitch, 0, Width, squares, steps);
    } else if (outer_stride == 1 && Width % kCount == 0) {
      const int64_t vectors = (outer < Width ? outer : Width) / kCount * kCount;
      for (int64_t s = 0; s < whole_steps; ++s) {
        for (int64_t i = 0; i < vectors; i += kCount) {
          store(panel + s * pitch + i * kDepth, load_along_outer(strip + i + s * kDepth * k_stride, k_stride));
        }
      }
      pack_rest(strip, outer_stride, k_stride, outer, depth, panel, pitch, vectors, Width, 0, whole_steps);
      pack_rest(strip, outer_stride, k_stride, outer, depth, panel, pitch, 0, Width, whole_steps, steps);
    } else {
      pack_rest(strip, outer_stride, k_stride, outer, depth, panel, pitch, 0, Width, 0, steps);
    }
  }
};

}  // namespace kernelgen
