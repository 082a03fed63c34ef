// Dynamic shared memory of the emulator.
#pragma once

#include "cuda_runtime.h"

namespace kvblock {

inline char* DynamicShared() { return emulator::shared; }

template <typename T>
T& DynamicSharedAs() {
  return *reinterpret_cast<T*>(emulator::shared);
}

template <size_t kWords>
void LoadShared(uint32_t (&r)[kWords], uint32_t address) {
  if (address % sizeof(r)) emulator::Die("a load from shared memory is not aligned");
  std::memcpy(r, emulator::SharedPointer(address), sizeof(r));
}

}  // namespace kvblock
