// Barriers in shared memory that threads arrive at early and wait for late (PTX mbarrier, sm_80 and
// newer), by their address in the shared window. Each completion is a phase; a waiter names the
// phase by its parity, the first being 0.
#pragma once

#include <cstdint>

namespace kvblock {

// One thread, before a __syncthreads that everyone who uses the barrier passes.
__device__ __forceinline__ void BarrierInit(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Where threads share memory through ordinary loads and stores, each lane arrives for itself: it
// takes no longer than __syncwarp and one arrival for the warp, and racecheck of compute-sanitizer
// takes an arrival for that of one thread alone.
__device__ __forceinline__ void BarrierArrive(uint32_t barrier) {
  asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }" ::"r"(barrier) : "memory");
}

// Arrives once all asynchronous copies that this thread has started so far are done.
__device__ __forceinline__ void BarrierArriveAfterCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase of this parity is complete.
__device__ __forceinline__ void BarrierWait(uint32_t barrier, int parity) {
  uint32_t done;
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
#endif
  } while (done == 0);
}

// Whether the phase of this parity is complete, without waiting.
__device__ __forceinline__ bool BarrierTest(uint32_t barrier, int parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Waits until `threads` threads, a multiple of 32, have come to hardware barrier `id`, 1 to 15.
__device__ __forceinline__ void BarrierMeet(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace kvblock
