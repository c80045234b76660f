// N consecutive elements as floats, in accesses of up to 16 bytes.
#pragma once

#include <kernelgen/cuda/conversions.cuh>

namespace kernelgen {

// The memory form: aligned, so that the compiler moves it in one access (two above 16 bytes).
template <class T, int N>
struct alignas(min_of<int>(16, N * sizeof(T))) Elements {
  static_assert((N & (N - 1)) == 0, "an access is a power of two of elements");
  T value[N];
};

// `source` must be aligned to min(16, N * sizeof(T)) bytes.
template <class T, int N>
__device__ inline void load_elements(float (&x)[N], const T* source) {
  const Elements<T, N> raw = *reinterpret_cast<const Elements<T, N>*>(source);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = to_float(raw.value[i]);
}

template <class T, int N>
__device__ inline void store_elements(T* target, const float (&x)[N]) {
  Elements<T, N> raw;
#pragma unroll
  for (int i = 0; i < N; ++i) raw.value[i] = from_float<T>(x[i]);
  *reinterpret_cast<Elements<T, N>*>(target) = raw;
}

}  // namespace kernelgen
