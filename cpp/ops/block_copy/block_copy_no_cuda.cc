// Stands in for block_copy_cuda.cu in a build without CUDA.
#include "kvblock/block_copy.h"

extern "C" int kvblock_has_cuda(void) { return 0; }

extern "C" const char* kvblock_copy_bytes_cuda(void*, const void*, int64_t, void*) {
  return "this build of jax_kvblock has no CUDA kernels; rebuild it where nvcc is on the PATH";
}

extern "C" const char* kvblock_copy_cuda(const kvblock_copy* copy, kvblock_backend, void*) {
  if (const char* error = kvblock_copy_check(copy)) return error;
  return "this build of jax_kvblock has no CUDA kernels; rebuild it where nvcc is on the PATH";
}
