// Packing of operands that are stored in a byte or half of one (operands.h): the panel of pack.h, from fp8 values or codes.
//
// Squares of 16 outer indices by 16 elements of k pass through registers as bytes: loaded along k they are transposed, loaded
// along the outer index they lie right already. So the widening, the larger part of the work, sees neighbouring outer indices,
// which are neighbours in the panel too, and zero points are a vector of their own.
#pragma once

#include "kernelgen/gemm/operands.h"

namespace kernelgen {

template <class T, class Product>
struct BytePacker {
  using Element = typename Product::Element;
  using V = Simd<float>;
  static constexpr int kDepth = Product::kDepth;
  static constexpr int kSquare = 16;
  static constexpr bool kCodes = is_packed<T>;

  // n bytes, the rest zero.
  static KERNELGEN_INLINE __m128i load_bytes(const T* p, int64_t n) {
    __m128i bytes = _mm_setzero_si128();
    if (n >= kSquare) {
      bytes = _mm_loadu_si128((const __m128i*)p);
    } else if (n > 0) {
      std::memcpy(&bytes, p, size_t(n));
    }
    return bytes;
  }

  // square[i] byte d becomes square[d] byte i: every round shuffles the bits of the byte's index by one.
  static KERNELGEN_INLINE void transpose(__m128i (&square)[kSquare]) {
#pragma GCC unroll 4
    for (int round = 0; round < 4; ++round) {
      __m128i next[kSquare];
#pragma GCC unroll 8
      for (int i = 0; i < kSquare / 2; ++i) {
        next[2 * i] = _mm_unpacklo_epi8(square[i], square[i + kSquare / 2]);
        next[2 * i + 1] = _mm_unpackhi_epi8(square[i], square[i + kSquare / 2]);
      }
#pragma GCC unroll 16
      for (int i = 0; i < kSquare; ++i) square[i] = next[i];
    }
  }

  // square[d] byte i: element k + d of outer index i; zero beyond `outer` and `depth`. `strip` starts at outer index 0, k = 0.
  static KERNELGEN_INLINE void load(const T* strip, int64_t outer_stride, int64_t k_stride, int64_t outer, int64_t k, int64_t depth,
                                    __m128i (&square)[kSquare]) {
    if constexpr (kCodes) {
#pragma GCC unroll 16
      for (int i = 0; i < kSquare; ++i) {
        square[i] = i < outer ? load_whole_numbers<kSquare>(strip + i * outer_stride, k, depth - k) : _mm_setzero_si128();
      }
      transpose(square);
    } else if (k_stride == 1) {
#pragma GCC unroll 16
      for (int i = 0; i < kSquare; ++i) {
        square[i] = i < outer ? load_bytes(strip + i * outer_stride + k, depth - k) : _mm_setzero_si128();
      }
      transpose(square);
    } else if (outer_stride == 1) {
#pragma GCC unroll 16
      for (int d = 0; d < kSquare; ++d) {
        square[d] = k + d < depth ? load_bytes(strip + (k + d) * k_stride, outer) : _mm_setzero_si128();
      }
    } else {
      alignas(16) T bytes[kSquare][kSquare] = {};
      for (int64_t d = 0; d < kSquare && k + d < depth; ++d) {
        for (int64_t i = 0; i < kSquare && i < outer; ++i) bytes[d][i] = strip[i * outer_stride + (k + d) * k_stride];
      }
      std::memcpy(square, bytes, sizeof bytes);
    }
  }

#if defined(__AVX512F__)
  static KERNELGEN_INLINE __m512 widen(__m128i bytes, const float* zero) {
    if constexpr (kCodes) {
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)) * _mm512_set1_ps(Nibble<T>::kUnit) - _mm512_loadu_ps(zero);
    } else {
      return widen16(T{}, bytes);
    }
  }
#endif
  static KERNELGEN_INLINE __m256 widen_low(__m128i bytes, const float* zero) {
    if constexpr (kCodes) {
      return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)) * _mm256_set1_ps(Nibble<T>::kUnit) - _mm256_loadu_ps(zero);
    } else {
      return widen8(T{}, bytes);
    }
  }

  // One step of `width` outer indices: bytes of k and, for pairs, of k + 1. zeros: of each outer index, kDepth times.
  static KERNELGEN_INLINE void store(Element* panel, int64_t width, __m128i even, __m128i odd, const float* zeros) {
    if constexpr (kDepth == 2) {
#if defined(__AVX512BF16__)
      const __m128i half[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        if (8 * h < width) {  // a width is a multiple of 8
          _mm256_storeu_si256((__m256i*)(panel + 16 * h), (__m256i)_mm512_cvtneps_pbh(widen(half[h], zeros + 16 * h)));
        }
      }
#endif
    } else {
#if defined(__AVX512F__)
      V::store_first(panel, widen(even, zeros), width);
#else
      V::store_first(panel, widen_low(even, zeros), width);
      V::store_first(panel + 8, widen_low(_mm_srli_si128(even, 8), zeros + 8), width - 8);
#endif
    }
  }

  // Packs a strip; zero(i, k): what a code of 0 stands for in outer index i, the same for a square's k.
  template <int Width, class Zero>
  static void pack(const T* strip, int64_t outer_stride, int64_t k_stride, int64_t outer, int64_t depth, Element* panel, int64_t pitch,
                   Zero zero) {
    for (int64_t i0 = 0; i0 < Width; i0 += kSquare) {
      const int64_t width = Width - i0 < kSquare ? Width - i0 : kSquare, rows = outer - i0 < width ? outer - i0 : width;
      for (int64_t k = 0; k < depth; k += kSquare) {
        __m128i square[kSquare];
        load(strip + i0 * outer_stride, outer_stride, k_stride, rows, k, depth, square);
        alignas(64) float zeros[kSquare * kDepth] = {};
        if constexpr (kCodes) {
          for (int64_t i = 0; i < rows * kDepth; ++i) zeros[i] = zero(i0 + i / kDepth, k);
        }
        Element* out = panel + k / kDepth * pitch + i0 * kDepth;
#pragma GCC unroll 16
        for (int d = 0; d < kSquare; d += kDepth) {
          if (k + d < depth) store(out + d / kDepth * pitch, width, square[d], square[d + kDepth - 1], zeros);
        }
      }
    }
  }
};

}  // namespace kernelgen
