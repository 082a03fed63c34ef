// Warpgroups for the emulator, where registers are not counted.
#pragma once

#include "device/mbarrier.cuh"

namespace kvblock {

constexpr int kWarpgroup = 128;

template <int kCount>
inline void GiveRegisters() {
  if (threadIdx.x == 0) ++emulator::hopper_ctas;
}
template <int kCount>
inline void TakeRegisters() {}

inline bool ElectLane() { return threadIdx.x % emulator::kWarp == 0; }

inline void BarrierPass(int id, int threads) {
  emulator::Barrier& barrier = NamedBarrier(id, threads);
  emulator::races::Release(barrier.handover);
  if (++barrier.arrived < threads) return;
  emulator::races::Complete(barrier.handover);
  barrier.arrived = 0;
  emulator::Wake(barrier.waiting);
}

}  // namespace kvblock
