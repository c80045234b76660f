#pragma once
#include <kernelgen/sm90/barrier.cuh>

namespace kernelgen {
// As EmulatedKernel.prepare writes it: of 1 to 5 dimensions, what is missing being 1.
struct alignas(64) TensorMap {
  uint64_t address, strides[4];
  int32_t dims[5], box[5], rank, size, swizzle;
  uint64_t rest[4];
};
static_assert(sizeof(TensorMap) == 128);

inline int emulated_box_bytes(const TensorMap& map) {
  return map.box[0] * map.size * map.box[1] * map.box[2] * map.box[3] * map.box[4];
}
// Visits the bytes of a box that lies at `at`: body(place in `memory`, address in the tensor or null outside of it), `row_bytes` of each row.
template <class Body>
inline void emulated_box(unsigned char* memory, uint32_t shared, const TensorMap& map, const int (&at)[5], Body body) {
  const int bytes = map.box[0] * map.size, rows = emulated_box_bytes(map) / bytes;
  for (int r = 0; r < rows; ++r) {
    bool row_inside = true;
    uint64_t from = map.address;
    for (int d = 1, rest = r; d < 5; rest /= map.box[d++]) {
      const int place = at[d] + rest % map.box[d];
      row_inside = row_inside && place >= 0 && place < map.dims[d];
      from += place * map.strides[d - 1];
    }
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
// Into the shared memory of block `block` of the cluster, whose barrier counts the bytes.
inline void emulated_load(int rank, uint32_t target, const TensorMap& map, uint32_t barrier, int block, const int (&at)[5]) {
  require_box(map, rank, target, at[0]);
  const int d0 = at[0], d1 = at[1], d2 = at[2], d3 = at[3], d4 = at[4];
  auto copy = [=, shared = emulator::cluster_shared[block]] {
    emulated_box(shared, target, map, {d0, d1, d2, d3, d4}, [](unsigned char* to, const unsigned char* from) { *to = from ? *from : 0; });
    EmulatedBarrier& b = emulated_barrier(barrier, shared);
    b.bytes -= emulated_box_bytes(map);
    emulated_end_of_phase(b);
  };
  if (emulator::lazy_copies) {
    emulator::boxes.push_back({emulator::in_cluster(block, barrier), copy});
  } else {
    copy();
  }
}
inline void tma_load(uint32_t target, const TensorMap& map, uint32_t barrier, int column, int row, int batch) {
  emulated_load(3, target, map, barrier, emulator::current->rank, {column, row, batch, 0, 0});
}
inline void tma_load(uint32_t target, const TensorMap& map, uint32_t barrier, int column, int row, int head, int request) {
  emulated_load(4, target, map, barrier, emulator::current->rank, {column, row, head, request, 0});
}
inline void tma_load_multicast(uint32_t target, const TensorMap& map, uint32_t barrier, int column, int row, int batch, uint16_t blocks) {
  for (int block = 0; block < emulator::cluster_blocks; ++block) {
    if (blocks >> block & 1) emulated_load(3, target, map, barrier, block, {column, row, batch, 0, 0});
  }
}
inline void tma_load_multicast(uint32_t target, const TensorMap& map, uint32_t barrier, int column, int row, int head, int request,
                               uint16_t blocks) {
  for (int block = 0; block < emulator::cluster_blocks; ++block) {
    if (blocks >> block & 1) emulated_load(4, target, map, barrier, block, {column, row, head, request, 0});
  }
}

// `put`: writes one byte of a box to the tensor.
template <class Put>
inline void emulated_store(int rank, const TensorMap& map, uint32_t source, const int (&at)[5], Put put) {
  require_box(map, rank, source, at[0]);
  const int d0 = at[0], d1 = at[1], d2 = at[2], d3 = at[3], d4 = at[4];
  if (d0 < 0 || d1 < 0 || d2 < 0 || d3 < 0 || d4 < 0) std::fprintf(stderr, "emulator: a store begins outside of its tensor\n"), std::abort();
  if (map.dims[0] * map.size % 16 != 0) std::fprintf(stderr, "emulator: a store ends within 16 bytes\n"), std::abort();
  emulator::current->open_stores.push_back([=, shared = emulator::dynamic_shared] {
    emulated_box(shared, source, map, {d0, d1, d2, d3, d4}, [&](const unsigned char* from, unsigned char* to) {
      if (to != nullptr) put(to, from);
    });
  });
}
inline void emulated_store(int rank, const TensorMap& map, uint32_t source, const int (&at)[5]) {
  emulated_store(rank, map, source, at, [](unsigned char* to, const unsigned char* from) { *to = *from; });
}
inline void tma_store(const TensorMap& map, uint32_t source, int column, int row, int batch) {
  emulated_store(3, map, source, {column, row, batch, 0, 0});
}
inline void tma_store(const TensorMap& map, uint32_t source, int column, int row, int head, int request) {
  emulated_store(4, map, source, {column, row, head, request, 0});
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
