// Barriers in shared memory and hardware barriers, for the emulator: see cpp/device/mbarrier.cuh.
#pragma once

#include "cuda_runtime.h"

namespace kvblock {

inline void BarrierInit(uint32_t barrier, int arrivals) {
  emulator::cta->in_shared[barrier].expected = arrivals;
}

inline emulator::SharedBarrier& FindBarrier(uint32_t barrier) {
  const auto found = emulator::cta->in_shared.find(barrier);
  if (found == emulator::cta->in_shared.end()) emulator::Die("a barrier that nobody has made");
  return found->second;
}

inline void BarrierArrive(uint32_t barrier) {
  emulator::SharedBarrier& b = FindBarrier(barrier);
  if (++b.arrived < b.expected) return;
  b.arrived = 0;
  ++b.phase;
  emulator::Wake(b.waiting);
}

// The copies arrive when somebody waits for them.
inline void BarrierArriveAfterCopies(uint32_t barrier) {
  std::vector<emulator::Copy> copies;
  auto& groups = emulator::cta->groups[threadIdx.x];
  for (auto& group : groups) {
    copies.insert(copies.end(), group.begin(), group.end());
    group.clear();
  }
  FindBarrier(barrier).late.push_back([=] {
    for (const emulator::Copy& copy : copies) emulator::Finish(copy);
    BarrierArrive(barrier);
  });
}

inline void BarrierWait(uint32_t barrier, int parity) {
  emulator::SharedBarrier& b = FindBarrier(barrier);
  while (b.phase % 2 == static_cast<unsigned>(parity)) {
    if (b.late.empty()) {
      emulator::Sleep(b.waiting);
    } else {
      const auto late = std::move(b.late);
      b.late.clear();
      for (const auto& arrive : late) arrive();
    }
  }
}

inline void BarrierMeet(int id, int threads) { emulator::Wait(emulator::cta->named[id], threads); }

}  // namespace kvblock
