// What the kernels for few rows of a beside a packed 4-bit b share: the order in which a warp multiplies codes, how they are decoded,
// and what becomes of finished sums.
//
// Sums over k may run in any order that both operands share: a lane multiplies neighbouring codes, and in pairs of the first and
// fifth, second and sixth, .. of eight, which lie 16 bits apart in their word (four_bit.cuh).
//
// What limits these kernels is how many instructions a code takes. So int4 codes beside a bf16 a are multiplied as 128 + code, which
// takes no arithmetic; 128 and the zero point, times the sum of a's elements, are subtracted from a group's sum. (A bf16 holds
// 128 + code exactly; the float32 sums are some 30 times as large as without, and lose 5 of their 24 bits, which a 16-bit output does
// not show.)
#pragma once

#include <kernelgen/activation/activations.cuh>
#include <kernelgen/cuda/four_bit.cuh>
#include <kernelgen/cuda/mma.cuh>
#include <kernelgen/cuda/vector_io.cuh>
#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/gemm/mma_scales.cuh>
#include <kernelgen/gemm/mma_shape.cuh>

namespace kernelgen {

// `Options`: as in mma_shape.cuh, ElementB int4_code or e2m1; kZero, kGroup (codes that share a scale), kBias, kActivation, kAccumulate,
// kVectorOut
template <class Options>
struct PackedCodes : Options {
  using Code = typename Options::ElementB;
  using T = typename Options::Product;
  using Out = typename Options::Out;
  using ScaleB = typename Options::ScaleB;
  using Options::kGroup;
  using Options::kZero;

  static constexpr int kStep = 128;                             // of k, of one warp
  static constexpr int kRun = min_of(kGroup, kStep) / 4;        // neighbouring codes of a lane: a quad has one group at a time
  static constexpr int kGroups = max_of(1, kStep / kGroup);     // of a step
  static constexpr int kWords = 4;                              // of eight codes, of a lane, column and step
  static constexpr bool kRaised = is_same_v<Code, int4_code> && is_same_v<T, bf16> && sizeof(Out) == 2;  // multiplied as 128 + code
  static_assert(kGroup == 32 || kGroup == 64 || kGroup % 128 == 0, "a step has whole groups, or a group whole steps");

  __device__ static int place() { return lane_id() % 4; }        // of k
  __device__ static int row_of_lane() { return lane_id() / 4; }  // of a tile's halves, and of a

  // First element of k, within a step, of word `word` of this lane.
  __device__ static int k_of_word(int word) { return word * 8 / kRun * 4 * kRun + place() * kRun + word * 8 % kRun; }
  __device__ static int group_of_word(int word) { return kGroups == 1 ? 0 : word * 8 / kRun; }
  __device__ static bool begins_group(int word) { return word == 0 || group_of_word(word) != group_of_word(word - 1); }
  __device__ static bool ends_group(int word) { return word + 1 == kWords || group_of_word(word) != group_of_word(word + 1); }

  // A zero point as it is used: as a float, plus 128, or as negated pair.
  __device__ static uint32_t zero_value(int zero) { return kRaised ? __float_as_uint(128.0f + zero) : negative_pair<T>(zero); }

  __device__ static uint32_t decode(uint32_t word, int pair, uint32_t zero) {
    if constexpr (kRaised) {
      return int4_pair_raised<T>(word, pair);
    } else if constexpr (is_same_v<Code, int4_code>) {
      return int4_pair_apart<T, kZero>(word, pair, zero);
    } else {
      return e2m1_pair_apart<T>(word, pair);
    }
  }

  // Eight neighbouring elements of a as registers of two mma: pairs of the first and fifth, ...
  __device__ static void pair_up(uint32_t (&pairs)[4], const uint32_t (&x)[4]) {
    pairs[0] = __byte_perm(x[0], x[2], 0x5410);
    pairs[1] = __byte_perm(x[0], x[2], 0x7632);
    pairs[2] = __byte_perm(x[1], x[3], 0x5410);
    pairs[3] = __byte_perm(x[1], x[3], 0x7632);
  }

  // Finished sums of eight neighbouring outputs of a row; those from p.n on do not exist.
  __device__ static void finish(float (&y)[8], const GemmMmaParams& p, int token, int column) {
    const int count = p.n - column;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (Options::kBias) y[i] += to_float(static_cast<const typename Options::Bias*>(p.bias)[min(column + i, p.n - 1)]);
      y[i] = activate<Options::kActivation>(y[i]);
    }
    if constexpr (Options::kAccumulate) {
      // A zero beta means that c is not read, as in BLAS: 0 * NaN would be NaN.
      const auto* c = static_cast<const typename Options::C*>(p.c) + token * p.c_row + column;
      if (p.beta != 0.0f) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (i < count) y[i] = fmaf(p.beta, to_float(c[i]), y[i]);
        }
      }
    }
    Out* out = static_cast<Out*>(p.out) + token * p.out_row + column;
    if (Options::kVectorOut && count >= 8) {
      constexpr int kPart = min_of(8, 16 / static_cast<int>(sizeof(Out)));
#pragma unroll
      for (int i = 0; i < 8; i += kPart) {
        float part[kPart];
#pragma unroll
        for (int j = 0; j < kPart; ++j) part[j] = y[i + j];
        store_elements(out + i, part);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < count) out[i] = from_float<Out>(y[i]);
      }
    }
  }
};

}  // namespace kernelgen
