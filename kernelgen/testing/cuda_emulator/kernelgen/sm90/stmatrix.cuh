#pragma once
#include <kernelgen/cuda/types.cuh>

namespace kernelgen {
inline void emulated_stmatrix(uint32_t address, const uint32_t (&r)[4], bool transposed) {
  auto& slots = emulator::warp_slots[emulator::warp()];
  const int lane = emulator::thread() % 32;
  if (address % 16 != 0) std::fprintf(stderr, "emulator: unaligned stmatrix\n"), std::abort();
  for (int i = 0; i < 4; ++i) slots.a[lane][i] = r[i];
  emulator::warp_wait();
  for (int c = 0; c < 8; ++c) {
    const int from_row = transposed ? c : lane % 8, from_column = transposed ? lane % 8 : c;
    const uint32_t pair = slots.a[from_row * 4 + from_column / 2][lane / 8];
    const uint16_t value = static_cast<uint16_t>(from_column % 2 ? pair >> 16 : pair);
    std::memcpy(emulator::dynamic_shared + address + 2 * c, &value, 2);
  }
  emulator::warp_wait();
}
inline void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  emulated_stmatrix(address, {r0, r1, r2, r3}, false);
}
inline void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  emulated_stmatrix(address, {r0, r1, r2, r3}, true);
}
}  // namespace kernelgen
