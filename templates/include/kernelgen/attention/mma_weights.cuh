// Weights of a variant without a softmax: the scores themselves, of any size and sign, 0 where a row may not attend.
//
// P is rounded to the operand type like any P. bf16 has the range of float. fp16 ends at 65504 and loses bits below 2^-14, so
// there a row's weights are divided by a power of two that follows the largest of them, and its output is multiplied with it
// when it is stored. `maxima` holds the exponent of that unit, -inf for none: output is in units of 2^maxima, as under a
// softmax, and parts of a row are added in the same way.
#pragma once

#include <kernelgen/attention/mma_shape.cuh>

namespace kernelgen {

template <class Shape>
struct PlainWeights {
  using T = typename Shape::T;
  static constexpr int kLaneRows = Shape::kLaneRows;
  static constexpr int kKeyTiles = Shape::kKeyTiles;
  static constexpr bool kScaled = is_same_v<T, fp16>;

  // In units of 2^maxima the largest weight so far has this exponent when the unit is set. It may grow to kMostExponent before
  // the unit moves: fp16 ends below 2^16, and most tiles skip the pass over `output`.
  static constexpr float kExponent = 8.0f, kMostExponent = 14.0f;
  static constexpr float kLeastWeight = -100.0f;  // as an exponent: below, units would leave the range of float

  __device__ static float unit(float maximum) { return maximum == -infinity() ? 1.0f : exp2_approx(maximum); }

  // One step: scores (weights in float, hidden ones 0) are packed, and units and output follow. value_scales: as in
  // Softmax::step.
  __device__ static void step(
      typename Shape::Scores& scores, typename Shape::Weights& weights, typename Shape::Output& output,
      float (&maxima)[kLaneRows], uint32_t value_scales, float value_unit) {
    if constexpr (Shape::kPageScales) scale_values(scores, value_scales, value_unit);
    if constexpr (kScaled) move_units(scores, output, maxima);
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const float factor = kScaled ? exp2_approx(-maxima[r]) : 1.0f;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        weights[r / 2][n / 2][n % 2 * 2 + r % 2] =
            pack_pair<T>(scores[r / 2][n][r % 2 * 2] * factor, scores[r / 2][n][r % 2 * 2 + 1] * factor);
      }
    }
  }

  __device__ static void scale_values(typename Shape::Scores& scores, uint32_t value_scales, float value_unit) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const uint32_t address = value_scales + (8 * n + lane_id() % 4 * 2) * 4;
      const float even = __uint_as_float(load_word(address)) * value_unit;
      const float odd = __uint_as_float(load_word(address + 4)) * value_unit;
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        scores[r / 2][n][r % 2 * 2] *= even;
        scores[r / 2][n][r % 2 * 2 + 1] *= odd;
      }
    }
  }

  // Moves the units of rows whose largest weight has grown too large for them.
  __device__ static void move_units(
      const typename Shape::Scores& scores, typename Shape::Output& output, float (&maxima)[kLaneRows]) {
    float raised[kLaneRows];
    bool move = false;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      float top = 0.0f;  // fmaxf drops a NaN, which reaches the output as a weight
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        top = fmaxf(top, fmaxf(fabsf(scores[r / 2][n][r % 2 * 2]), fabsf(scores[r / 2][n][r % 2 * 2 + 1])));
      }
      raised[r] = fmaxf(exponent_of(quad_max(top)), kLeastWeight);
      move |= raised[r] > maxima[r] + kMostExponent;
    }
    if (!__any_sync(kFullWarp, move)) return;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const float next = fmaxf(maxima[r], raised[r] - kExponent);
      const float factor = exp2_approx(fmaxf(maxima[r] - next, -126.0f));  // never 0: an output of inf stays one
      maxima[r] = next;
#pragma unroll
      for (int n = 0; n < Shape::kValueTiles; ++n) {
        output[r / 2][n][r % 2 * 2] *= factor;
        output[r / 2][n][r % 2 * 2 + 1] *= factor;
      }
    }
  }

  // floor(log2(x)) of a positive number: 128 for inf, -127 for 0.
  __device__ static float exponent_of(float x) { return static_cast<float>(static_cast<int>(__float_as_uint(x) >> 23) - 127); }
};

}  // namespace kernelgen
