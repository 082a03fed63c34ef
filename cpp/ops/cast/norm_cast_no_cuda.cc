// Stands in for norm_cast_cuda.cu in a build without CUDA, or without 90a among its architectures.
#include "kvblock/norm_cast.h"

extern "C" const char* kvblock_norm_cast_cuda(const kvblock_norm_cast* a, void*) {
  if (const char* error = kvblock_norm_cast_check(a)) return error;
  return "this build of jax_kvblock has no sm_90a kernels; rebuild it where nvcc is on the PATH, "
         "with 90a among CUDA_ARCHS";
}
