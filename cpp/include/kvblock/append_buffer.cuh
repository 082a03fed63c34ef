// For kernels of one's own that append to a result of fixed capacity (kernel_call's append=).
#ifndef KVBLOCK_APPEND_BUFFER_CUH_
#define KVBLOCK_APPEND_BUFFER_CUH_

namespace kvblock {

// Puts a value behind those that are there, and says whether there was room. `count` goes on where
// there is none, so that the caller learns of it; nothing is written beyond `capacity`.
template <typename T>
__device__ __forceinline__ bool append(T* data, unsigned* count, unsigned capacity,
                                       const T& value) {
  const unsigned place = atomicAdd(count, 1u);
  if (place >= capacity) return false;
  data[place] = value;
  return true;
}

}  // namespace kvblock

#endif  // KVBLOCK_APPEND_BUFFER_CUH_
