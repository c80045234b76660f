// Launches of emulated kernels, and in the place of CUDA's driver and of CuTe-DSL's run-time library what the host side of a compiled
// kernel calls: it finds its kernel by name, and a launch runs it at once.
#ifndef KERNELGEN_PTX_DRIVER_H  // and no #pragma once: it is read from a compiled header, and again by driver.cc
#define KERNELGEN_PTX_DRIVER_H

#include <array>
#include <csetjmp>
#include <csignal>
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
inline bool fresh = true;  // no thread of the launch has run
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
// A fault of a kernel ends its launch, and not the process: abort() and wild addresses come back to where the launch began.
inline sigjmp_buf back;
inline void stopped(int signal) { siglongjmp(back, signal); }
inline int guarded(const std::function<void()>& body) {
  constexpr int kSignals[] = {SIGABRT, SIGSEGV, SIGBUS};
  struct sigaction ours {}, before[3];
  ours.sa_handler = stopped;
  for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &ours, &before[i]);
  last_fault[0] = 0;
  const int signal = sigsetjmp(back, 1);
  if (signal == 0) body();
  for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &before[i], nullptr);
  if (signal != 0) {
    if (signal != SIGABRT) std::fprintf(stderr, "ptx_emulator: an address where no memory is\n");
    error = last_fault[0] != 0 ? last_fault : "a fault of the kernel, which stderr tells";
    emulator::boxes.clear();
  }
  return signal != 0;
}
inline void run_thread(const Kernel& kernel, unsigned char* params) {
  static emulator::Dim3 last{~0u, 0, 0};
  const emulator::Dim3& at = emulator::block_index;
  const emulator::Dim3 first{at.x - static_cast<unsigned>(emulator::current->rank), at.y, at.z};
  if (fresh || first.x != last.x || first.y != last.y || first.z != last.z) forget_writes();
  last = first, fresh = false;
  kernel.run(params);
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
  own.push_back({reinterpret_cast<uint64_t>(params), reinterpret_cast<uint64_t>(params) + bytes});
  fresh = true;
  emulator::patience = 100000;
  const int result = guarded([&] {
    emulator::launch(grid, static_cast<int>(cluster[0]), static_cast<int>(threads), mode, seed, [&] { run_thread(kernel, params); });
  });
  own.pop_back();
  return result;
}
}  // namespace ptx
#endif
