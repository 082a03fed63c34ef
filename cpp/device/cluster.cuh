// Thread block clusters (sm_90): CTAs that run together and reach each other's shared memory.
#pragma once

#include <cstdint>

namespace kvblock {

// This CTA's place in its cluster.
__device__ __forceinline__ int ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// Its cluster's place among the grid's, which lie side by side.
__device__ __forceinline__ int ClusterIndex() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return static_cast<int>(index);
}

// All threads of all CTAs of the cluster meet; those that have returned count as there.
__device__ __forceinline__ void ClusterMeet() {
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
}

// The same in two steps: what a thread does between them waits for nobody. They tell that all CTAs
// have begun, and of their barriers where those were made before FenceBarrierInit; nothing else.
__device__ __forceinline__ void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void ClusterWait() {
  asm volatile("barrier.cluster.wait;" ::: "memory");
}

// Arrives at the barrier that lies at this address in CTA `rank` of the cluster. It orders no
// writes of this thread for the other CTA.
__device__ __forceinline__ void ClusterBarrierArrive(uint32_t barrier, int rank) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
      " mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Writes x to this address in CTA `rank` of the cluster, which has begun, and reports its four
// bytes to the barrier that lies at this address there (BarrierExpect). It waits for nothing.
__device__ __forceinline__ void SendFloat(uint32_t to, float x, uint32_t barrier, int rank) {
  asm volatile(
      "{ .reg .b32 there, told; mapa.shared::cluster.u32 there, %0, %3;"
      " mapa.shared::cluster.u32 told, %2, %3;"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %1, [told]; }" ::"r"(to),
      "f"(x), "r"(barrier), "r"(rank)
      : "memory");
}

// BarrierWait, where what other CTAs of the cluster have sent is read after it.
__device__ __forceinline__ void ClusterBarrierWait(uint32_t barrier, int parity) {
  uint32_t done;
  do {
    asm volatile(
        "{ .reg .pred p;"
        " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;"
        " selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (done == 0);
}

// Copies `bytes`, a multiple of 16 at multiples of 16, to the same address in CTA `rank` of the
// cluster, and reports them to the barrier that lies at this address there. The copy engine does
// it. Nothing here tells when it has read: who waits at that barrier must say so.
__device__ __forceinline__ void SendBytes(uint32_t to, uint32_t from, int bytes, uint32_t barrier,
                                          int rank) {
  asm volatile(
      "{ .reg .b32 there, told; mapa.shared::cluster.u32 there, %0, %4;"
      " mapa.shared::cluster.u32 told, %3, %4;"
      " cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
      " [there], [%1], %2, [told]; }" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier), "r"(rank)
      : "memory");
}

}  // namespace kvblock
