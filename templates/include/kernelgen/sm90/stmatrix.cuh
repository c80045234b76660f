// stmatrix: four 8 x 8 matrices of 16-bit elements from accumulator-shaped registers to shared memory; the inverse of
// ldmatrix.cuh: lane l gives the address of row l % 8 of matrix l / 8, and holds of each matrix row lane / 4, columns
// 2 * (lane % 4) and the next.
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

__device__ inline void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

__device__ inline void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2),
               "r"(r3)
               : "memory");
}

}  // namespace kernelgen
