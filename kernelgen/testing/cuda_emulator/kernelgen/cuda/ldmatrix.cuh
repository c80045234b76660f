#pragma once
#include <kernelgen/cuda/types.cuh>

namespace kernelgen {
inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - emulator::dynamic_shared);
}
inline void emulated_ldmatrix(uint32_t (&r)[4], uint32_t address, bool transposed) {
  auto& slots = emulator::warp_slots[emulator::warp()].value;
  const int lane = emulator::thread() % 32;
  if (address % 16 != 0) std::fprintf(stderr, "emulator: unaligned ldmatrix\n"), std::abort();
  slots[lane] = address;
  emulator::warp_wait();
  auto element = [&](int matrix, int row, int column) {
    uint16_t value;
    std::memcpy(&value, emulator::dynamic_shared + slots[matrix * 8 + row] + column * 2, 2);
    return static_cast<uint32_t>(value);
  };
  const int row = lane / 4, column = lane % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    r[i] = transposed ? element(i, column, row) | (element(i, column + 1, row) << 16)
                      : element(i, row, column) | (element(i, row, column + 1) << 16);
  }
  emulator::warp_wait();
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { emulated_ldmatrix(r, address, false); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) { emulated_ldmatrix(r, address, true); }
// Lanes 16 .. 31 give no addresses.
inline void ldmatrix_x2(uint32_t& r0, uint32_t& r1, uint32_t address) {
  uint32_t r[4];
  emulated_ldmatrix(r, __shfl_sync(0xffffffffu, address, emulator::thread() % 16), false);
  r0 = r[0];
  r1 = r[1];
}
}  // namespace kernelgen
