// Warpgroups that play different roles: registers moved between them, and turns.
#pragma once

#include <cstdint>

namespace kvblock {

constexpr int kWarpgroup = 128;  // threads

// This warpgroup keeps kCount registers a thread, a multiple of 8; all its warps call it.
template <int kCount>
__device__ __forceinline__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
// ... and takes up to kCount, once others have given theirs.
template <int kCount>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Arrives at hardware barrier `id` without waiting; BarrierMeet (mbarrier.cuh) is the other side.
__device__ __forceinline__ void BarrierPass(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// One lane of the warp, the same at every call; all lanes ask together.
__device__ __forceinline__ bool ElectLane() {
  uint32_t elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
               : "=r"(elected));
  return elected != 0;
}

}  // namespace kvblock
