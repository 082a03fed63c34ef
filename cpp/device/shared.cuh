// The shared memory that a launch asks for, aligned to 128 bytes: what ldmatrix and swizzles need.
#pragma once

namespace kvblock {

__device__ __forceinline__ char* DynamicShared() {
  extern __shared__ __align__(128) char dynamic_shared[];
  return dynamic_shared;
}

}  // namespace kvblock
