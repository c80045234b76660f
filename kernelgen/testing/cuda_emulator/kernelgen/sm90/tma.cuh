#pragma once
#include <kernelgen/sm90/barrier.cuh>

namespace kernelgen {
// As EmulatedKernel.prepare writes it: of 3 or 4 dimensions, what is missing being 1.
struct alignas(64) TensorMap {
  uint64_t address, strides[3];
  int32_t dims[4], box[4], rank, size, swizzle;
  uint64_t rest[6];
};
static_assert(sizeof(TensorMap) == 128);

// Visits the bytes of a box that lies at `at`: body(place in `memory`, address in the tensor or null outside of it), `row_bytes` of each row.
template <class Body>
inline void emulated_box(unsigned char* memory, uint32_t shared, const TensorMap& map, const int (&at)[4], Body body) {
  const int bytes = map.box[0] * map.size;
  for (int r = 0; r < map.box[1]; ++r) {
    const int row = at[1] + r;
    const bool row_inside = row >= 0 && row < map.dims[1] && at[2] >= 0 && at[2] < map.dims[2] && at[3] >= 0 && at[3] < map.dims[3];
    const uint64_t from = map.address + at[3] * map.strides[2] + at[2] * map.strides[1] + row * map.strides[0];
    for (int c = 0; c < bytes; ++c) {
      uint32_t to = shared + r * bytes + c;
      to ^= (to >> 7 & ((1u << map.swizzle) - 1)) << 4;
      const int column = at[0] * map.size + c;
      const bool inside = row_inside && column >= 0 && column < map.dims[0] * map.size;
      body(memory + to, inside ? reinterpret_cast<unsigned char*>(from + column) : nullptr);
    }
  }
}
inline void require_box(const TensorMap& map, int rank, uint32_t shared, int column) {
  if (map.rank != rank) std::fprintf(stderr, "emulator: a copy of %d dimensions by a map of %d\n", rank, map.rank), std::abort();
  if (shared % 128 != 0) std::fprintf(stderr, "emulator: a box at %u of shared memory\n", shared), std::abort();
  if (column * map.size % 16 != 0 || map.box[0] * map.size % 16 != 0) {
    std::fprintf(stderr, "emulator: a box begins or ends within 16 bytes\n"), std::abort();
  }
}

inline void tma_prefetch_map(const TensorMap&) {}
inline void emulated_load(int rank, uint32_t target, const TensorMap& map, uint32_t barrier, int column, int row, int head, int request,
                          uint32_t block = cluster_rank()) {
  require_box(map, rank, target, column);
  auto copy = [=, &map, shared = emulator::cluster_shared[block]] {
    emulated_box(shared, target, map, {column, row, head, request}, [](unsigned char* to, const unsigned char* from) { *to = from ? *from : 0; });
    EmulatedBarrier& b = *reinterpret_cast<EmulatedBarrier*>(shared + barrier);
    b.bytes -= map.box[0] * map.size * map.box[1];
    emulated_end_of_phase(b);
  };
  if (emulator::lazy_copies) {
    emulator::boxes.push_back({static_cast<int>(block), barrier, copy});
  } else {
    copy();
  }
}
inline void tma_load(uint32_t target, const TensorMap& map, uint32_t barrier, int column, int row, int batch) {
  emulated_load(3, target, map, barrier, column, row, batch, 0);
}
inline void tma_load(uint32_t target, const TensorMap& map, uint32_t barrier, int column, int row, int head, int request) {
  emulated_load(4, target, map, barrier, column, row, head, request);
}
inline void tma_load_multicast(uint32_t target, const TensorMap& map, uint32_t barrier, int column, int row, int head, int request,
                               uint16_t blocks) {
  for (int block = 0; block < emulator::cluster_blocks; ++block) {
    if (blocks >> block & 1) emulated_load(4, target, map, barrier, column, row, head, request, block);
  }
}

inline void emulated_store(int rank, const TensorMap& map, uint32_t source, int column, int row, int head, int request) {
  require_box(map, rank, source, column);
  if (column < 0 || row < 0 || head < 0 || request < 0) std::fprintf(stderr, "emulator: a store begins outside of its tensor\n"), std::abort();
  if (map.dims[0] * map.size % 16 != 0) std::fprintf(stderr, "emulator: a store ends within 16 bytes\n"), std::abort();
  emulator::current->open_stores.push_back([=, &map, shared = emulator::dynamic_shared] {
    emulated_box(shared, source, map, {column, row, head, request}, [](const unsigned char* from, unsigned char* to) {
      if (to != nullptr) *to = *from;
    });
  });
}
inline void tma_store(const TensorMap& map, uint32_t source, int column, int row, int batch) {
  emulated_store(3, map, source, column, row, batch, 0);
}
inline void tma_store(const TensorMap& map, uint32_t source, int column, int row, int head, int request) {
  emulated_store(4, map, source, column, row, head, request);
}
inline void tma_store_fence() {}
// Shared memory is read at once, or when that is waited for.
inline void tma_store_commit() {
  emulator::Fiber& f = *emulator::current;
  if (!emulator::lazy_copies) {
    for (const auto& store : f.open_stores) store();
    f.open_stores.clear();
  }
  f.stores.push_back(std::move(f.open_stores));
  f.open_stores.clear();
}
template <int Groups>
inline void tma_store_wait_read() {
  emulator::wait_stores(Groups);
}
}  // namespace kernelgen
