// Online softmax in registers, and the care for values that are inf or NaN.
#pragma once

#include <kernelgen/attention/mma_copy.cuh>
#include <kernelgen/attention/mma_rules.cuh>

namespace kernelgen {

template <class Shape>
struct Softmax {
  using T = typename Shape::T;
  static constexpr int kLaneRows = Shape::kLaneRows;
  static constexpr int kKeyTiles = Shape::kKeyTiles;
  static constexpr int kValueTiles = Shape::kValueTiles;

  // One step: weights = 2^(score * scale - maximum), and sums and output follow. value_scales: shared address of a factor
  // of each key's value (kPageScales), which the weights take along, times value_unit, but the sums do not.
  //
  // The reference point (`maxima`, in base-2 exponents) follows the true maximum only when that has grown by more
  // than kRescaleSlack: most tiles then skip the pass over `output`. Exponentials stay below 2^kRescaleSlack, which
  // fp16 holds, and the final division makes the result the same.
  static constexpr float kRescaleSlack = 8.0f;
  __device__ static void step(
      const typename Shape::Scores& scores, typename Shape::Weights& weights, typename Shape::Output& output,
      float (&maxima)[kLaneRows], float (&sums)[kLaneRows], float scale, uint32_t value_scales,
      float value_unit) {
    float raised[kLaneRows];
    bool move = false;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      float top = -infinity();
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        top = fmaxf(top, fmaxf(scores[r / 2][n][r % 2 * 2], scores[r / 2][n][r % 2 * 2 + 1]));
      }
      raised[r] = quad_max(top) * scale;
      move |= raised[r] > maxima[r] + kRescaleSlack;
    }
    if (__any_sync(kFullWarp, move)) {
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        const float next = fmaxf(maxima[r], raised[r]);
        // While nothing has been weighted the output is 0 (or what absorb_nonfinite put there): nothing to rescale,
        // and neither -inf - -inf nor inf * 0 may appear.
        const float factor = maxima[r] == -infinity() ? 1.0f : exp2_approx(maxima[r] - next);
        maxima[r] = next;
        sums[r] *= factor;
#pragma unroll
        for (int n = 0; n < kValueTiles; ++n) {
          output[r / 2][n][r % 2 * 2] *= factor;
          output[r / 2][n][r % 2 * 2 + 1] *= factor;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const float reference = maxima[r] == -infinity() ? 0.0f : maxima[r];
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        float even = exp2_approx(fmaf(scores[r / 2][n][r % 2 * 2], scale, -reference));
        float odd = exp2_approx(fmaf(scores[r / 2][n][r % 2 * 2 + 1], scale, -reference));
        sums[r] += even + odd;
        if constexpr (Shape::kPageScales) {
          const uint32_t address = value_scales + (8 * n + lane_id() % 4 * 2) * 4;
          even *= __uint_as_float(load_word(address)) * value_unit;
          odd *= __uint_as_float(load_word(address + 4)) * value_unit;
        }
        weights[r / 2][n / 2][n % 2 * 2 + r % 2] = pack_pair<T>(even, odd);
      }
    }
  }
};

template <class Shape, class Layout>
struct Nonfinite {
  using T = typename Shape::T;
  using ValueTile = typename Shape::ValueTile;
  using C = typename Layout::ValueCopier;

  // Whether a value that this thread copied into the tile is inf or NaN. Its own copies have landed; no barrier needed.
  __device__ static bool copied(uint32_t v_tile) {
    uint32_t found = 0;
    C::each([&](int down, int right) {
      uint32_t w[4];
      load_chunk(w, v_tile + C::offset(down, right));
#pragma unroll
      for (int i = 0; i < 4; ++i) found |= nonfinite_halves<T>(w[i]);
    });
    return found != 0;
  }

