// Stands in for the CUDA launchers in a build without CUDA.
#include "kvblock/attention.h"

namespace {
constexpr char kMissing[] =
    "this build of jax_kvblock has no CUDA kernels; rebuild it where nvcc is on the PATH";
}  // namespace

extern "C" const char* kvblock_attention_forward(const kvblock_attention*, void*) {
  return kMissing;
}
extern "C" const char* kvblock_attention_backward_kv(const kvblock_attention*, void*) {
  return kMissing;
}
extern "C" const char* kvblock_attention_backward_q(const kvblock_attention*, void*) {
  return kMissing;
}
extern "C" const char* kvblock_attention_backward_bias(const kvblock_attention*, void*) {
  return kMissing;
}
