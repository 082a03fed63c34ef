// Thread block clusters for the emulator: see cpp/device/cluster.cuh.
#pragma once

#include "device/mbarrier.cuh"

namespace kvblock {

inline int ClusterRank() { return emulator::cta->rank; }
// All threads of all CTAs: none may have returned.
inline void ClusterMeet() {
  emulator::Cluster& cluster = *emulator::cluster;
  const size_t threads = cluster.ctas.size() * emulator::cta->fibers.size();
  emulator::Wait(cluster.all, static_cast<int>(threads));
}
inline void ClusterBarrierArrive(uint32_t barrier, int rank) {
  BarrierArrive(barrier, *emulator::cluster->ctas[rank]);
}

}  // namespace kvblock
