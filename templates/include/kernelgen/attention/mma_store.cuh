// From the state of the online softmax to what the kernel writes: rows of the output and the LSE, or partial results.
#pragma once

#include <kernelgen/attention/mma_rules.cuh>
#include <kernelgen/attention/mma_weights.cuh>

namespace kernelgen {

template <class Shape, class Layout>
struct Store {
  using Params = typename Layout::Params;
  using Work = typename Layout::Work;
  using Output = typename Shape::Output;
  using Out = typename Shape::OutElement;
  using OutTile = typename Shape::OutTile;
  static constexpr int kLaneRows = Shape::kLaneRows;
  static constexpr int kValueTiles = Shape::kValueTiles;

  // Adds the results of the block's other groups to those of the first warp, which goes on alone: false for the others.
  // Fragments lie in the same lanes of every warp, so a lane exchanges only with its likes.
  __device__ static bool combine_groups(
      Output& output, float (&maxima)[kLaneRows], float (&sums)[kLaneRows], uint32_t shared) {
    constexpr int kOutputs = Shape::kRowTiles * kValueTiles * 4;
    const int group = threadIdx.x / kWarpSize;
    auto slot = [&](int from, int i) { return shared + (((from - 1) * Shape::kExchangeFloats + i) * kWarpSize + lane_id()) * 4; };
    __syncthreads();  // the exchange lies over the tiles: every warp is done reading them
    if (group > 0) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        store_word(slot(group, i), __float_as_uint(output[i / (kValueTiles * 4)][i / 4 % kValueTiles][i % 4]));
      }
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        store_word(slot(group, kOutputs + 2 * r), __float_as_uint(maxima[r]));
        store_word(slot(group, kOutputs + 2 * r + 1), __float_as_uint(sums[r]));
      }
    }
    __syncthreads();  // what the others wrote is visible to the first warp
    if (group > 0) return false;
#pragma unroll 1
    for (int from = 1; from < Shape::kKeyWarps; ++from) {
      float own[kLaneRows], other[kLaneRows];
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        const float their_maximum = __uint_as_float(load_word(slot(from, kOutputs + 2 * r)));
        const float their_sum = __uint_as_float(load_word(slot(from, kOutputs + 2 * r + 1)));
        const float next = fmaxf(maxima[r], their_maximum);
        // As in Softmax::step: a side that has weighted nothing is 0, or inf and NaN that must stay what they are.
        own[r] = maxima[r] == -infinity() ? 1.0f : exp2_approx(maxima[r] - next);
        other[r] = their_maximum == -infinity() ? 1.0f : exp2_approx(their_maximum - next);
        maxima[r] = next;
        sums[r] = sums[r] * own[r] + their_sum * other[r];
      }
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        float& value = output[i / (kValueTiles * 4)][i / 4 % kValueTiles][i % 4];
        const int r = i / (kValueTiles * 4) * 2 + i % 4 / 2;
        value = value * own[r] + __uint_as_float(load_word(slot(from, i))) * other[r];
      }
    }
    return true;
  }

  // Takes the head's sink into a row's maximum and sum; returns what the row's output is to be multiplied with for it: 0 for
  // a sink of +inf, which takes all of the weight.
  __device__ static float add_sink(float sink, float& maximum, float& sum) {
    const float exponent = sink * kLog2E, next = fmaxf(maximum, exponent);
    if (next == -infinity()) return 1.0f;
    const float factor = exp2_approx(maximum - next);
    sum = sum * factor + (exponent == next ? 1.0f : exp2_approx(exponent - next));
    maximum = next;
    return factor;
  }

  // The factor of values that is the same for the whole block.
  __device__ static float value_factor(const Params& p, const Work& work) {
    if constexpr (!Shape::kStaged) return 1.0f;
    float factor = p.v_factor * Layout::value_reference(work);
    if constexpr (Shape::kScales && !Shape::kPageScales) {
      factor *= Rules<Shape, Layout>::scale_at(p.v_scale, work.request * p.v_scale_batch, Layout::kv_head(p, work) * p.v_scale_head);
    }
    return factor;
  }

  // What a row's output is multiplied with to be final: 1 / sum, 0 for a row that attended to nothing; or the unit of weights
  // that are no softmax.
  __device__ static float normaliser(float maximum, float sum) {
    if constexpr (!Shape::kSoftmax) return PlainWeights<Shape>::unit(maximum);
    return sum == 0.0f ? 0.0f : reciprocal_approx(sum);
  }

  // Normalises, rounds and stores the warp's rows through shared memory, in 16-byte pieces; stores the LSE.
  __device__ static void rows(
      const Params& p, const Work& work, Output& output, float (&maxima)[kLaneRows], float (&sums)[kLaneRows],
      uint32_t shared) {
    Shape::group_sync();  // the output tile lies over Q, K and V: every warp is done reading them
    const int pair = lane_id() % 4;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      float sum = Shape::kSoftmax ? quad_sum(sums[r]) : 0.0f;
      const int row = Shape::row_in_block(work.warp, r);
      const bool exists = Layout::row_exists(work, row);
      float scale = 1.0f;
      if constexpr (Shape::kSinks) scale = add_sink(p.sinks[Layout::head(p, work, exists ? row : 0)], maxima[r], sum);
      float inverse = normaliser(maxima[r], sum);
      if constexpr (Shape::kSinks) inverse *= scale;
      if constexpr (Shape::kStaged) inverse *= value_factor(p, work);
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) {
        const uint32_t packed =
            pack_pair<Out>(output[r / 2][n][r % 2 * 2] * inverse, output[r / 2][n][r % 2 * 2 + 1] * inverse);
        store_word(shared + OutTile::offset(row, n) + pair * 4, packed);
      }
      if constexpr (Shape::kLse) {
        if (pair == 0 && exists && work.value_column == 0) {
          *Layout::lse(p, work, row) = (maxima[r] + log2_approx(sum)) * kLn2;
        }
      }
    }
    __syncwarp();  // a warp reads back only the rows that it wrote
    constexpr int kOutChunks = Shape::kSplitColumns / 8;
    const int columns = min(Shape::kSplitColumns, Shape::kHeadDimV - work.value_column);
    const auto out = Layout::output(p, work);
