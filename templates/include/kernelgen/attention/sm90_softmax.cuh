// Online softmax of attention/prefill_sm90: scores of two rows in a lane become weights in place, while products of the tile before still
// write the output. So what the output has to be multiplied with is kept, and applied when these have ended.
//
// The reference point follows the true maximum only when that has grown by more than kRescaleSlack (base-2 exponent), as in mma_softmax.cuh.
#pragma once

#include <kernelgen/attention/mma_softmax.cuh>
#include <kernelgen/attention/sm90_shape.cuh>

namespace kernelgen {

template <class Shape>
struct DeferredSoftmax {
  static constexpr int kCount = Shape::kScoreCount;
  float maxima[2] = {-infinity(), -infinity()}, sums[2] = {0.0f, 0.0f};
  float factors[2];
  bool moved = false;  // of the warp

  // scores[4 n + 2 r + e]: row r, column 8 n + e of the lane's.
  __device__ void step(float (&scores)[kCount], float scale) {
    float raised[2];
    bool move = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = fmaxf(scores[2 * r], scores[2 * r + 1]);
#pragma unroll
      for (int n = 1; n < kCount / 4; ++n) top = fmaxf(top, fmaxf(scores[4 * n + 2 * r], scores[4 * n + 2 * r + 1]));
      raised[r] = quad_max(top) * scale;
      move |= raised[r] > maxima[r] + Softmax<Shape>::kRescaleSlack;
    }
    moved = __any_sync(kFullWarp, move);
    if (moved) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float next = fmaxf(maxima[r], raised[r]);
        factors[r] = maxima[r] == -infinity() ? 1.0f : exp2_approx(maxima[r] - next);
        maxima[r] = next;
        sums[r] *= factors[r];
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float reference = maxima[r] == -infinity() ? 0.0f : maxima[r];
#pragma unroll
      for (int n = 0; n < kCount / 4; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = scores[4 * n + 2 * r + e];
          x = exp2_approx(fmaf(x, scale, -reference));
          sums[r] += x;
        }
      }
    }
  }

  // P as the A operand of 16 keys: rows and column pairs are where the scores were.
  __device__ static void pack(uint32_t (&weights)[Shape::kKeySteps][4], const float (&scores)[kCount]) {
#pragma unroll
    for (int i = 0; i < Shape::kKeySteps * 4; ++i) weights[i / 4][i % 4] = pack_pair<typename Shape::T>(scores[2 * i], scores[2 * i + 1]);
  }

  __device__ void rescale(float (&output)[Shape::kOutputCount]) const {
    if (!moved) return;
#pragma unroll
    for (int i = 0; i < Shape::kOutputCount; ++i) output[i] *= factors[i % 4 / 2];
  }
};

}  // namespace kernelgen
