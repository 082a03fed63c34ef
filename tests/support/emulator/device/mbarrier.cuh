// Barriers in shared memory and hardware barriers, for the emulator: see cpp/device/mbarrier.cuh.
#pragma once

#include "cuda_runtime.h"

namespace kvblock {

inline void BarrierInit(uint32_t barrier, int arrivals) {
  if (barrier % 8) emulator::Die("a barrier is not aligned");
  emulator::races::Touch(emulator::races::Access::kWrite, emulator::SharedPointer(barrier), 8);
  emulator::cta->in_shared[barrier].expected = arrivals;
}

inline emulator::SharedBarrier& FindBarrier(uint32_t barrier, emulator::Cta& of) {
  const auto found = of.in_shared.find(barrier);
  if (found == of.in_shared.end()) emulator::Die("a barrier that nobody has made");
  if (of.alive == 0) emulator::Die("a barrier of a CTA that has ended");
  const emulator::races::InCta there(of.rank);
  emulator::races::Touch(emulator::races::Access::kBarrier, emulator::SharedPointer(barrier), 8);
  return found->second;
}

inline emulator::SharedBarrier& FindBarrier(uint32_t barrier) {
  return FindBarrier(barrier, *emulator::cta);
}

inline void EndPhase(emulator::SharedBarrier& b) {
  if (b.arrived < b.expected || b.bytes > 0) return;
  if (b.bytes < 0) emulator::Die("more bytes come to a barrier than it expects");
  b.arrived = 0;
  ++b.phase;
  emulator::races::Complete(b.handover);
  emulator::Wake(b.waiting);
}
inline void BarrierArrive(uint32_t barrier, emulator::Cta& of) {
  emulator::SharedBarrier& b = FindBarrier(barrier, of);
  emulator::races::Release(b.handover);
  if (++b.arrived > b.expected) emulator::Die("more arrivals at a barrier than it expects");
  EndPhase(b);
}
inline void BarrierArrive(uint32_t barrier) { BarrierArrive(barrier, *emulator::cta); }
inline void ArriveBytes(uint32_t barrier, int bytes, emulator::races::Event copy) {
  emulator::SharedBarrier& b = FindBarrier(barrier);
  emulator::races::Release(b.handover, copy);
  b.bytes -= bytes;
  EndPhase(b);
}

// What arrives when somebody waits for it.
inline void ArriveLate(uint32_t barrier, std::function<void()> arrive,
                       emulator::Cta& of = *emulator::cta) {
  emulator::SharedBarrier& b = FindBarrier(barrier, of);
  b.late.push_back(std::move(arrive));
  emulator::Wake(b.waiting);
}

inline void BarrierArriveAfterCopies(uint32_t barrier) {
  std::vector<emulator::Copy> copies;
  auto& groups = emulator::cta->groups[threadIdx.x];
  for (auto& group : groups) {
    copies.insert(copies.end(), group.begin(), group.end());
    group.clear();
  }
  const auto last = emulator::races::Latest(emulator::races::Engine::kCopies);
  ArriveLate(barrier, [=] {
    emulator::races::Release(FindBarrier(barrier).handover, last);
    for (const emulator::Copy& copy : copies) emulator::Finish(copy);
    BarrierArrive(barrier);
  });
}

inline void BarrierWait(uint32_t barrier, int parity) {
  emulator::SharedBarrier& b = FindBarrier(barrier);
  const unsigned asked = b.phase;
  while (b.phase % 2 == static_cast<unsigned>(parity)) {
    // It would wait for another phase than it asked for, or not, as luck has it.
    if (b.phase != asked) emulator::Die("a barrier ends two phases while a thread waits for one");
    if (b.late.empty()) {
      emulator::Sleep(b.waiting);
    } else {
      const auto late = std::move(b.late);
      b.late.clear();
      const emulator::races::Unseen unseen;
      for (const auto& arrive : late) arrive();
    }
  }
  emulator::races::Acquire(b.handover);
}

inline bool BarrierTest(uint32_t barrier, int parity) {
  emulator::SharedBarrier& b = FindBarrier(barrier);
  if (b.phase % 2 == static_cast<unsigned>(parity)) return false;
  emulator::races::Acquire(b.handover);
  return true;
}

inline emulator::Barrier& NamedBarrier(int id, int threads) {
  if (id < 1 || id > 15) emulator::Die("a hardware barrier that there is not");
  if (threads % emulator::kWarp) emulator::Die("a part of a warp at a hardware barrier");
  return emulator::cta->named[id];
}
inline void BarrierMeet(int id, int threads) { emulator::Wait(NamedBarrier(id, threads), threads); }

}  // namespace kvblock
