// Router logits (tokens, experts) to the k experts of each token and their weights, best first. A warp owns a token.
//
// A lane holds kValues neighbouring logits in registers, so a row is read once, and the lowest lane among equals holds the
// lowest ids. What experts are chosen by (the logit; with a bias, sigmoid + bias) is turned into a word that is ordered like
// the float, 0 being what must not be chosen: redux.sync finds the largest word of the warp in one instruction, a ballot its
// first owner. Slot s of the result lives in lane s; the chosen scores are made anew from the logit, which a lane reads again
// where the key does not give it back.
//
// A NaN logit is -inf. A row of -inf alone gets ids 0 .. k-1 and equal weights.
#pragma once

#include <kernelgen/activation/activations.cuh>
#include <kernelgen/cuda/dependent.cuh>
#include <kernelgen/cuda/vector_io.cuh>
#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/moe/route_weights.h>

namespace kernelgen {

struct RouteCudaParams {
  const void* logits;
  const void* bias;  // (experts), null without
  float* weights;    // (tokens, k)
  int32_t* ids;
  int32_t* counts;   // (experts) how often each was chosen is added, null without
  int64_t tokens;
  int64_t logits_row;  // elements
  int32_t experts, k;
  int32_t groups, group_size, kept_groups;  // experts are chosen in the best kept_groups of `groups` equal runs of ids
  float scaling;
};

// `Options` is the rendered file's struct of compile-time constants:
//   Element, Bias; kWeighting; kWarps (of a block), kValues (of a lane), kAccess, kBiasAccess (elements of one load),
//   kHasBias, kGrouped, kGroupLanes (lanes that hold a group; 0: found through shared memory), kCounts
template <class Options>
struct RouteCuda : Options {
  using Element = typename Options::Element;
  using Options::kGroupLanes;
  using Options::kValues;
  static constexpr int kThreads = Options::kWarps * kWarpSize;
  static constexpr bool kScored = Options::kHasBias || Options::kGrouped;  // sigmoids of all experts are needed
  static constexpr int kMostExperts = kValues * kWarpSize;

  __device__ static float nothing() { return -infinity(); }

  // Larger floats, larger words. Both zeros are one value, every NaN the largest; 0 is below all of them.
  __device__ static uint32_t word_of(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return x != x ? 0xffffffffu : bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
  }
  __device__ static float of_word(uint32_t word) { return __uint_as_float(word ^ (word >> 31 ? 0x80000000u : 0xffffffffu)); }

  __device__ static float logit(Element x) {
    const float value = to_float(x);
    return value != value ? nothing() : value;
  }

  // e^(x - peak) for x <= peak; infinite logits share alike.
  __device__ static float power(float x, float peak) { return x == peak ? 1.0f : exp_of_minus(x - peak); }

  template <bool Exact>
  __device__ static float sigmoid(float x) {
    const float e = exp_of_minus(x), upper = Exact ? 1.0f / (1.0f + e) : reciprocal_approx(1.0f + e);
    return x < 0.0f ? e * upper : upper;
  }

  // A lane's entries of a row of `experts`, `rest` past the end.
  template <int Access, class T>
  __device__ static void load_lane(float (&x)[kValues], const T* row, int experts, float rest) {
#pragma unroll
    for (int c = 0; c < kValues; c += Access) {
      const int id = lane_id() * kValues + c;
      if (id + Access <= experts) {
        float part[Access];
        load_elements(part, row + id);
#pragma unroll
        for (int i = 0; i < Access; ++i) x[c + i] = part[i];
      } else {
#pragma unroll
        for (int i = 0; i < Access; ++i) x[c + i] = id + i < experts ? to_float(row[id + i]) : rest;
      }
    }
  }

  // The largest and second largest of two pairs of words.
  __device__ static void merge_best(uint32_t& first, uint32_t& second, uint32_t other_first, uint32_t other_second) {
    second = max(min(first, other_first), max(second, other_second));
    first = max(first, other_first);
  }

