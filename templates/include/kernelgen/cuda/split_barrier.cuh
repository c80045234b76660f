// A barrier of the block in two halves: arrive() says that this warp is done with what it shares, wait() returns once
// every warp has said so. What a warp does in between covers the time of the slowest. One mbarrier (sm_80 and later).
//
// Phases alternate: each warp arrives once and waits once per phase, in this order. Like __syncthreads, the pair orders
// what the threads of a warp read and wrote before arrive() in front of what others do after wait().
#pragma once

#include <kernelgen/cuda/ldmatrix.cuh>
#include <kernelgen/cuda/warp.cuh>

namespace kernelgen {

struct SplitBarrier {
  uint32_t address;
  uint32_t parity;  // of the phase that is waited for next

  // By one thread of the block; a barrier of the block must follow before the first arrive().
  __device__ static void init(uint64_t* storage, int warps) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(storage)), "r"(warps) : "memory");
  }

  __device__ explicit SplitBarrier(uint64_t* storage) : address(shared_address(storage)), parity(0) {}

  __device__ void arrive() const {
    __syncwarp();
    if (lane_id() == 0) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address) : "memory");
  }

  __device__ void wait() {
    uint32_t done;
    do {
      asm volatile(
          "{\n .reg .pred p;\n mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(address), "r"(parity)
          : "memory");
    } while (!done);
    parity ^= 1;
  }
};

}  // namespace kernelgen
