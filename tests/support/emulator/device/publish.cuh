// Telling other CTAs that something lies in memory. Launches run one after the other, so it is
// there when somebody waits for it, or never.
#pragma once

#include <cstdint>

#include "cuda_runtime.h"

namespace kvblock {

inline void Withdraw(int32_t* flag) { *flag = 0; }
inline void Publish(int32_t* flag) { *flag = 1; }
inline void AwaitPublished(const int32_t* flag) {
  if (*flag != 1) emulator::Die("what this thread waits for was never published");
}

}  // namespace kvblock
