// Stands in for append_cuda.cu in a build without CUDA.
#include "kvblock/append.h"

extern "C" const char* kvblock_append_cuda(const kvblock_append* a, void*) {
  if (const char* error = kvblock_append_check(a)) return error;
  return "this build of jax_kvblock has no CUDA kernels; rebuild it where nvcc is on the PATH";
}
