// Products with a from registers and a K-contiguous b with rows of 128 bytes. They run when they are issued: that something waits for
// them is not looked at.
#pragma once
#include <kernelgen/cuda/conversions.cuh>

namespace kernelgen {
constexpr int kWarpgroupThreads = 128;
constexpr int kMmaRows = 64;
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int Groups>
inline void wgmma_wait() {}
template <class R, int N>
inline void hold(R (&)[N]) {}

template <class T, int N>
struct Wgmma {
  template <int kTransposeB>
  static void registers(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, uint32_t keep) {
    static_assert(kTransposeB == 0 && sizeof(T) == 2);
    auto& slots = emulator::warp_slots[emulator::warp()];
    const int lane = emulator::thread() % 32, group = lane / 4, pair = lane % 4;
    for (int i = 0; i < 4; ++i) slots.a[lane][i] = a[i];
    emulator::warp_wait();
    float rows[2][16];
    for (int i = 0; i < 32; ++i) {
      const int k = i % 16, half = i / 16;
      const float2 two = unpack_pair<T>(slots.a[group * 4 + k % 8 / 2][half + k / 8 * 2]);
      rows[half][k] = k % 2 ? two.y : two.x;
    }
    emulator::warp_wait();
    const uint32_t tile = static_cast<uint32_t>(b & 0x3fff) << 4;
    for (int i = 0; i < N / 2; ++i) {
      const int column = i / 4 * 8 + 2 * pair + i % 2, half = i / 2 % 2;
      float sum = keep ? d[i] : 0.0f;
      for (int k = 0; k < 16; ++k) {
        uint32_t at = tile + column * 128 + k * 2;
        at ^= (at >> 7 & 7) << 4;
        T x;
        std::memcpy(&x, emulator::dynamic_shared + at, 2);
        sum += rows[half][k] * to_float(x);
      }
      d[i] = sum;
    }
  }
};
}  // namespace kernelgen
