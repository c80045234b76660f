// ldmatrix: four 8x8 matrices of 16-bit elements from shared memory into the fragments of mma.cuh.
//
// Lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, 16-byte aligned) and receives in r[i] elements
// (row lane / 4, cols 2 * (lane % 4), +1) of matrix i; the _trans form receives the transposed matrix.
//
//   A fragment of a 16x16 tile, row major:       matrices (rows 0-7, cols 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15):
//                                                lane addresses (row l % 16, column 8 * (l / 16)); r is a[0..3]
//   B fragments of two n8 tiles, stored [n][k]:  matrices (n 0-7, k 0-7), (n 0-7, k 8-15), (n 8-15, k 0-7), ...:
//                                                lane addresses (n (l % 8) + 8 * (l / 16), k 8 * (l / 8 % 2))
//   B fragments of two n8 tiles, stored [k][n]:  _trans; lane addresses (k l % 16, n 8 * (l / 16))
// In both B cases r[0], r[1] are b0, b1 of the first n8 tile and r[2], r[3] of the second.
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

// Address of a shared-memory object as the 32-bit number that ldmatrix and cp.async take.
__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ inline void ldmatrix_x2(uint32_t& r0, uint32_t& r1, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r0), "=r"(r1) : "r"(address));
}

__device__ inline void ldmatrix_x2_trans(uint32_t& r0, uint32_t& r1, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(r0), "=r"(r1) : "r"(address));
}

}  // namespace kernelgen
