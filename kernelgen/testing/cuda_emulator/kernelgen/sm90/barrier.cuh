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
inline void cluster_sync() { emulator::wait(emulator::cluster_barrier, "its cluster"); }

// What lies in the eight bytes of an mbarrier. Arrivals beyond the count are a fault, as is a wait for a phase that is not the next.
struct EmulatedBarrier {
  uint16_t count, pending;
  int bytes : 31;  // that are still to come
  unsigned parity : 1;
};
static_assert(sizeof(EmulatedBarrier) == 8);
// `memory`: shared memory of the block whose barrier it is.
inline EmulatedBarrier& emulated_barrier(uint32_t barrier, unsigned char* memory = emulator::dynamic_shared) {
  return *reinterpret_cast<EmulatedBarrier*>(memory + barrier);
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
inline void emulated_arrive(uint32_t barrier, int bytes, int arrivals = 1, unsigned char* memory = emulator::dynamic_shared) {
  EmulatedBarrier& b = emulated_barrier(barrier, memory);
  if (b.pending < arrivals) std::fprintf(stderr, "emulator: more arrivals than the barrier counts\n"), std::abort();
  b.bytes += bytes;
  b.pending -= arrivals;
  emulated_end_of_phase(b);
}
inline void barrier_arrive(uint32_t barrier) { emulated_arrive(barrier, 0); }
inline void barrier_arrive(uint32_t barrier, int arrivals) { emulated_arrive(barrier, 0, arrivals); }
inline void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) { emulated_arrive(barrier, static_cast<int>(bytes)); }
// When the cp.async copies of this thread are done: in a lazy run when the barrier is waited for.
inline void cp_async_arrive(uint32_t barrier) {
  emulator::Fiber& f = *emulator::current;
  auto arrive = [barrier, copies = std::move(f.open), memory = emulator::dynamic_shared] {
    for (const emulator::Copy& copy : copies) emulator::land(copy);
    emulated_arrive(barrier, 0, 1, memory);
  };
  f.open.clear();
  if (emulator::lazy_copies) {
    emulator::boxes.push_back({emulator::in_cluster(f.rank, barrier), arrive});
  } else {
    arrive();
  }
}
inline void barrier_arrive_cluster(uint32_t barrier, uint32_t rank) { emulated_arrive(barrier, 0, 1, emulator::cluster_shared[rank]); }
inline void barrier_arrive_expect_cluster(uint32_t barrier, uint32_t rank, uint32_t bytes) {
  emulated_arrive(barrier, static_cast<int>(bytes), 1, emulator::cluster_shared[rank]);
}
inline void store_chunk_cluster(uint32_t address, uint32_t rank, const uint32_t (&words)[4], uint32_t barrier) {
  std::memcpy(emulator::cluster_shared[0] + cluster_address(address, rank), words, 16);
  EmulatedBarrier& b = emulated_barrier(barrier, emulator::cluster_shared[rank]);
  b.bytes -= 16;
  emulated_end_of_phase(b);
}
// The lanes of a warp poll together, which a GPU does as long as the compiler keeps them converged: one that comes shortly behind the others
// passes with them, though what they did since may have ended a further phase.
inline bool emulated_passes(uint32_t barrier, uint32_t parity) {
  constexpr unsigned kShortly = 4;  // rounds of the scheduler
  const unsigned round = emulator::warp_rounds[emulator::warp()];
  emulator::land_boxes(emulator::in_cluster(emulator::current->rank, barrier));
  emulator::Passed& others = emulator::passed[static_cast<uint64_t>(emulator::warp()) << 32 | barrier];
  const uint32_t lane = 1u << emulator::thread() % 32;
  const bool follows = others.parity == parity && (others.lanes & lane) == 0 && round - others.round <= kShortly;
  if (emulated_barrier(barrier).parity == parity && !follows) return false;
  if (!follows) others = {parity, 0, round};
  others.lanes |= lane;
  return true;
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  for (int turns = 0; !emulated_passes(barrier, parity & 1);) emulator::yield_or_abort(turns, "the mbarrier at", static_cast<int>(barrier));
}
inline emulator::Barrier& emulated_named_barrier(int id, int threads) {
  emulator::Barrier& barrier = emulator::named_barriers[emulator::current->rank][id];
  if (id < 1 || id > 15 || threads % 32 != 0 || (barrier.waiting > 0 && barrier.alive != threads)) {
    std::fprintf(stderr, "emulator: named barrier %d is joined for %d threads, and was for %d\n", id, threads, barrier.alive), std::abort();
  }
  barrier.alive = threads;
  return barrier;
}
inline void named_barrier_sync(int id, int threads) { emulator::wait(emulated_named_barrier(id, threads), "named barrier", id); }
inline void named_barrier_arrive(int id, int threads) {
  emulator::Barrier& barrier = emulated_named_barrier(id, threads);
  ++barrier.waiting;
  emulator::release(barrier);
}
}  // namespace kernelgen
