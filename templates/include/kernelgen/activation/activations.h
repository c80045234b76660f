// Activation functions over registers (float or double): right at +-inf, no NaN from an overflow on the way, NaN stays NaN.
//
// The textbook forms give 0 * inf = NaN at -inf, where the limit is 0; torch returns NaN there.
#pragma once

#include <cmath>

#include "kernelgen/cpu/math.h"

namespace kernelgen {

// kRelu2 squares; kSwishPlusOne is a gate's alone: gate * sigmoid(alpha * gate) * (up + 1).
enum class Activation { kNone, kRelu, kGelu, kGeluTanh, kSilu, kRelu2, kSwishPlusOne };

// At and below this every smooth activation here is 0: e^x is less than half the smallest subnormal.
template <class V>
KERNELGEN_INLINE typename V::Reg above_floor(typename V::Reg x) {
  return V::max(V::broadcast(sizeof(typename V::Scalar) == 4 ? -110 : -760), x);  // keeps a NaN
}

// x * sigmoid(u), for u of the sign of x: the exponential is of -|u|, so it never overflows.
template <class V>
KERNELGEN_INLINE typename V::Reg times_sigmoid(typename V::Reg x, typename V::Reg u) {
  const typename V::Reg e = exp<V>(V::zero() - V::abs(u));
  return V::select(V::less(u, V::zero()), x * e, x) / (V::broadcast(1) + e);
}

template <class V>
KERNELGEN_INLINE typename V::Reg silu(typename V::Reg x) {
  x = above_floor<V>(x);
  return times_sigmoid<V>(x, x);
}

// The tanh approximation of gelu: 0.5 * (1 + tanh(u)) is sigmoid(2u).
template <class V>
KERNELGEN_INLINE typename V::Reg gelu_tanh(typename V::Reg x) {
  const auto c = [](double value) { return V::broadcast(static_cast<typename V::Scalar>(value)); };
  x = above_floor<V>(x);
  return times_sigmoid<V>(x, c(1.5957691216057307) * V::fma(x * x * x, c(0.044715), x));  // 2 sqrt(2 / pi)
}

// erfc(z) for z >= 0: t exp(P(t) - z^2) with t = 1 / (1 + z / 2), the form of Numerical Recipes. P is a Chebyshev fit of
// ln(erfc(z) / t) + z^2 on 0 <= z <= 10 with an error of 7e-9; w is t mapped to -1 .. 1.
KERNELGEN_INLINE Simd<float>::Reg erfc_of_positive(Simd<float>::Reg z) {
  using V = Simd<float>;
  const V::Reg t = V::broadcast(1) / V::fma(z, V::broadcast(0.5f), V::broadcast(1));
  const V::Reg w = V::fma(t, V::broadcast(2.4f), V::broadcast(-1.4f));
  V::Reg p = V::broadcast(-2.28551581e-05f);
  p = V::fma(p, w, V::broadcast(5.48596483e-05f));
  p = V::fma(p, w, V::broadcast(0.000129866838f));
  p = V::fma(p, w, V::broadcast(-0.000534319413f));
  p = V::fma(p, w, V::broadcast(-0.000275960088f));
  p = V::fma(p, w, V::broadcast(0.00370747595f));
  p = V::fma(p, w, V::broadcast(-0.00104555217f));
  p = V::fma(p, w, V::broadcast(-0.0294703367f));
  p = V::fma(p, w, V::broadcast(0.0157450741f));
  p = V::fma(p, w, V::broadcast(0.570307103f));
  p = V::fma(p, w, V::broadcast(-0.558595354f));
  return t * exp<V>(p - z * z);
}

// x * Phi(x) = x * erfc(-x / sqrt(2)) / 2, so that the left tail keeps its relative precision.
template <class V>
KERNELGEN_INLINE typename V::Reg gelu(typename V::Reg x) {
  x = above_floor<V>(x);
  if constexpr (sizeof(typename V::Scalar) == 4) {
    const typename V::Reg half_tail = V::broadcast(0.5f) * erfc_of_positive(V::abs(x) * V::broadcast(0.70710678118654752f));
    return x * V::select(V::less(x, V::zero()), half_tail, V::broadcast(1) - half_tail);
  } else {
    // No user waits for gelu in float64: one lane at a time.
    typename V::Scalar lanes[V::kLanes];
    V::store(lanes, x);
    for (auto& value : lanes) value *= 0.5 * std::erfc(-0.70710678118654752440 * value);
    return V::load(lanes);
  }
}

// x * sigmoid(alpha * x).
template <class V>
KERNELGEN_INLINE typename V::Reg swish(typename V::Reg x, typename V::Reg alpha) {
  const typename V::Reg u = alpha * x, floor = above_floor<V>(u);
  return V::select(V::less(u, floor), V::zero(), times_sigmoid<V>(x, u));
}

template <class V, Activation kind>
KERNELGEN_INLINE typename V::Reg activate(typename V::Reg x) {
  static_assert(kind != Activation::kSwishPlusOne, "needs a gate and an up");
  if constexpr (kind == Activation::kRelu) {
    return V::max(V::zero(), x);
  } else if constexpr (kind == Activation::kRelu2) {
    x = V::max(V::zero(), x);
    return x * x;
  } else if constexpr (kind == Activation::kGelu) {
    return gelu<V>(x);
  } else if constexpr (kind == Activation::kGeluTanh) {
    return gelu_tanh<V>(x);
  } else if constexpr (kind == Activation::kSilu) {
    return silu<V>(x);
  } else {
    return x;
  }
}

// What gate and up become; clamped first: the gate to at most `limit`, up to within +-limit, where a NaN stays one.
template <class V, Activation kind, bool Clamped>
KERNELGEN_INLINE typename V::Reg activate_gate(typename V::Reg gate, typename V::Reg up, double alpha, double limit) {
  using Scalar = typename V::Scalar;
  if constexpr (Clamped) {
    const typename V::Reg most = V::broadcast(static_cast<Scalar>(limit)), least = V::zero() - most;
    gate = V::min(most, gate);
    up = V::max(least, V::min(most, up));
  }
  if constexpr (kind == Activation::kSwishPlusOne) {
    return swish<V>(gate, V::broadcast(static_cast<Scalar>(alpha))) * (up + V::broadcast(1));
  } else {
    return activate<V, kind>(gate) * up;
  }
}

}  // namespace kernelgen
