// Stands in for cast_cuda.cu in a build without CUDA.
#include "kvblock/cast.h"

extern "C" const char* kvblock_cast_cuda(const kvblock_cast* a, void*) {
  if (const char* error = kvblock_cast_check(a)) return error;
  return "this build of jax_kvblock has no CUDA kernels; rebuild it where nvcc is on the PATH";
}
