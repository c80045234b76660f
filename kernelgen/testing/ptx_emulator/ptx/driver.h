// Launches of emulated kernels, and in the place of CUDA's driver and of CuTe-DSL's run-time library what the host side of a compiled
// kernel calls: it finds its kernel by name, and a launch runs it at once.
#pragma once

#include <array>
#include <string>

#include "forms.h"

namespace ptx {
struct Parameter {
  uint32_t offset, size;
};
struct Kernel {
  const char* name;
  void (*run)(unsigned char* params);
  std::vector<Parameter> parameters;
  uint32_t dynamic_start;  // of shared memory
  int threads;             // that it is compiled for, or 0
};
std::vector<Kernel> kernels();

inline int mode = 0;  // 1: lazily, 2: with stalls
inline unsigned seed = 1;
inline std::string error;
inline uint64_t ticks() {
  static uint64_t count = 0;
  return ++count;
}

inline const Kernel* find(const char* name) {
  static const std::vector<Kernel> all = kernels();
  for (const Kernel& kernel : all) {
    if (std::strcmp(kernel.name, name) == 0) return &kernel;
  }
  return nullptr;
}
inline int launch(const Kernel& kernel, const unsigned* grid, const unsigned* block, const unsigned* cluster, uint32_t dynamic_bytes,
                  const std::function<const void*(size_t)>& argument) {
  const unsigned threads = block[0];
  const uint32_t end = kernel.dynamic_start + dynamic_bytes;
  if (block[1] != 1 || block[2] != 1 || cluster[1] != 1 || cluster[2] != 1 || threads > 1024 || threads == 0) {
    error = "blocks of threads and clusters along x alone can be emulated";
    return 1;
  }
  if (kernel.threads != 0 && kernel.threads != static_cast<int>(threads)) {
    error = "launched with " + std::to_string(threads) + " threads, compiled for " + std::to_string(kernel.threads);
    return 1;
  }
  if (end - kDynamicShared > 227 * 1024 || cluster[0] > emulator::kMaxCluster || grid[0] % cluster[0] != 0) {
    error = "shared memory, cluster or grid that no launch on sm_90 may have";
    return 1;
  }
  size_t bytes = 0;
  for (const Parameter& p : kernel.parameters) bytes = p.offset + p.size;
  std::vector<unsigned char> memory(bytes + 64, 0);
  unsigned char* params = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  for (size_t i = 0; i < kernel.parameters.size(); ++i) std::memcpy(params + kernel.parameters[i].offset, argument(i), kernel.parameters[i].size);
  shared_end = end;
  lines.clear();
  parts.clear();
  emulator::launch(grid, static_cast<int>(cluster[0]), static_cast<int>(threads), mode, seed, [&] { kernel.run(params); });
  return 0;
}
}  // namespace ptx
