#pragma once
#include <kernelgen/cuda/conversions.cuh>

namespace kernelgen {
template <class T>
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  auto& slots = emulator::warp_slots[emulator::warp()];
  const int lane = emulator::thread() % 32, group = lane / 4, pair = lane % 4;
  for (int i = 0; i < 4; ++i) slots.a[lane][i] = a[i];
  slots.b[lane][0] = b0;
  slots.b[lane][1] = b1;
  emulator::warp_wait();
  for (int i = 0; i < 4; ++i) {
    const int row_half = i / 2, column = 2 * pair + i % 2;
    float sum = d[i];
    for (int k = 0; k < 16; k += 2) {
      const float2 x = unpack_pair<T>(slots.a[group * 4 + k % 8 / 2][row_half + k / 8 * 2]);
      const float2 y = unpack_pair<T>(slots.b[column * 4 + k % 8 / 2][k / 8]);
      sum += x.x * y.x;
      sum += x.y * y.y;
    }
    d[i] = sum;
  }
  emulator::warp_wait();
}
template <class T>
inline void mma_m16n8k16_from(float (&d)[4], const float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  for (int i = 0; i < 4; ++i) d[i] = c[i];
  mma_m16n8k16<T>(d, a, b0, b1);
}
template <class T>
inline void mma_m16n8k16_fresh(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  for (float& x : d) x = 0.0f;
  mma_m16n8k16<T>(d, a, b0, b1);
}
}  // namespace kernelgen
