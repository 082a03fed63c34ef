// The shared memory that a launch asks for.
#pragma once

namespace kvblock {

__device__ __forceinline__ char* DynamicShared() {
  extern __shared__ __align__(1024) char dynamic_shared[];
  return dynamic_shared;
}

}  // namespace kvblock
