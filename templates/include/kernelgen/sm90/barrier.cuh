// Waiting and signalling on Hopper: mbarriers in shared memory, named barriers of a block, the barrier of a cluster.
//
// An mbarrier counts arrivals and, for TMA, bytes. A phase ends when both counts are met; waiting names the parity of the phase
// that is to end, so a fresh barrier is waited on with 0 for its first phase, and waiting with 1 returns at once. Barriers are
// named by their 32-bit shared address (PTX ISA, "mbarrier").
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to TMA and to the other blocks of a cluster; a block or cluster barrier must follow.
__device__ inline void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// As so many arrivals.
__device__ inline void barrier_arrive(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Arrives when the cp.async copies of this thread are done.
__device__ inline void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for so many bytes of TMA as well.
__device__ inline void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the same barrier of block `rank` of the cluster, which may be the own one. Orders nothing but what the barrier itself
// orders within a block: enough to hand back memory that was only read. A release at cluster scope costs a flush per arrival: with it
// a multicast product of 4096 x 4096 x 7168 took 496 us instead of 307 (H200, 2026-11-30).
__device__ inline void barrier_arrive_cluster(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier), "r"(rank)
      : "memory");
}

__device__ inline bool barrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  while (!barrier_try_wait(barrier, parity)) {
  }
}

// Barrier `id` (1 to 15; 0 is __syncthreads) among `threads` threads of the block.
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Address of the same place in the shared memory of block `rank`, for ld.shared::cluster.
__device__ inline uint32_t cluster_address(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

__device__ inline float4 load_cluster(uint32_t remote) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(remote) : "memory");
  return x;
}

// Arrives at the same barrier of block `rank`, whose phase waits for so many bytes of store_chunk_cluster as well.
__device__ inline void barrier_arrive_expect_cluster(uint32_t barrier, uint32_t rank, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(cluster_address(barrier, rank)), "r"(bytes) : "memory");
}

// 16 bytes to the same place of block `rank`, seen by whoever waits for its `barrier`.
__device__ inline void store_chunk_cluster(uint32_t address, uint32_t rank, const uint32_t (&words)[4], uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(cluster_address(address, rank)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(cluster_address(barrier, rank))
               : "memory");
}

// All threads of all blocks of the cluster.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace kernelgen
