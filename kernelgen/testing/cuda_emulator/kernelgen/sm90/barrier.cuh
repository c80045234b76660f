#pragma once
#include <kernelgen/cuda/types.cuh>

namespace kernelgen {
inline uint32_t cluster_rank() { return static_cast<uint32_t>(emulator::current->rank); }
inline uint32_t cluster_address(uint32_t address, uint32_t rank) {
  if (static_cast<int>(rank) >= emulator::cluster_blocks) std::fprintf(stderr, "emulator: no block %u\n", rank), std::abort();
  return rank * emulator::kSharedBytes + address;
}
inline float4 load_cluster(uint32_t remote) {
  float4 x;
  std::memcpy(&x, emulator::cluster_shared[0] + remote, 16);
  return x;
}
inline void cluster_sync() { emulator::wait(emulator::cluster_barrier); }

// What lies in the eight bytes of an mbarrier. Arrivals beyond the count are a fault, as is a wait for a phase that is not the next.
struct EmulatedBarrier {
  uint16_t count, pending;
  int bytes : 31;  // that are still to come
  unsigned parity : 1;
};
static_assert(sizeof(EmulatedBarrier) == 8);
inline EmulatedBarrier& emulated_barrier(uint32_t barrier) {
  return *reinterpret_cast<EmulatedBarrier*>(emulator::dynamic_shared + barrier);
}
inline void emulated_end_of_phase(EmulatedBarrier& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  b.pending = b.count;
  b.parity ^= 1;
}
inline void barrier_init(uint32_t barrier, int arrivals) {
  emulated_barrier(barrier) = {static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals), 0, 0};
}
inline void barrier_init_fence() {}
inline void emulated_arrive(uint32_t barrier, int bytes) {
  EmulatedBarrier& b = emulated_barrier(barrier);
  if (b.pending == 0) std::fprintf(stderr, "emulator: more arrivals than the barrier counts\n"), std::abort();
  b.bytes += bytes;
  --b.pending;
  emulated_end_of_phase(b);
}
inline void barrier_arrive(uint32_t barrier) { emulated_arrive(barrier, 0); }
inline void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) { emulated_arrive(barrier, static_cast<int>(bytes)); }
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  emulator::land_boxes(barrier);
  for (int turns = 0; emulated_barrier(barrier).parity == (parity & 1);) {
    emulator::yield_or_abort(turns, "an mbarrier");
    emulator::land_boxes(barrier);
  }
}
inline void named_barrier_sync(int id, int threads) {
  emulator::Barrier& barrier = emulator::named_barriers[id];
  barrier.alive = threads;
  emulator::wait(barrier);
}
}  // namespace kernelgen
