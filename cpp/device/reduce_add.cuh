// Additions to global memory that return nothing (PTX red; on sm_90 cp.reduce.async.bulk).
#pragma once

#include <cstdint>

namespace kvblock {

// to[0] += x, to[1] += y, each atomically; `to` is aligned to 8 bytes. One instruction on sm_90.
__device__ __forceinline__ void ReduceAdd(float* to, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y)
               : "memory");
#else
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to + 1), "f"(y) : "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
constexpr bool kBulkAdditions = true;
#else
constexpr bool kBulkAdditions = false;
#endif

// Bulk additions read shared memory on their own time. First the threads that wrote it call
// BulkFence, then, behind a barrier, one thread adds `bytes` of floats from `from` to `to` (all
// multiples of 16), commits, and waits before anyone writes there again.
__device__ __forceinline__ void BulkReduceAdd(float* to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from))), "r"(bytes)
      : "memory");
#endif
}

__device__ __forceinline__ void BulkFence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void BulkCommit() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Until all additions that this thread committed have read their source.
__device__ __forceinline__ void BulkWaitRead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

}  // namespace kvblock
