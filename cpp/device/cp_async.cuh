// Asynchronous copies from global to shared memory (PTX cp.async, sm_80 and newer).
#pragma once

#include <cstdint>

namespace kvblock {

// Copies kBytes (4, 8 or 16), or writes zeros when `from` is null. 16-byte copies skip L1.
template <int kBytes>
__device__ __forceinline__ void CopyAsync(void* to_shared, const void* from) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(to_shared));
  const int bytes = from == nullptr ? 0 : kBytes;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes),
                 "r"(bytes)
                 : "memory");
  }
}

// The same for a shared-window address and a condition: 16 bytes, or zeros unless `valid`.
__device__ __forceinline__ void CopyAsync16(uint32_t to_shared, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to_shared), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

// The address `index` steps of so many bytes behind one, by one instruction.
__device__ __forceinline__ const char* StepFrom(const char* from, uint32_t index, uint32_t bytes) {
  uint64_t to;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(to) : "r"(index), "r"(bytes), "l"(from));
  return reinterpret_cast<const char*>(to);
}

// For L2: what is read once leaves it first, so that what is read by all stays.
__device__ __forceinline__ uint64_t ReadOnce() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void CopyAsync16(uint32_t to_shared, const void* from, bool valid,
                                            uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to_shared),
               "l"(from), "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void PrefetchToL2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

__device__ __forceinline__ void CopyAsyncCommit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's committed groups are still under way.
template <int kPending>
__device__ __forceinline__ void CopyAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace kvblock
