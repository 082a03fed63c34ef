// Thread block clusters for the emulator: see cpp/device/cluster.cuh. What is sent arrives when
// somebody waits for it.
#pragma once

#include "device/mbarrier.cuh"

namespace kvblock {

inline int ClusterRank() { return emulator::cta->rank; }
inline int ClusterIndex() { return static_cast<int>(blockIdx.x / emulator::cluster->ctas.size()); }
// All threads of all CTAs: none may have returned.
inline void ClusterMeet() {
  emulator::Cluster& cluster = *emulator::cluster;
  const size_t threads = cluster.ctas.size() * emulator::cta->fibers.size();
  emulator::Wait(cluster.all, static_cast<int>(threads));
}
// In two steps: all meet at the second, which tells of barriers that were made, and nothing else.
inline void ClusterArrive() {
  if (std::exchange(emulator::cta->running->in_cluster, true)) {
    emulator::Die("arrives at its cluster twice");
  }
}
inline void ClusterWait() {
  if (!std::exchange(emulator::cta->running->in_cluster, false)) {
    emulator::Die("waits for its cluster, and has not arrived");
  }
  emulator::Cluster& cluster = *emulator::cluster;
  const size_t threads = cluster.ctas.size() * emulator::cta->fibers.size();
  const bool last = cluster.begun.arrived + 1 == static_cast<int>(threads);
  if (last) emulator::races::Complete(cluster.begun.handover);
  emulator::Meet(cluster.begun, static_cast<int>(threads));
  emulator::races::Acquire(cluster.begun.handover);
}
inline void SendFloat(uint32_t to, float x, uint32_t barrier, int rank) {
  if (to % sizeof(x)) emulator::Die("what is sent is not aligned");
  const emulator::races::InCta there(rank);
  const auto sent = emulator::races::StartBulkLoad(barrier, emulator::SharedPointer(to), sizeof(x));
  const auto arrive = [=] {
    std::memcpy(emulator::SharedPointer(to), &x, sizeof(x));
    ArriveBytes(barrier, sizeof(x), sent);
  };
  ArriveLate(barrier, arrive, *emulator::cluster->ctas[rank]);
}
inline void SendBytes(uint32_t to, uint32_t from, int bytes, uint32_t barrier, int rank) {
  if (to % 16 || from % 16 || bytes % 16) emulator::Die("what is sent is not aligned");
  using namespace emulator::races;
  const char* const first = emulator::SharedPointer(from);
  const std::vector<char> held(first, first + bytes);
  const auto sent = [&] {
    const InCta there(rank);
    return StartBulkLoad(barrier, emulator::SharedPointer(to), bytes);
  }();
  StartRead(sent, first, bytes);
  const auto arrive = [=] {
    std::memcpy(emulator::SharedPointer(to), held.data(), held.size());
    ArriveBytes(barrier, bytes, sent);
  };
  ArriveLate(barrier, arrive, *emulator::cluster->ctas[rank]);
}
inline void ClusterBarrierWait(uint32_t barrier, int parity) { BarrierWait(barrier, parity); }
inline void ClusterBarrierArrive(uint32_t barrier, int rank) {
  BarrierArrive(barrier, *emulator::cluster->ctas[rank]);
}

}  // namespace kvblock
