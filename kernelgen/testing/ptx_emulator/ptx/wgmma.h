// Products of a warpgroup whose sums, and rows of a where they are in registers, are registers in any order. Issued and run as those of
// kernelgen/sm90/wgmma.cuh: by whole warps, at once or when they are waited for.
#pragma once

#include <kernelgen/sm90/wgmma.cuh>

#include "warp.h"

namespace ptx {
// `sums`, `rows`: which registers of the file hold them.
struct Form {
  const uint16_t *sums, *rows;
  int sign;
  int line;
};

// Bytes of element k of row `row` (of M or N) of what a descriptor names. kMajor: M or N is contiguous, and not K.
template <class T, bool kMajor>
inline float operand(uint64_t descriptor, int row, int k, int line) {
  constexpr int kBytes = 4 / per<T>;
  const uint32_t start = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
  const uint32_t leading = static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4, stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
  const int mode = static_cast<int>(descriptor >> 62), width = mode == 0 ? 16 : 256 >> mode;  // bytes of a row of an atom
  if ((descriptor >> 49 & 7) != 0) fault(line, "a tile with a base offset", descriptor);
  uint32_t at;
  if constexpr (kMajor) {
    const int entries = width / kBytes;
    at = start + row / entries * (mode == 0 ? stride : leading) + k / 8 * (mode == 0 ? leading : stride) + k % 8 * width + row % entries * kBytes;
  } else {
    const int byte = k * kBytes;
    at = start + row / 8 * stride + row % 8 * width + byte % width + byte / width * leading;
  }
  if (mode != 0) at ^= (at >> 7 & (width / 16 - 1)) << 4;
  if (at % 16 == 0) require_fence({emulator::current->rank, at}, 16, line);
  uint32_t word = 0;
  std::memcpy(&word, shared_at(at, kBytes, line), kBytes);
  return element_of<T>(word, 0);
}

template <class A, class B, int N, bool kShared, bool kMajorA, bool kMajorB>
__attribute__((optimize("O3"))) void multiply_tiles(const emulator::Product& product) {
  constexpr int K = 8 * per<A>;
  const Form& form = *static_cast<const Form*>(product.form);
  static float x[16][K], y[K][N], sums[16][N];
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < K; ++k) {
      if constexpr (kShared) {
        x[i][k] = operand<A, kMajorA>(product.a, emulator::thread() / 32 % 4 * 16 + i, k, form.line);
      } else {
        const int from = i % 8 * 4 + k % (4 * per<A>) / per<A>;
        x[i][k] = element_of<A>(product.rows[from][form.rows[i / 8 + k / (4 * per<A>) * 2]], k % per<A>);
      }
      if (form.sign < 0) x[i][k] = -x[i][k];
    }
    for (int n = 0; n < N; ++n) {
      sums[i][n] = product.keep ? product.sums[i % 8 * 4 + n % 8 / 2][form.sums[n / 8 * 4 + i / 8 * 2 + n % 2]] : 0.0f;
    }
  }
  for (int n = 0; n < N; ++n) {
    for (int k = 0; k < K; ++k) y[k][n] = operand<B, kMajorB>(product.b, n, k, form.line);
  }
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < K; ++k) {
      for (int n = 0; n < N; ++n) sums[i][n] += x[i][k] * y[k][n];
    }
    for (int n = 0; n < N; ++n) product.sums[i % 8 * 4 + n % 8 / 2][form.sums[n / 8 * 4 + i / 8 * 2 + n % 2]] = sums[i][n];
  }
}
template <class A, class B, int N, bool kShared, bool kMajorA, bool kMajorB>
inline void issue(const Form& form, uint32_t* file, uint64_t a, uint64_t b, bool keep) {
  const emulator::Product one{{}, {}, a, b, keep, &multiply_tiles<A, B, N, kShared, kMajorA, kMajorB>, &form};
  emulator::issue(one, reinterpret_cast<float*>(file), file);
  if (!emulator::lazy_copies) emulator::finish_products(emulator::current->products);
}
}  // namespace ptx
