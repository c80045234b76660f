// TMA: boxes of a tensor between global and shared memory, issued by one thread, moved by the copy engine.
//
// A tensor map (CUtensorMap) says how the tensor lies and how a box is swizzled; the launcher encodes it for each launch and it
// lies in the parameters of the kernel. What a box covers beyond the tensor reads as zero and is not written.
// Coordinates are (innermost, rows, batch) in elements; the innermost must be a multiple of 16 bytes, or the kernel ends with an
// illegal instruction (H200, 2026-11-30).
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

struct alignas(64) TensorMap {
  uint64_t words[16];
};

__device__ inline void tma_prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Global to shared; `barrier` gets the bytes of the box.
__device__ inline void tma_load(uint32_t target, const TensorMap& map, uint32_t barrier, int column, int row, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(batch)
      : "memory");
}

// Of a tensor with one dimension more: (innermost, rows, heads, requests).
__device__ inline void tma_load(uint32_t target, const TensorMap& map, uint32_t barrier, int column, int row, int head, int request) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(request)
      : "memory");
}

// The same box into the same place of every block of the cluster whose bit is set in `blocks`; each one's barrier gets the bytes.
__device__ inline void tma_load_multicast(uint32_t target, const TensorMap& map, uint32_t barrier, int column, int row, int batch,
                                          uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5}], "
      "[%2], %6;" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(batch), "h"(blocks)
      : "memory");
}

__device__ inline void tma_load_multicast(uint32_t target, const TensorMap& map, uint32_t barrier, int column, int row, int head, int request,
                                          uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %6}], "
      "[%2], %7;" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(request), "h"(blocks)
      : "memory");
}

// Shared to global. Coordinates must not be negative (illegal instruction, H200), and of a row that does not end at a multiple of 16
// bytes what is left of those is written too. The writes of the threads come first: tma_store_fence by each of them, then a barrier, then this.
__device__ inline void tma_store(const TensorMap& map, uint32_t source, int column, int row, int batch) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map), "r"(source), "r"(column),
               "r"(row), "r"(batch)
               : "memory");
}

__device__ inline void tma_store(const TensorMap& map, uint32_t source, int column, int row, int head, int request) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map), "r"(source), "r"(column),
               "r"(row), "r"(head), "r"(request)
               : "memory");
}

// Orders a thread's writes to shared memory before what the copy engine reads.
__device__ inline void tma_store_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most `Groups` of the thread's committed stores have yet to read shared memory.
template <int Groups>
__device__ inline void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Groups) : "memory");
}

}  // namespace kernelgen
