// The emulator has no clusters: a CTA is alone.
#pragma once

#include "cuda_runtime.h"

namespace kvblock {

inline int ClusterRank() { return 0; }
inline void ClusterMeet() { emulator::Die("a cluster"); }
inline void ClusterBarrierArrive(uint32_t, int) { emulator::Die("a cluster"); }

}  // namespace kvblock
