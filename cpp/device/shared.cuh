// The shared memory that a launch asks for, aligned to 128 bytes: what ldmatrix and swizzles need.
#pragma once

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

}  // namespace kvblock
