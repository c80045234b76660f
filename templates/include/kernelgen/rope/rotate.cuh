// Rotation of the heads of one token by one block: the token's cosines and sines go to shared memory once, then each
// thread rotates units of a few pairs.
#pragma once

#include <kernelgen/cache/store.cuh>

namespace kernelgen {

// Cosine and sine of an angle that is given in double, to float accuracy. The angle is reduced to |x| <= pi/4 in double:
// a float has no bits left for the fraction of a turn at position 100,000. sincosf needs no reduction of its own there.
__device__ inline void sincos_of(double angle, float& sine, float& cosine) {
  const double n = rint(angle * 0.63661977236758134308);
  const double x = fma(n, -6.1232339957367660359e-17, fma(n, -1.5707963267948965580, angle));
  const long long quarter = static_cast<long long>(n) & 3;
  float s, c;
  sincosf(static_cast<float>(x), &s, &c);
  const float first = (quarter & 1) ? c : s, second = (quarter & 1) ? s : c;
  sine = (quarter & 2) ? -first : first;
  cosine = ((quarter + 1) & 2) ? -second : second;
}
__device__ inline void sincos_of(double angle, double& sine, double& cosine) { sincos(angle, &sine, &cosine); }

__device__ inline float not_a_number(float) { return __int_as_float(0x7fc00000); }
__device__ inline double not_a_number(double) { return __longlong_as_double(0x7ff8000000000000ll); }

// Cosines of all pairs, then their sines, in `table`; the caller puts a barrier behind. Table: double for frequencies
// (Cached = false), else the element type of a cosine and sine cache, whose unknown positions give NaN.
template <class S, class Table, bool Cached>
__device__ inline void fill_angles(S* table, const void* source, int64_t pairs, int64_t rows, int64_t stride, int64_t position) {
  const Table* angles = static_cast<const Table*>(source);
  const bool known = position >= 0 && position < rows;
  if constexpr (Cached) angles += (known ? position : 0) * stride;
  for (int64_t i = threadIdx.x; i < pairs; i += blockDim.x) {
    S sine = not_a_number(S()), cosine = not_a_number(S());
    if constexpr (Cached) {
      if (known) {
        cosine = static_cast<S>(to_sum(angles[i]));
        sine = static_cast<S>(to_sum(angles[pairs + i]));
      }
    } else {
      sincos_of(static_cast<double>(position) * angles[i], sine, cosine);
    }
    table[i] = cosine;
    table[pairs + i] = sine;
  }
}

// Split halves: a unit is Access pairs, (c, c + half). Interleaved: one access of pairs (2i, 2i + 1), two where an access
// is one element. What does not rotate is passed on in units of Access elements behind them.
template <class T, bool Interleaved, int Access>
struct RotateUnits {
  using S = Sum<T>;
  static constexpr int kPairs = !Interleaved ? Access : Access > 1 ? Access / 2 : 1;

  const S* table;
  int pairs, width;

  __device__ int rotating() const { return pairs / kPairs; }
  __device__ int passing() const { return (width - 2 * pairs) / Access; }

  // Unit u of a row from x to `out`, each element divided by `scale` if the target is fp8. `out` may be x: the thread
  // that reads an element is the one that writes it.
  template <class Out>
  __device__ void run(const T* x, Out* out, int u, float scale) const {
    if (u >= rotating()) {
      const int c = 2 * pairs + (u - rotating()) * Access;
      S v[Access];
      load_run<Access>(v, x + c);
      put<Access>(out + c, v, scale);
      return;
    }
    const int pair = u * kPairs;
    S cosine[kPairs], sine[kPairs];
    load_angles(cosine, table + pair);
    load_angles(sine, table + pairs + pair);
    if constexpr (Interleaved) {
      S v[2 * kPairs];
      load_run<Access>(v, x + 2 * pair);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) turn(v[2 * i], v[2 * i + 1], cosine[i], sine[i]);
      put<Access>(out + 2 * pair, v, scale);
    } else {
      S a[kPairs], b[kPairs];
      load_run<Access>(a, x + pair);
      load_run<Access>(b, x + pairs + pair);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) turn(a[i], b[i], cosine[i], sine[i]);
      put<Access>(out + pair, a, scale);
      put<Access>(out + pairs + pair, b, scale);
    }
  }

 private:
  __device__ static void turn(S& a, S& b, S cosine, S sine) {
    const S first = fma(a, cosine, -(b * sine)), second = fma(b, cosine, a * sine);
    a = first;
    b = second;
  }
  // The table is 16-byte aligned and a unit starts at a multiple of kPairs, which divides pairs.
  __device__ static void load_angles(S (&x)[kPairs], const S* from) {
    constexpr int kAccess = min_of<int>(kPairs, 16 / sizeof(S));
    load_run<kAccess>(x, from);
  }
  template <int A, class Out, int N>
  __device__ static void put(Out* out, S (&x)[N], float scale) {
    if constexpr (kIsFp8<Out>) {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] /= scale;
    }
    store_run<A>(out, x);
  }
};

}  // namespace kernelgen