#pragma unroll
    for (int piece = 0; piece < Shape::kWarpRows * kOutChunks; piece += kWarpSize) {
      const int row = work.warp * Shape::kWarpRows + (piece + lane_id()) / kOutChunks;
      const int chunk = (piece + lane_id()) % kOutChunks;
      if (!Layout::row_exists(work, row) || chunk * 8 >= columns) continue;
      uint32_t w[4];
      load_chunk(w, shared + OutTile::offset(row, chunk));
      store_16_aligned<max_of(Shape::kAlignment, 2)>(out(row) + chunk * 8, w);
    }
  }

  // One chunk of keys out of several: the chunk's own softmax, or its sum without one, in float32; merged by another kernel.
  __device__ static void partial(
      const Params& p, const Work& work, Output& output, const float (&maxima)[kLaneRows], float (&sums)[kLaneRows]) {
    const int pair = lane_id() % 4;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const float sum = Shape::kSoftmax ? quad_sum(sums[r]) : 0.0f;
      float inverse = normaliser(maxima[r], sum);
      if constexpr (Shape::kStaged) inverse *= value_factor(p, work);
      const int row = Shape::row_in_block(work.warp, r);
      if (!Layout::row_exists(work, row)) continue;
      const int64_t slot = Layout::partial_slot(p, work, row);
      if (Shape::kSoftmax && pair == 0 && work.value_column == 0) p.partial_lse[slot] = (maxima[r] + log2_approx(sum)) * kLn2;
      float* out = p.partial_out + slot * Shape::kHeadDimV + work.value_column;
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) {
        if (work.value_column + n * 8 >= Shape::kHeadDimV) continue;
        *reinterpret_cast<float2*>(out + n * 8 + pair * 2) =
            make_float2(output[r / 2][n][r % 2 * 2] * inverse, output[r / 2][n][r % 2 * 2 + 1] * inverse);
      }
    }
  }
};

}  // namespace kernelgen
