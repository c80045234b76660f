// Router logits (tokens, experts) to the k experts of each token and their weights, best first. A task owns task_tokens tokens.
//
// A row lies widened in scratch. The chosen ones are kept in a sorted list, into which an expert goes whose key is above the
// last one's: few do after the first, so a row costs little more than one comparison per expert. Ids rise while the row is
// walked, so that equals stay in the order of their ids.
//
// A NaN logit is -inf. A row of -inf alone gets ids 0 .. k-1 and equal weights.
#pragma once

#include <cmath>
#include <limits>

#include "kernelgen/cpu/math.h"
#include "kernelgen/moe/route_weights.h"

namespace kernelgen {

struct RouteCpuParams {
  const void* logits;
  const void* bias;  // (experts), null without
  float* weights;    // (tokens, k)
  int32_t* ids;
  int32_t* counts;   // (experts) how often each was chosen is added, null without
  int64_t tokens;
  int64_t logits_row;  // elements
  int64_t experts, k;
  int64_t groups, kept_groups;  // experts are chosen in the best kept_groups of `groups` equal runs of ids
  int64_t task_tokens;
  double scaling;
};

// `Options`: Element, Bias, kWeighting, kHasBias, kGrouped, kCounts.
template <class Options>
struct RouteCpu : Options {
  using Element = typename Options::Element;
  using Sum = Accumulator<Element>;
  using V = Simd<Sum>;
  using Reg = typename V::Reg;
  static constexpr bool kScored = Options::kHasBias || Options::kGrouped;  // sigmoids of all experts are needed
  static constexpr Sum kNothing = -std::numeric_limits<Sum>::infinity();

  // The scratch of a thread; extents are rounded up to whole registers.
  struct Row {
    Sum *x, *score, *chosen_key, *weight, *group_score;
    int64_t *id, *kept;

    Row(const RouteCpuParams& p, char* scratch) {
      const auto rounded = [](int64_t n) { return (n + 15) / 16 * 16; };
      x = reinterpret_cast<Sum*>(scratch);
      score = x + rounded(p.experts);
      chosen_key = score + rounded(p.experts);
      weight = chosen_key + rounded(p.k);
      group_score = weight + rounded(p.k);
      id = reinterpret_cast<int64_t*>(group_score + rounded(p.groups));
      kept = id + rounded(p.k);
    }
  };

  // As sorting sees it: a NaN, which a bias may bring, is above everything.
  static bool above(Sum a, Sum b) { return a > b || (a != a && b == b); }

  static KERNELGEN_INLINE Reg sigmoid(Reg x) {
    const Reg e = exp<V>(V::zero() - V::abs(x));
    return V::select(V::less(x, V::zero()), e, V::broadcast(1)) / (V::broadcast(1) + e);
  }
  static Sum sigmoid_of(Sum x) {
    const Sum e = std::exp(-std::abs(x));
    return (x < 0 ? e : Sum(1)) / (1 + e);
  }
  // e^(x - peak) for x <= peak; infinite logits share alike.
  static Sum power(Sum x, Sum peak) { return x == peak ? Sum(1) : std::exp(x - peak); }

  // Puts `key` into the sorted list of `count` keys of at most `most`; returns its new length.
  static int64_t insert(Sum key, int64_t id, Sum* keys, int64_t* ids, int64_t count, int64_t most) {
    if (count == most && !above(key, keys[count - 1])) return count;
    int64_t at = count < most ? count++ : most - 1;
    for (; at > 0 && above(key, keys[at - 1]); --at) keys[at] = keys[at - 1], ids[at] = ids[at - 1];
    keys[at] = key;
    ids[at] = id;
    return count;
  }

  // row.kept becomes 1 for kept groups: they rank by the sum of their two best scores (their one, where they have one).
  static void keep_groups(const RouteCpuParams& p, Row& row) {
    const int64_t size = p.experts / p.groups;
    for (int64_t g = 0; g < p.groups; ++g) {
      Sum first = kNothing, second = kNothing;
      for (int64_t i = g * size; i < (g + 1) * size; ++i) {
        const Sum s = row.score[i];
        if (above(s, first)) second = first, first = s;
        else if (above(s, second)) second = s;
      }
      row.group_score[g] = size == 1 ? first : first + second;
    }
    for (int64_t g = 0; g < p.groups; ++g) {
      int64_t better = 0;
      for (int64_t other = 0; other < p.groups; ++other) {
        const Sum s = row.group_score[other];
        better += above(s, row.group_score[g]) || (!above(row.group_score[g], s) && other < g);
      }
      row.kept[g] = better < p.kept_groups;
    }
  }

