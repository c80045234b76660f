// Registers between warpgroups, one thread out of a warp, and the hand-over from one kernel to the next.
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

// Registers per thread of the calling warpgroup: given up by the one that only starts copies, taken by those that multiply.
// Multiples of 8 from 24 to 240; all warps of the warpgroup call it.
template <int Registers>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// True in one lane of a converged warp.
__device__ inline bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// Programmatic dependent launch: wait until the kernel before has finished and its writes are visible; let the next one begin.
__device__ inline void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void start_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace kernelgen
