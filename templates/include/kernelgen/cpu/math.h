// exp2, exp (1 ulp) and tanh (2.5 ulp) over registers, with IEEE results for infinities and NaN.
//
// Polynomials are minimax fits (Remez) on the reduced range, written in the form 1 + f * q(f) so that exp2(0) is
// exactly 1.
#pragma once

#include "kernelgen/cpu/vec.h"

namespace kernelgen {

// x = n + f with n integral and |f| <= 1/2; f = 0 where x is infinite, NaN where x is NaN.
template <class V>
KERNELGEN_INLINE void split_power(typename V::Reg x, typename V::Reg& n, typename V::Reg& f) {
#if defined(__AVX512F__)
  n = V::round(x);
  if constexpr (sizeof(typename V::Scalar) == 4) f = _mm512_reduce_ps(x, 0);
  else f = _mm512_reduce_pd(x, 0);
#else
  // Beyond these bounds 2^x is 0 or infinity for certain.
  const typename V::Scalar bound = sizeof(bound) == 4 ? 250 : 2000;
  x = V::min(V::broadcast(bound), V::max(V::broadcast(-bound), x));
  n = V::round(x);
  f = x - n;
#endif
}

// exp(g) - 1 for |g| <= ln(2) / 2: relative error 1.4e-8 (float) or 2.7e-19 (double) before rounding.
template <class V>
KERNELGEN_INLINE typename V::Reg expm1_reduced(typename V::Reg g) {
  const auto c = [](double x) { return V::broadcast(static_cast<typename V::Scalar>(x)); };
  typename V::Reg q;
  if constexpr (sizeof(typename V::Scalar) == 4) {
    q = c(0.001394655395);
    q = V::fma(q, g, c(0.008366643919));
    q = V::fma(q, g, c(0.04166628064));
    q = V::fma(q, g, c(0.1666654255));
    q = V::fma(q, g, c(0.5000000062));
  } else {
    q = c(2.0924520349872910973e-9);
    q = V::fma(q, g, c(2.5109147441919917232e-8));
    q = V::fma(q, g, c(2.7557242510590064865e-7));
    q = V::fma(q, g, c(2.7557243911428875992e-6));
    q = V::fma(q, g, c(0.000024801587360847340806));
    q = V::fma(q, g, c(0.00019841269886401457128));
    q = V::fma(q, g, c(0.0013888888888866690724));
    q = V::fma(q, g, c(0.0083333333333215311759));
    q = V::fma(q, g, c(0.041666666666666701659));
    q = V::fma(q, g, c(0.16666666666666676689));
    q = V::fma(q, g, c(0.49999999999999999986));
  }
  return V::fma(q * g, g, g);
}

// 2^f for |f| <= 1/2. Degree of the float polynomial: 6 (relative error 2e-9) or 5 (9e-8), the latter for values that
// are rounded to 16 bits afterwards; in double the argument is multiplied by ln 2 and goes through expm1_reduced.
template <class V, int Degree>
KERNELGEN_INLINE typename V::Reg exp2_reduced(typename V::Reg f) {
  static_assert(Degree == 5 || Degree == 6, "no polynomial of this degree");
  if constexpr (sizeof(typename V::Scalar) == 8) {
    return V::broadcast(1) + expm1_reduced<V>(f * V::broadcast(0.69314718055994530942));
  } else {
    typename V::Reg q;
    if constexpr (Degree == 6) {
      q = V::broadcast(0.0001535336179f);
      q = V::fma(q, f, V::broadcast(0.001339887438f));
      q = V::fma(q, f, V::broadcast(0.009618437358f));
      q = V::fma(q, f, V::broadcast(0.05550332471f));
      q = V::fma(q, f, V::broadcast(0.2402264791f));
      q = V::fma(q, f, V::broadcast(0.6931472029f));
    } else {
      q = V::broadcast(0.00132647291f);
      q = V::fma(q, f, V::broadcast(0.00967151264f));
      q = V::fma(q, f, V::broadcast(0.05550733737f));
      q = V::fma(q, f, V::broadcast(0.2402224209f));
      q = V::fma(q, f, V::broadcast(0.6931469776f));
    }
    return V::fma(q, f, V::broadcast(1));
  }
}

// 2^x.
template <class V, int Degree = 6>
KERNELGEN_INLINE typename V::Reg exp2(typename V::Reg x) {
  typename V::Reg n, f;
  split_power<V>(x, n, f);
  return V::scale_by_power(exp2_reduced<V, Degree>(f), n);
}

// 2^x for x <= 0 or NaN: what a softmax needs. With AVX2 results below the smallest normal number may become 0, which
// saves 8 of 21 instructions.
template <class V, int Degree = 6>
KERNELGEN_INLINE typename V::Reg exp2_of_negative(typename V::Reg x) {
#if defined(__AVX512F__)
  return exp2<V, Degree>(x);
#else
  // 2^-127 (-1023) has the bits of zero.
  x = V::max(V::broadcast(sizeof(typename V::Scalar) == 4 ? -127 : -1023), x);
  const typename V::Reg n = V::round(x);
  return exp2_reduced<V, Degree>(x - n) * V::power_of_two(V::to_int(n));
#endif
}

// x = n ln 2 + g. The product n ln 2 is subtracted in two parts, the first of which is exact for every n that matters.
template <class V>
KERNELGEN_INLINE void split_exponent(typename V::Reg x, typename V::Reg& n, typename V::Reg& g) {
  constexpr bool kFloat = sizeof(typename V::Scalar) == 4;
  const auto c = [](double value) { return V::broadcast(static_cast<typename V::Scalar>(value)); };
  const double bound = kFloat ? 150.0 : 1100.0;  // exp is 0 or infinite beyond
  x = V::min(c(bound), V::max(c(-bound), x));
  n = V::round(x * c(1.4426950408889634074));
  g = V::fma(n, c(kFloat ? -0.693145751953125 : -0.69314718036912381649), x);
  g = V::fma(n, c(kFloat ? -1.4286068203094172e-6 : -1.9082149292705877e-10), g);
}

// e^x.
template <class V>
KERNELGEN_INLINE typename V::Reg exp(typename V::Reg x) {
  typename V::Reg n, g;
  split_exponent<V>(x, n, g);
  return V::scale_by_power(V::broadcast(1) + expm1_reduced<V>(g), n);
}

// tanh x = t / (t + 2) with t = exp(2 |x|) - 1: no cancellation at either end, so small x keep their relative accuracy.
template <class V>
KERNELGEN_INLINE typename V::Reg tanh(typename V::Reg x) {
  using Reg = typename V::Reg;
  const Reg one = V::broadcast(1), two = V::broadcast(2);
  // tanh rounds to 1 from 9.02 (float) and 19.1 (double) on. min returns its second operand for a NaN.
  const Reg y = V::min(V::broadcast(sizeof(typename V::Scalar) == 4 ? 20 : 40), V::abs(x) * two);
  Reg n, g;
  split_exponent<V>(y, n, g);
  const Reg power = V::scale_by_power(one, n);
  const Reg t = V::fma(power, expm1_reduced<V>(g), power - one);
  // The quotient, corrected by what the sum and the division lost: 1.4 instead of 2.4 ulp.
  const Reg sum = t + two, lost = t - (sum - two), inverse = one / sum, quotient = t * inverse;
  const Reg rest = V::fma(-quotient, sum, t) - quotient * lost;
  return V::copy_sign(V::fma(rest, inverse, quotient), x);
}

}  // namespace kernelgen
