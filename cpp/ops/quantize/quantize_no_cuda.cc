// Stands in for quantize_cuda.cu in a build without CUDA.
#include "kvblock/quantize.h"

extern "C" const char* kvblock_quantize_cuda(const kvblock_quantize* a, void*) {
  if (const char* error = kvblock_quantize_check(a)) return error;
  return "this build of jax_kvblock has no CUDA kernels; rebuild it where nvcc is on the PATH";
}
