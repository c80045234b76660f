// WGMMA: the tensor-core product of a warpgroup (four warps), d (64 x N) += a (64 x K) b (K x N), K being 32 bytes of elements.
//
// b and usually a are tiles in shared memory, named by descriptors (smem_tile.cuh); a may come from registers instead. d is in
// registers. With group = lane / 4 and pair = lane % 4, warp w of the group holds
//   d[4 j], d[4 j + 1]      row 16 w + group,     columns 8 j + 2 pair, + 1
//   d[4 j + 2], d[4 j + 3]  row 16 w + group + 8
// and the registers of a, 16-bit: a[0], a[2] the row `group`, columns 2 pair and 8 + 2 pair; a[1], a[3] the row below by 8.
//
// Products run asynchronously in the order of their issue:
//   wgmma_fence();  product ...;  wgmma_commit();  ...  wgmma_wait<n>();
// wgmma_wait returns when at most n committed groups are unfinished. Until then d must not be touched, nor the tiles be
// refilled. The instructions themselves, one struct per N and type, are rendered from templates/sm90/wgmma.cuh.jinja:
//   Wgmma<T, N>::shared<kTransposeA, kTransposeB>(d, a, b, keep), Wgmma<T, N>::registers<kTransposeB>(d, a, b, keep)
// `keep` false starts from zero. Only 16-bit tiles may be transposed (stored with M or N contiguous).
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

constexpr int kWarpgroupThreads = 128;
constexpr int kMmaRows = 64;

template <class T, int N>
struct Wgmma;

// Orders earlier accesses to the registers and to shared memory before the products that follow.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int Groups>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Groups) : "memory");
}

// Keeps the compiler from moving accesses of accumulators across: it does not know that the products still write them.
template <int N>
__device__ inline void hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The same of a from registers, which the products still read.
template <int N>
__device__ inline void hold(uint32_t (&a)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

}  // namespace kernelgen
