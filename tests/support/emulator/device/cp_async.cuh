// Asynchronous copies for the emulator. They arrive when they are waited for, not earlier: until
// then the place holds NaN.
#pragma once

#include "cuda_runtime.h"

namespace kvblock {

inline void StartCopy(char* to, const void* from, int size, bool valid) {
  if (reinterpret_cast<uintptr_t>(to) % size || (valid && reinterpret_cast<uintptr_t>(from) % size))
    emulator::Die("a copy is not aligned");
  using namespace emulator::races;
  Start(Engine::kCopies, Access::kWrite, to, size);
  const Unseen unseen;
  std::memset(to, 0xff, size);
  emulator::cta->groups[threadIdx.x].back().push_back(
      {to, static_cast<const char*>(from), valid ? size : 0, valid ? 0 : size});
}

template <int kBytes>
inline void CopyAsync(void* to_shared, const void* from) {
  StartCopy(static_cast<char*>(to_shared), from, kBytes, from != nullptr);
}
inline void CopyAsync16(uint32_t to_shared, const void* from, bool valid) {
  StartCopy(emulator::SharedPointer(to_shared), from, 16, valid);
}
inline const char* StepFrom(const char* from, uint32_t index, uint32_t bytes) {
  return from + static_cast<uint64_t>(index) * bytes;
}
inline uint64_t ReadOnce() { return 0; }
inline void CopyAsync16(uint32_t to_shared, const void* from, bool valid, uint64_t) {
  CopyAsync16(to_shared, from, valid);
}
inline void PrefetchToL2(const void*) {}
inline void CopyAsyncCommit() {
  emulator::cta->groups[threadIdx.x].emplace_back();
  emulator::races::Commit(emulator::races::Engine::kCopies);
}

template <int kPending>
inline void CopyAsyncWait() {
  emulator::races::Await(emulator::races::Engine::kCopies, kPending);
  const emulator::races::Unseen unseen;
  auto& groups = emulator::cta->groups[threadIdx.x];
  while (groups.size() > kPending + 1) {
    for (const emulator::Copy& copy : groups.front()) emulator::Finish(copy);
    groups.erase(groups.begin());
  }
}

}  // namespace kvblock