  // Adds the tile's inf and NaN values to the output of the rows that may attend to them (the result is inf or NaN
  // whatever their weight), then replaces them by 0. Rare: called by the whole group when a partly visible tile
  // holds such a value, under a softmax.
  __device__ static void absorb(
      typename Shape::Output& output, const typename Layout::Params& p, const typename Layout::Work& work, int first_key,
      uint32_t v_tile) {
#pragma unroll
    for (int n = 0; n < Shape::kValueTiles; ++n) {
#pragma unroll 1
      for (int key = 0; key < Shape::kBlockK; ++key) {
        const uint32_t word = load_word(v_tile + ValueTile::offset(key, n) + lane_id() % 4 * 4);
        const uint32_t bad = nonfinite_halves<T>(word);
        if (bad == 0) continue;
        const float2 value = unpack_pair<T>(word & ((bad >> 15) * 0xffffu));
#pragma unroll
        for (int r = 0; r < Shape::kLaneRows; ++r) {
          if (!Rules<Shape, Layout>::visible(p, work, Shape::row_in_block(work.warp, r), first_key + key)) continue;
          output[r / 2][n][r % 2 * 2] += value.x;
          output[r / 2][n][r % 2 * 2 + 1] += value.y;
        }
      }
    }
    clear(v_tile);
  }

  // The same without a softmax, where an inf counts with the sign of its weight and a weight may be 0: behind the weights
  // of the tile. `sees`: the warp has any.
  __device__ static void absorb_weighted(
      typename Shape::Output& output, const typename Shape::Weights& weights, bool sees, const typename Layout::Params& p,
      const typename Layout::Work& work, int first_key, uint32_t v_tile) {
    constexpr int kSteps = Shape::kBlockK / 16;
    uint32_t held[Shape::kRowTiles * kSteps * 4];  // a copy that may be indexed by key: the fragments stay in registers
#pragma unroll
    for (int i = 0; i < Shape::kRowTiles * kSteps * 4; ++i) held[i] = sees ? weights[i / (kSteps * 4)][i / 4 % kSteps][i % 4] : 0;
#pragma unroll 1
    for (int key = 0; key < (sees ? Shape::kBlockK : 0); ++key) {
      float weight[Shape::kLaneRows];
#pragma unroll
      for (int r = 0; r < Shape::kLaneRows; ++r) {
        const uint32_t mine = held[(r / 2 * kSteps + key / 16) * 4 + key / 8 % 2 * 2 + r % 2];
        const float2 pair = unpack_pair<T>(__shfl_sync(kFullWarp, mine, lane_id() / 4 * 4 + key % 8 / 2));
        weight[r] = key % 2 == 0 ? pair.x : pair.y;
      }
#pragma unroll
      for (int n = 0; n < Shape::kValueTiles; ++n) {
        const uint32_t word = load_word(v_tile + ValueTile::offset(key, n) + lane_id() % 4 * 4);
        const uint32_t bad = nonfinite_halves<T>(word);
        if (bad == 0) continue;
        const float2 value = unpack_pair<T>(word & ((bad >> 15) * 0xffffu));
#pragma unroll
        for (int r = 0; r < Shape::kLaneRows; ++r) {
          if (!Rules<Shape, Layout>::visible(p, work, Shape::row_in_block(work.warp, r), first_key + key)) continue;
          if (bad & 0x8000u) output[r / 2][n][r % 2 * 2] += weight[r] * value.x;
          if (bad & 0x80000000u) output[r / 2][n][r % 2 * 2 + 1] += weight[r] * value.y;
        }
      }
    }
    clear(v_tile);
  }

  // Replaces the tile's inf and NaN values by 0.
  __device__ static void clear(uint32_t v_tile) {
    Shape::group_sync();  // every warp has read the tile before anyone clears parts of it
    C::rewrite(v_tile, [](uint32_t w) { return w & ~((nonfinite_halves<T>(w) >> 15) * 0xffffu); });
    Shape::group_sync();  // the cleared tile is complete before the product reads it
  }
};

}  // namespace kernelgen
