// Matrix fragments from shared memory (PTX ldmatrix, movmatrix, sm_75 and newer).
//
// Four 8 x 8 matrices of 2-byte elements: lane l gives the address (16-byte aligned, in the shared
// window) of row l % 8 of matrix l / 8, and gets in r[m] the elements (l / 4, 2 (l % 4)) and
// (l / 4, 2 (l % 4) + 1) of matrix m; transposed, those of its transpose.
#pragma once

#include <cstdint>

namespace kvblock {

__device__ __forceinline__ void LoadMatrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The transpose of a matrix that the warp's lanes hold as above.
__device__ __forceinline__ uint32_t TransposeMatrix(uint32_t r) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(r));
  return transposed;
}

}  // namespace kvblock
