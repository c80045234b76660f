// Online softmax of attention/prefill_sm90: scores of two rows in a lane become weights in place, while products of the tile before still
// write the output. So what the output has to be multiplied with is kept, and applied when these have ended.
//
// Weights are 2^(score - reference). The maximum of a tile is looked for only until every row of the warp has a reference. From then on the
// exponentials begin at once, and their sums tell whether the reference is too low: a sum above kMost moves it by a power of two, which
// weights that are already there follow without a loss; one of kFar, or inf, has the scores made again. The search was 17 % of a tile's time
// (H200, D = 128), between its two products, where nothing of the warp's could run under it.
#pragma once

#include <kernelgen/attention/mma_weights.cuh>
#include <kernelgen/attention/sm90_shape.cuh>

namespace kernelgen {

template <class Shape>
struct DeferredSoftmax {
  static constexpr float kMost = 1024.0f;  // of a lane's weights of a tile and row: far below where fp16 ends
  static constexpr float kFar = 0x1p127f;  // from here on the power that weights would have to be multiplied with is flushed to 0
  float maxima[2] = {-infinity(), -infinity()}, sums[2] = {0.0f, 0.0f};  // references, as base-2 exponents
  float factors[2];
  bool moved = false;    // of the warp: the output has to take `factors`
  bool settled = false;  // of the warp: every row has a reference

  // scores[4 n + 2 r + e]: row r, column 8 n + e of the lane's. Their references are the maxima so far.
  template <int kCount>
  __device__ void step_by_maximum(float (&scores)[kCount], float scale) {
    float top[2][2], part[2];
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float both = fmaxf(scores[4 * n + 2 * r], scores[4 * n + 2 * r + 1]);
        top[r][n % 2] = n < 2 ? both : fmaxf(top[r][n % 2], both);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) move_to(r, fmaxf(maxima[r], quad_max(fmaxf(top[r][0], top[r][1])) * scale));
    settled = __all_sync(kFullWarp, maxima[0] > -infinity() && maxima[1] > -infinity());
    moved = true;
    weigh(scores, part, scale);
#pragma unroll
    for (int r = 0; r < 2; ++r) sums[r] += part[r];
  }

  // False, with nothing but the scores changed: some weight is out of reach.
  template <int kCount>
  __device__ bool step_by_reference(float (&scores)[kCount], float scale) {
    float part[2];
    weigh(scores, part, scale);
    moved = __any_sync(kFullWarp, part[0] > kMost || part[1] > kMost);
    if (moved) {
#pragma unroll
      for (int r = 0; r < 2; ++r) part[r] = quad_max(part[r]);  // NaN is dropped, and is in the weights still
      if (__any_sync(kFullWarp, part[0] >= kFar || part[1] >= kFar)) return false;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        move_to(r, part[r] > kMost ? maxima[r] + PlainWeights<Shape>::exponent_of(part[r]) : maxima[r]);
        part[r] = 0.0f;
#pragma unroll
        for (int n = 0; n < kCount / 4; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) part[r] += scores[4 * n + 2 * r + e] *= factors[r];
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sums[r] += part[r];
    return true;
  }

  // P as the A operand of 16 keys: rows and column pairs are where the scores were. Keys that have no scores weigh nothing.
  template <int kCount>
  __device__ static void pack(uint32_t (&weights)[Shape::kKeySteps][4], const float (&scores)[kCount]) {
#pragma unroll
    for (int i = 0; i < Shape::kKeySteps * 4; ++i) {
      weights[i / 4][i % 4] = 2 * i < kCount ? pack_pair<typename Shape::T>(scores[2 * i % kCount], scores[(2 * i + 1) % kCount]) : 0u;
    }
  }

  __device__ void rescale(float (&output)[Shape::kOutputCount]) const {
    if (!moved) return;
#pragma unroll
    for (int i = 0; i < Shape::kOutputCount; ++i) output[i] *= factors[i % 4 / 2];
  }

 private:
  // While nothing has been weighted the output is 0, or what absorb() put there: neither -inf - -inf nor inf * 0 may appear.
  __device__ void move_to(int r, float next) {
    factors[r] = maxima[r] == -infinity() ? 1.0f : exp2_approx(maxima[r] - next);
    maxima[r] = next;
    sums[r] *= factors[r];
  }

  // Scores to weights; the lane's sums by row, each in two chains.
  template <int kCount>
  __device__ void weigh(float (&scores)[kCount], float (&part)[2], float scale) const {
    float reference[2], added[2][2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) reference[r] = maxima[r] == -infinity() ? 0.0f : maxima[r];
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = scores[4 * n + 2 * r + e];
          x = exp2_approx(fmaf(x, scale, -reference[r]));
          added[r][e] += x;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) part[r] = added[r][0] + added[r][1];
  }
};

}  // namespace kernelgen