  // Scores as words by which groups rank: a NaN (of a bias, or of inf - inf) is above everything, as sorting sees it. Sigmoids alone are
  // neither that nor negative, so that their bits will do.
  __device__ static uint32_t word_of_score(float score) { return Options::kHasBias ? word_of(score) : __float_as_uint(score); }
  __device__ static uint32_t rank_of(uint32_t first, uint32_t second, int size) {
    if constexpr (Options::kHasBias) return size == 1 ? first : word_of(of_word(first) + of_word(second));
    return size == 1 ? first : __float_as_uint(__uint_as_float(first) + __uint_as_float(second));
  }

  // Whether each of a lane's experts is in a kept group: groups rank by the sum of their two best scores (their one, where they
  // have one), equal ones by number.
  __device__ static void keep_groups(bool (&kept)[kValues], const uint32_t (&score)[kValues], const RouteCudaParams& p) {
    const int size = p.group_size;
    const uint32_t none = word_of_score(Options::kHasBias ? nothing() : 0.0f);
    if constexpr (kGroupLanes > 0) {
      uint32_t first = none, second = none;
#pragma unroll
      for (int i = 0; i < kValues; ++i) merge_best(first, second, score[i], none);
#pragma unroll
      for (int step = 1; step < kGroupLanes; step *= 2) {
        const uint32_t other_first = __shfl_xor_sync(kFullWarp, first, step), other_second = __shfl_xor_sync(kFullWarp, second, step);
        merge_best(first, second, other_first, other_second);
      }
      const uint32_t mine = rank_of(first, second, size);
      const int group = lane_id() / kGroupLanes;
      int better = 0;
      for (int g = 0; g < p.groups; ++g) {
        const uint32_t other = __shfl_sync(kFullWarp, mine, g * kGroupLanes);
        better += other > mine || (other == mine && g < group);
      }
#pragma unroll
      for (int i = 0; i < kValues; ++i) kept[i] = better < p.kept_groups;
    } else {
      __shared__ uint32_t scores[Options::kWarps][kMostExperts];
      __shared__ uint32_t bests[Options::kWarps][kMostExperts];
      __shared__ uint32_t kept_words[Options::kWarps][kValues];
      const int warp = threadIdx.x / kWarpSize, lane = lane_id();
#pragma unroll
      for (int i = 0; i < kValues; ++i) scores[warp][lane * kValues + i] = score[i];
      __syncwarp();  // scores are there before another lane sums up a group
      for (int g = lane; g < p.groups; g += kWarpSize) {
        uint32_t first = none, second = none;
        for (int i = 0; i < size; ++i) merge_best(first, second, scores[warp][g * size + i], none);
        bests[warp][g] = rank_of(first, second, size);
      }
      __syncwarp();  // all groups are there before they are compared
      for (int from = 0; from < p.groups; from += kWarpSize) {
        const int group = from + lane;
        const uint32_t mine = group < p.groups ? bests[warp][group] : none;
        int better = 0;
        for (int g = 0; g < p.groups; ++g) {
          const uint32_t other = bests[warp][g];
          better += other > mine || (other == mine && g < group);
        }
        const uint32_t word = __ballot_sync(kFullWarp, group < p.groups && better < p.kept_groups);
        if (lane == 0) kept_words[warp][from / kWarpSize] = word;
      }
      __syncwarp();  // the words are there before they are looked up
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        const int group = min(lane * kValues + i, p.experts - 1) / size;
        kept[i] = kept_words[warp][group / kWarpSize] >> group % kWarpSize & 1;
      }
    }
  }

