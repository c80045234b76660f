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
}  // namespace kernelgen
