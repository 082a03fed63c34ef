// Launches that begin before the one in front of them has ended (PTX griddepcontrol, sm_90 and
// newer; elsewhere they never do, and these do nothing).
#pragma once

namespace kvblock {

// Of the launch in front: the next one may begin where there is room for its CTAs, as soon as all
// of this one have said so or ended.
__device__ __forceinline__ void LetNextLaunchBegin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Of the next one: waits until all of the launch in front has ended, and sees what it wrote.
__device__ __forceinline__ void AwaitPriorLaunch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace kvblock
