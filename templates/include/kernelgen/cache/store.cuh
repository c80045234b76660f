// Runs of elements on their way into an output or a cache: read in one access, widened, rounded to the target's type.
#pragma once

#include <cuda_fp8.h>

#include <kernelgen/cuda/vector_io.cuh>

namespace kernelgen {

using fp8_e4m3 = __nv_fp8_e4m3;
using fp8_e5m2 = __nv_fp8_e5m2;

template <class T>
constexpr bool kIsFp8 = is_same_v<T, fp8_e4m3> || is_same_v<T, fp8_e5m2>;

// The type that arithmetic on T happens in.
template <class T>
struct SumOf {
  using type = float;
};
template <>
struct SumOf<double> {
  using type = double;
};
template <class T>
using Sum = typename SumOf<T>::type;

__device__ inline double to_sum(double x) { return x; }
template <class T>
__device__ inline float to_sum(T x) {
  return to_float(x);
}

// N elements in accesses of Access; `source` must be aligned to Access * sizeof(T) bytes (16 at most).
template <int Access, class T, int N>
__device__ inline void load_run(Sum<T> (&x)[N], const T* source) {
  static_assert(N % Access == 0, "whole accesses");
#pragma unroll
  for (int a = 0; a < N; a += Access) {
    const Elements<T, Access> raw = *reinterpret_cast<const Elements<T, Access>*>(source + a);
#pragma unroll
    for (int i = 0; i < Access; ++i) x[a + i] = to_sum(raw.value[i]);
  }
}

// Rounded to nearest even; fp8 saturates at its largest finite code and keeps NaN.
template <class T, class S, int N>
__device__ inline void round_run(T (&to)[N], const S (&x)[N]) {
  if constexpr (kIsFp8<T>) {
    constexpr __nv_fp8_interpretation_t kind = is_same_v<T, fp8_e4m3> ? __NV_E4M3 : __NV_E5M2;
    if constexpr (N % 2 == 0) {
#pragma unroll
      for (int i = 0; i < N; i += 2) {
        const __nv_fp8x2_storage_t pair = __nv_cvt_float2_to_fp8x2(make_float2(x[i], x[i + 1]), __NV_SATFINITE, kind);
        to[i].__x = static_cast<__nv_fp8_storage_t>(pair & 0xff);
        to[i + 1].__x = static_cast<__nv_fp8_storage_t>(pair >> 8);
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) to[i].__x = __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, kind);
    }
  } else if constexpr (is_same_v<T, double>) {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = x[i];
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = from_float<T>(x[i]);
  }
}

template <int Access, class T, class S, int N>
__device__ inline void store_run(T* target, const S (&x)[N]) {
  static_assert(N % Access == 0, "whole accesses");
#pragma unroll
  for (int a = 0; a < N; a += Access) {
    S part[Access];
#pragma unroll
    for (int i = 0; i < Access; ++i) part[i] = x[a + i];
    Elements<T, Access> raw;
    round_run(raw.value, part);
    *reinterpret_cast<Elements<T, Access>*>(target + a) = raw;
  }
}

}  // namespace kernelgen