  static void weigh(const RouteCpuParams& p, Row& row, Sum peak) {
    Sum total = 0;
    if constexpr (Options::kWeighting == RouteWeights::kSoftmaxOfAll) {
      Reg sums = V::zero();
      for (int64_t i = 0; i < p.experts; i += V::kLanes) {
        const Reg x = V::load(row.x + i);
        const Reg e = V::select(V::equal(x, V::broadcast(peak)), V::broadcast(1), exp<V>(x - V::broadcast(peak)));
        V::store(row.score + i, e);
      }
      int64_t i = 0;
      for (; i + V::kLanes <= p.experts; i += V::kLanes) sums = sums + V::load(row.score + i);
      total = V::sum(sums);
      for (; i < p.experts; ++i) total += row.score[i];
    }
    const Sum most = row.x[row.id[0]];
    for (int64_t s = 0; s < p.k; ++s) {
      const Sum x = row.x[row.id[s]];
      if constexpr (Options::kWeighting == RouteWeights::kSoftmaxOfAll) {
        row.weight[s] = power(x, peak);
      } else if constexpr (Options::kWeighting == RouteWeights::kSoftmaxOfChosen) {
        total += row.weight[s] = power(x, most);
      } else {
        total += row.weight[s] = sigmoid_of(x);
      }
    }
    if constexpr (Options::kWeighting == RouteWeights::kSigmoid) total = 1;
    if constexpr (Options::kWeighting == RouteWeights::kSigmoidNormalized) total += static_cast<Sum>(kRouteEpsilon);
    for (int64_t s = 0; s < p.k; ++s) row.weight[s] /= total;
  }

  static void token(const RouteCpuParams& p, int64_t t, Row& row) {
    const Element* logits = static_cast<const Element*>(p.logits) + t * p.logits_row;
    for (int64_t i = 0; i < p.experts; i += V::kLanes) V::store(row.x + i, V::load_first(logits + i, p.experts - i));
    Sum peak = kNothing;
    for (int64_t i = 0; i < p.experts; ++i) {
      row.x[i] = row.x[i] == row.x[i] ? row.x[i] : kNothing;
      peak = row.x[i] > peak ? row.x[i] : peak;
    }
    if constexpr (kScored) {
      for (int64_t i = 0; i < p.experts; i += V::kLanes) V::store(row.score + i, sigmoid(V::load(row.x + i)));
      if constexpr (Options::kHasBias) {
        const auto* bias = static_cast<const typename Options::Bias*>(p.bias);
        for (int64_t i = 0; i < p.experts; ++i) row.score[i] += static_cast<Sum>(widen(bias[i]));
      }
      if constexpr (Options::kGrouped) keep_groups(p, row);
    }
    const Sum* key = Options::kHasBias ? row.score : row.x;
    int64_t count = 0;
    if (peak == kNothing) {
      for (; count < p.k; ++count) row.id[count] = count, row.weight[count] = Sum(1) / static_cast<Sum>(p.k);
    } else if constexpr (Options::kGrouped) {
      const int64_t size = p.experts / p.groups;
      for (int64_t g = 0; g < p.groups; ++g) {
        if (!row.kept[g]) continue;
        for (int64_t i = g * size; i < (g + 1) * size; ++i) count = insert(key[i], i, row.chosen_key, row.id, count, p.k);
      }
      weigh(p, row, peak);
    } else {
      for (int64_t i = 0; i < p.experts; ++i) count = insert(key[i], i, row.chosen_key, row.id, count, p.k);
      weigh(p, row, peak);
    }
    for (int64_t s = 0; s < p.k; ++s) {
      p.weights[t * p.k + s] = static_cast<float>(row.weight[s] * static_cast<Sum>(p.scaling));
      p.ids[t * p.k + s] = static_cast<int32_t>(row.id[s]);
      if constexpr (Options::kCounts) __atomic_fetch_add(p.counts + row.id[s], 1, __ATOMIC_RELAXED);
    }
  }

  static void run(const RouteCpuParams& p, int64_t task, char* scratch) {
    Row row(p, scratch);
    const int64_t first = task * p.task_tokens, end = first + p.task_tokens < p.tokens ? first + p.task_tokens : p.tokens;
    for (int64_t t = first; t < end; ++t) token(p, t, row);
  }
};

}  // namespace kernelgen
