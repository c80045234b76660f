// Programmatic dependent launch, sm_90 and later: a kernel whose launch asks for it is set up while the one before it still runs.
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

// Everything that earlier kernels wrote is there afterwards, and the next kernel may be set up. The first thing that every block
// does: a kernel ends only when it has waited, so that whoever waits for it has waited for all before it.
__device__ inline void join_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace kernelgen
