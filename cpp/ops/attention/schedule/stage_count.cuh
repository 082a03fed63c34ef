// Tiles travel through stages of shared memory, one after the other and round again.
#pragma once

namespace kvblock {

// A count of tiles that have gone through the stages: which stage is next, and in which phase.
template <int kStages>
struct StageCount {
  int stage = 0, phase = 0;
  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ StageCount After() const {
    StageCount next = *this;
    next.Advance();
    return next;
  }
  __device__ __forceinline__ StageCount Before() const {
    return stage == 0 ? StageCount{kStages - 1, phase ^ 1} : StageCount{stage - 1, phase};
  }
};

}  // namespace kvblock
