#pragma once
#include <kernelgen/cuda/cp_async.cuh>

namespace kernelgen {
inline void cp_async_16_cached(uint32_t shared, const void* source, bool valid = true) { cp_async_16(shared, source, valid); }
}  // namespace kernelgen
