// Dynamic shared memory of the emulator.
#pragma once

#include "cuda_runtime.h"

namespace kvblock {

inline char* DynamicShared() { return emulator::shared; }

template <typename T>
T& DynamicSharedAs() {
  return *reinterpret_cast<T*>(emulator::shared);
}

}  // namespace kvblock