  // Lane s < k gets the id of the s-th largest word, and the word.
  __device__ static void choose(uint32_t (&key)[kValues], int k, int& id, uint32_t& word) {
    const int lane = lane_id();
    for (int slot = 0; slot < k; ++slot) {
      uint32_t best = 0;
#pragma unroll
      for (int i = 0; i < kValues; ++i) best = max(best, key[i]);
      const uint32_t top = __reduce_max_sync(kFullWarp, best);
      const int owner = __ffs(__ballot_sync(kFullWarp, best == top)) - 1;
      int at = 0;
#pragma unroll
      for (int i = kValues - 1; i >= 0; --i) at = key[i] == top ? i : at;
#pragma unroll
      for (int i = 0; i < kValues; ++i) key[i] = lane == owner && i == at ? 0 : key[i];
      const int found = __shfl_sync(kFullWarp, lane * kValues + at, owner);
      if (lane == slot) id = found, word = top;
    }
  }

  __device__ static void run(const RouteCudaParams& p) {
    join_previous_kernel();
    const int64_t token = static_cast<int64_t>(blockIdx.x) * Options::kWarps + threadIdx.x / kWarpSize;
    if (token >= p.tokens) return;  // a whole warp
    const int lane = lane_id();
    const Element* row = static_cast<const Element*>(p.logits) + token * p.logits_row;
    float x[kValues], score[kValues];
    if constexpr (Options::kHasBias) {  // on its way before anything waits for logits
      load_lane<Options::kBiasAccess>(score, static_cast<const typename Options::Bias*>(p.bias), p.experts, 0.0f);
    }
    load_lane<Options::kAccess>(x, row, p.experts, nothing());
    float largest = nothing();
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      x[i] = x[i] != x[i] ? nothing() : x[i];
      largest = fmaxf(largest, x[i]);
    }
    const float peak = of_word(__reduce_max_sync(kFullWarp, word_of(largest)));

    uint32_t key[kValues];
    if constexpr (kScored) {
      bool kept[kValues];
      uint32_t scored[kValues];
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        const float s = sigmoid<false>(x[i]);
        scored[i] = word_of_score(!Options::kHasBias ? s : lane * kValues + i < p.experts ? s + score[i] : nothing());
        kept[i] = true;
      }
      if constexpr (Options::kGrouped) keep_groups(kept, scored, p);
#pragma unroll
      for (int i = 0; i < kValues; ++i) key[i] = !kept[i] ? 0 : Options::kHasBias ? scored[i] : word_of(x[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) key[i] = word_of(x[i]);
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) key[i] = lane * kValues + i < p.experts ? key[i] : 0;

    float total = 0.0f;  // of the powers of all logits
    if constexpr (Options::kWeighting == RouteWeights::kSoftmaxOfAll) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) total += lane * kValues + i < p.experts ? power(x[i], peak) : 0.0f;
      total = warp_sum(total);
    }

    int id = lane;
    uint32_t word = 0;
    choose(key, p.k, id, word);
    const bool mine = lane < p.k, hopeless = peak == nothing();
    if (hopeless) id = lane;
    float chosen = nothing();
    if (mine) chosen = Options::kHasBias ? logit(row[id]) : of_word(word);

    float weight = 0.0f;
    if constexpr (Options::kWeighting == RouteWeights::kSoftmaxOfAll) {
      weight = power(chosen, peak) / total;
    } else if constexpr (Options::kWeighting == RouteWeights::kSoftmaxOfChosen) {
      // Groups may have left the largest out.
      const float most = __shfl_sync(kFullWarp, chosen, 0);
      const float e = mine ? power(chosen, most) : 0.0f;
      weight = e / warp_sum(e);
    } else {
      weight = mine ? sigmoid<true>(chosen) : 0.0f;
      if constexpr (Options::kWeighting == RouteWeights::kSigmoidNormalized) {
        weight = weight / (warp_sum(weight) + static_cast<float>(kRouteEpsilon));
      }
    }
    if (hopeless) weight = 1.0f / static_cast<float>(p.k);
    if (mine) {
      p.weights[token * p.k + lane] = weight * p.scaling;
      p.ids[token * p.k + lane] = id;
      if constexpr (Options::kCounts) atomicAdd(p.counts + id, 1);
    }
  }
};

}  // namespace kernelgen
