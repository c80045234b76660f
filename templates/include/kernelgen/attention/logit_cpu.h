// From the product of a query and a key to a logit, and from logits to weights.
#pragma once

#include "kernelgen/attention/geometry_cpu.h"
#include "kernelgen/cpu/math.h"

namespace kernelgen {

// Logits are kept without their positive factor, which is applied to the difference from the maximum: such
// differences are exact for logits of any size. The sign of the scale, and a scale of 0, go into the queries (0 * inf is NaN).
// Where a bias is added to them (G::kNatural) they are kept as they are.
template <class G>
struct Logit {
  using Params = AttentionCpuParams;
  using V = typename G::V;
  using Reg = typename G::Reg;
  using Scalar = typename G::Scalar;
  static constexpr bool kSoftCap = G::Options::kSoftCap;
  Reg inner, inner_rest;  // their sum: what a product is multiplied by inside of tanh, to twice the precision
  Reg outer, factor;         // kept = tanh(dot * inner) or dot, natural: times outer; log2 of a weight = (kept - peak) * factor
  double natural;            // natural logarithm of a weight = (kept - peak) * natural

  explicit Logit(const Params& p) {
    constexpr double kLog2E = 1.4426950408889634074, kSmallest = sizeof(Scalar) == 4 ? 1e-37 : 1e-307;
    natural = __builtin_fabs(kSoftCap ? p.soft_cap : p.scale);
    if (!kSoftCap && natural == 0) natural = 1;
    if (natural < kSmallest) natural = kSmallest;  // times -inf must not become NaN
    const double inside = kSoftCap ? p.scale / natural : 0.0;
    inner = V::broadcast(Scalar(inside));
    inner_rest = V::broadcast(Scalar(inside - double(Scalar(inside))));
    outer = V::broadcast(Scalar(natural));
    if (G::kNatural) natural = 1;
    factor = V::broadcast(Scalar(natural * kLog2E));
  }
  static Scalar query_factor(const Params& p) { return p.scale == 0 ? 0 : kSoftCap || p.scale > 0 ? 1 : -1; }

  KERNELGEN_INLINE Reg kept(Reg dot) const {
    if constexpr (kSoftCap) {
      // A product of infinity times a rest of 0 must not become NaN; a NaN stays one.
      const Reg largest = V::broadcast(sizeof(Scalar) == 4 ? Scalar(3.4e38) : Scalar(1.7e308));
      dot = V::min(largest, V::max(-largest, dot));
      dot = kernelgen::tanh<V>(V::fma(dot, inner, dot * inner_rest));
    }
    if constexpr (G::kNatural) dot = dot * outer;
    return dot;
  }
  template <int Degree = 6>
  KERNELGEN_INLINE Reg weight(Reg kept, Reg peak) const {
    return exp2_of_negative<V, Degree>((kept - peak) * factor);
  }
};

// -slope * |key - position| of each row, keys counted from the tile's first: small whole numbers are exact.
template <class G>
struct Alibi {
  using V = typename G::V;
  using Reg = typename G::Reg;
  using Scalar = typename G::Scalar;
  Reg slope[G::kVecs], position[G::kVecs];

  Alibi(const typename G::Task& t, const typename G::Panel& panel, int64_t tile) {
    alignas(64) Scalar at[G::kWidth];
    for (int l = 0; l < G::kWidth; ++l) at[l] = Scalar(panel.ids.query[l] + t.k_len - t.q_len - tile);
    for (int v = 0; v < G::kVecs; ++v) {
      slope[v] = V::load(panel.ids.slope + v * G::kLanes);
      position[v] = V::load(at + v * G::kLanes);
    }
  }
  KERNELGEN_INLINE Reg add(int j, int v, Reg logit) const {
    return V::fma(-slope[v], V::abs(V::broadcast(Scalar(j)) - position[v]), logit);
  }
};

struct NoBias {
  template <class Reg>
  KERNELGEN_INLINE Reg add(int, int, Reg logit) const { return logit; }
};

}  // namespace kernelgen
