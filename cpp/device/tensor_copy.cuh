// Hopper's bulk copies between global and shared memory (PTX cp.async.bulk, sm_90). One thread
// issues them; the copy engine does the rest. Loads report to an mbarrier by their bytes; stores
// and additions are waited for by the thread that issued them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace kvblock {

// Announces `bytes` of bulk loads to the barrier's phase, and arrives.
__device__ __forceinline__ void BarrierExpect(uint32_t barrier, int bytes) {
  asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1; }" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

// Before the first use of barriers that were just initialized by the copy engine.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// In every thread that has written shared memory which the copy engine or the tensor cores read
// next, before the barrier that tells them.
__device__ __forceinline__ void FenceAsync() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// In a thread that has learned by an acquire what others have done to global memory, before it
// starts bulk copies of its own to the same place.
__device__ __forceinline__ void FenceAsyncGlobal() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

// How long a line should stay in L2 (the encodings that createpolicy gives for whole lines).
enum class L2 : uint64_t {
  kNormal = 0x1000000000000000,
  kEvictFirst = 0x12f0000000000000,
  kEvictLast = 0x14f0000000000000,
};

// The box of a tensor that begins at (x0, x1, x2, x3), x0 innermost; what lies outside of the
// tensor comes as zeros.
__device__ __forceinline__ void LoadBox(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                        int x0, int x1, int x2, int x3, L2 keep = L2::kNormal) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3),
      "l"(static_cast<uint64_t>(keep))
      : "memory");
}

// The same of a tensor of five dimensions.
__device__ __forceinline__ void LoadBox(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                        const int (&x)[5]) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(x[0]), "r"(x[1]), "r"(x[2]),
      "r"(x[3]), "r"(x[4])
      : "memory");
}

// The same for the CTAs of the cluster in `mask`: the box and the bytes it reports go to the same
// addresses in each of them.
__device__ __forceinline__ void LoadBoxToCtas(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                              int x0, int x1, int x2, int x3, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3),
      "h"(mask)
      : "memory");
}

// What lies outside of the tensor is not written.
__device__ __forceinline__ void StoreBox(const CUtensorMap& map, uint32_t from, int x0, int x1,
                                         int x2, int x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          reinterpret_cast<uint64_t>(&map)),
      "r"(from), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}

// Adds float32 values of a contiguous piece, a multiple of 16 bytes at a multiple of 16.
__device__ __forceinline__ void AddBytes(float* to, uint32_t from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(to)),
               "r"(from), "r"(bytes)
               : "memory");
}

// Stores such a piece instead.
__device__ __forceinline__ void StoreBytes(void* to, uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(to)),
               "r"(from), "r"(bytes)
               : "memory");
}

// A contiguous piece, a multiple of 16 bytes at a multiple of 16.
__device__ __forceinline__ void LoadBytes(uint32_t to, const void* from, int bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
      : "memory");
}

// Stores and additions of this thread so far make a group.
__device__ __forceinline__ void CommitStores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// At most kPending groups have not yet read their shared memory.
template <int kPending>
__device__ __forceinline__ void WaitStoresRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// At most kPending groups are not yet done. What they have written is then visible to this thread's
// ordinary loads and to its releases.
template <int kPending>
__device__ __forceinline__ void WaitStores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace kvblock
