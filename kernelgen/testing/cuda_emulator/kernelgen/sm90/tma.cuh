#pragma once
#include <kernelgen/sm90/barrier.cuh>

namespace kernelgen {
// As EmulatedKernel.prepare writes it.
struct alignas(64) TensorMap {
  uint64_t address, row_bytes, batch_bytes;
  int32_t dims[3], box[3], size, swizzle;
  uint64_t rest[9];
};
static_assert(sizeof(TensorMap) == 128);

inline void tma_prefetch_map(const TensorMap&) {}
inline void tma_load(uint32_t target, const TensorMap& map, uint32_t barrier, int column, int row, int batch) {
  const int bytes = map.box[0] * map.size;
  if (column * map.size % 16 != 0 || bytes % 16 != 0) std::fprintf(stderr, "emulator: a box begins or ends within 16 bytes\n"), std::abort();
  unsigned char* shared = emulator::dynamic_shared;
  auto copy = [=, &map] {
    for (int r = 0; r < map.box[1]; ++r) {
      for (int c = 0; c < bytes; ++c) {
        uint32_t to = target + r * bytes + c;
        to ^= (to >> 7 & ((1u << map.swizzle) - 1)) << 4;
        const bool inside = row + r < map.dims[1] && batch < map.dims[2] && column + c / map.size < map.dims[0];
        const auto* from = reinterpret_cast<const unsigned char*>(map.address + batch * map.batch_bytes + (row + r) * map.row_bytes);
        shared[to] = inside ? from[column * map.size + c] : 0;
      }
    }
    EmulatedBarrier& b = *reinterpret_cast<EmulatedBarrier*>(shared + barrier);
    b.bytes -= bytes * map.box[1];
    emulated_end_of_phase(b);
  };
  if (emulator::lazy_copies) {
    emulator::boxes.push_back({barrier, copy});
  } else {
    copy();
  }
}
inline void tma_store_fence() {}
}  // namespace kernelgen
