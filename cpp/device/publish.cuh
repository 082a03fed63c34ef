// Telling other CTAs of a GPU, also those of another launch, that something lies in memory.
#pragma once

#include <cstdint>

namespace kvblock {

// Before anybody can be told: nothing lies there yet.
__device__ __forceinline__ void Withdraw(int32_t* flag) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(flag) : "memory");
}

// What this thread wrote, and what those wrote whom it has met since, is there.
__device__ __forceinline__ void Publish(int32_t* flag) {
  asm volatile("fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
}

// Waits until it is, and then sees it.
__device__ __forceinline__ void AwaitPublished(const int32_t* flag) {
  for (;;) {
    int32_t seen;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    if (seen != 0) return;
    __nanosleep(40);
  }
}

}  // namespace kvblock
