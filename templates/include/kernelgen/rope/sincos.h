// Sine and cosine of a register of doubles to about one ulp, for angles up to 2^31 quarter turns.
//
// The angle is reduced to |x| <= pi/4 by n quarter turns; n * (pi/2) is subtracted in two parts by fma, the first of
// which is exact before its one rounding. Taylor series: the first term left out is below 2e-18.
#pragma once

#include "kernelgen/cpu/vec.h"

namespace kernelgen {

KERNELGEN_INLINE void sincos(Simd<double>::Reg angle, Simd<double>::Reg& sine, Simd<double>::Reg& cosine) {
  using V = Simd<double>;
  using Reg = V::Reg;
  const auto c = [](double x) { return V::broadcast(x); };
  const Reg n = V::round(angle * c(0.63661977236758134308));
  Reg x = V::fma(n, c(-1.5707963267948965580), angle);
  x = V::fma(n, c(-6.1232339957367660359e-17), x);
  const Reg z = x * x;

  Reg s = c(1.0 / 355687428096000.0);  // 1 / 17!
  s = V::fma(s, z, c(-1.0 / 1307674368000.0));
  s = V::fma(s, z, c(1.0 / 6227020800.0));
  s = V::fma(s, z, c(-1.0 / 39916800.0));
  s = V::fma(s, z, c(1.0 / 362880.0));
  s = V::fma(s, z, c(-1.0 / 5040.0));
  s = V::fma(s, z, c(1.0 / 120.0));
  s = V::fma(s, z, c(-1.0 / 6.0));
  s = V::fma(s * z, x, x);

  Reg k = c(1.0 / 20922789888000.0);  // 1 / 16!
  k = V::fma(k, z, c(-1.0 / 87178291200.0));
  k = V::fma(k, z, c(1.0 / 479001600.0));
  k = V::fma(k, z, c(-1.0 / 3628800.0));
  k = V::fma(k, z, c(1.0 / 40320.0));
  k = V::fma(k, z, c(-1.0 / 720.0));
  k = V::fma(k, z, c(1.0 / 24.0));
  k = V::fma(k, z, c(-0.5));
  k = V::fma(k, z, c(1.0));

  // Quarter turns left over, -2 .. 2: they exchange sine and cosine and turn signs.
  const Reg quarter = V::fma(V::round(n * c(0.25)), c(-4.0), n);
  const auto odd = V::equal(V::abs(quarter), c(1.0)), opposite = V::equal(V::abs(quarter), c(2.0));
  const Reg first = V::select(odd, k, s), second = V::select(odd, s, k);
  sine = V::select(V::equal(quarter, c(-1.0)), -first, V::select(opposite, -first, first));
  cosine = V::select(V::equal(quarter, c(1.0)), -second, V::select(opposite, -second, second));
}

}  // namespace kernelgen
