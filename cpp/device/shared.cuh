// The shared memory that a launch asks for, aligned to 128 bytes: what ldmatrix and swizzles need;
// and loads from it by an address in the shared window.
#pragma once

#include <cstdint>

namespace kvblock {

__device__ __forceinline__ char* DynamicShared() {
  extern __shared__ __align__(128) char dynamic_shared[];
  return dynamic_shared;
}

// The same as what it holds, aligned to 1024 bytes: what the copy engine's swizzle needs.
template <typename T>
__device__ __forceinline__ T& DynamicSharedAs() {
  extern __shared__ __align__(1024) char raw[];
  return *reinterpret_cast<T*>(raw);
}

// Words that follow each other, aligned to their bytes.
__device__ __forceinline__ void LoadShared(uint32_t (&r)[2], uint32_t address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void LoadShared(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

}  // namespace kvblock
