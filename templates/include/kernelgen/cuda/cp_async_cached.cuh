// cp.async through L1, for what other warps of the SM read as well; cp_async.cuh has the copies that pass it by.
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

// Copies 16 bytes, or writes 16 zero bytes when `valid` is false; `source` is then not read.
__device__ inline void cp_async_16_cached(uint32_t shared, const void* source, bool valid = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(source), "r"(valid ? 16 : 0) : "memory");
}

}  // namespace kernelgen
