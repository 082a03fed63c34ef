// Matrix fragments to shared memory (PTX stmatrix, sm_90): the counterpart of ldmatrix.cuh.
//
// Lane l gives the address of row l % 8 of matrix l / 8, and its r[m] holds the elements
// (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1) of matrix m.
#pragma once

#include <cstdint>

namespace kvblock {

__device__ __forceinline__ void StoreMatrices(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// The same for the transposes: what a lane holds of a row goes to a column.
__device__ __forceinline__ void StoreTransposes(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

}  // namespace kvblock
