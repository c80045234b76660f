// Products of a warpgroup over tiles of 16-bit elements with rows of 128 bytes. Each warp makes its 16 rows by itself, when they are
// issued or when they are waited for: registers and tiles are read, and sums written, then.
#pragma once
#include <kernelgen/cuda/conversions.cuh>

namespace kernelgen {
constexpr int kWarpgroupThreads = 128;
constexpr int kMmaRows = 64;
inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::current->product_ends.push_back(emulator::current->products); }
template <int Groups>
inline void wgmma_wait() {
  emulator::wait_products(Groups);
}
template <class R, int N>
inline void hold(R (&)[N]) {}

// Element k of row `row` (of M or N) of what a descriptor names; kTransposed: M or N is contiguous, in boxes of 64.
template <class T, bool kTransposed>
inline float emulated_operand(uint64_t descriptor, int row, int k) {
  const uint32_t start = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
  const uint32_t leading = static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4, stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
  uint32_t at = kTransposed ? start + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                            : start + row / 8 * stride + row % 8 * 128 + k * 2;
  at ^= (at >> 7 & 7) << 4;
  T x;
  std::memcpy(&x, emulator::dynamic_shared + at, 2);
  return to_float(x);
}

template <class T, int N>
struct Wgmma {
  static_assert(sizeof(T) == 2 && N % 8 == 0 && N >= 8 && N <= 256);

  template <int kTransposeA, int kTransposeB>
  static void shared(float (&d)[N / 2], uint64_t a, uint64_t b, uint32_t keep) {
    issue({{}, {}, a, b, keep != 0, &multiply<true, kTransposeA != 0, kTransposeB != 0>}, d, nullptr);
  }
  template <int kTransposeB>
  static void registers(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, uint32_t keep) {
    issue({{}, {}, 0, b, keep != 0, &multiply<false, false, kTransposeB != 0>}, d, a);
  }

 private:
  static void issue(const emulator::Product& one, float* sums, const uint32_t* rows) {
    if (one.b >> 62 != 1) std::fprintf(stderr, "emulator: a tile without a swizzle of 128 bytes\n"), std::abort();
    emulator::issue(one, sums, rows);
    if (!emulator::lazy_copies) emulator::finish_products(emulator::current->products);
  }

  // Row i of the warp and column n are sum (i / 8 * 2 + n % 2 + n / 8 * 4) of lane i % 8 * 4 + n % 8 / 2.
  template <bool kShared, bool kTransposeA, bool kTransposeB>
  __attribute__((optimize("O3"))) static void multiply(const emulator::Product& product) {
    static float x[16][16], y[16][N], sums[16][N];
    for (int i = 0; i < 16; ++i) {
      for (int k = 0; k < 16; ++k) {
        if constexpr (kShared) {
          x[i][k] = emulated_operand<T, kTransposeA>(product.a, emulator::thread() / 32 % 4 * 16 + i, k);
        } else {
          const float2 two = unpack_pair<T>(product.rows[i % 8 * 4 + k % 8 / 2][i / 8 + k / 8 * 2]);
          x[i][k] = k % 2 ? two.y : two.x;
        }
      }
      for (int n = 0; n < N; ++n) {
        sums[i][n] = product.keep ? product.sums[i % 8 * 4 + n % 8 / 2][n / 8 * 4 + i / 8 * 2 + n % 2] : 0.0f;
      }
    }
    for (int n = 0; n < N; ++n) {
      for (int k = 0; k < 16; ++k) y[k][n] = emulated_operand<T, kTransposeB>(product.b, n, k);
    }
    for (int i = 0; i < 16; ++i) {
      for (int k = 0; k < 16; ++k) {
        for (int n = 0; n < N; ++n) sums[i][n] += x[i][k] * y[k][n];
      }
      for (int n = 0; n < N; ++n) product.sums[i % 8 * 4 + n % 8 / 2][n / 8 * 4 + i / 8 * 2 + n % 2] = sums[i][n];
    }
  }
};
}  // namespace kernelgen
