// Stands in for the CUDA launcher of paged attention in a build without CUDA: it checks, and
// launches nothing.
#include "kvblock/paged_attention.h"

extern "C" const char* kvblock_paged_attention_forward(const kvblock_paged_attention* a, void*) {
  if (const char* error = kvblock_paged_attention_check(a)) return error;
  return "this build of jax_kvblock has no CUDA kernels; rebuild it where nvcc is on the PATH";
}
