// Stands in for the CUDA launchers in a build without CUDA: they check, and launch nothing.
#include "kvblock/attention.h"

namespace {

const char* Refuse(const char* error) {
  if (error != nullptr) return error;
  return "this build of jax_kvblock has no CUDA kernels; rebuild it where nvcc is on the PATH";
}

}  // namespace

extern "C" const char* kvblock_attention_forward(const kvblock_forward* a, void*) {
  return Refuse(kvblock_attention_check_forward(a));
}
extern "C" const char* kvblock_attention_backward_kv(const kvblock_backward* a, void*) {
  return Refuse(kvblock_attention_check_backward(a, KVBLOCK_BACKWARD_KV));
}
extern "C" const char* kvblock_attention_backward_q(const kvblock_backward* a, void*) {
  return Refuse(kvblock_attention_check_backward(a, KVBLOCK_BACKWARD_Q));
}
extern "C" const char* kvblock_attention_backward_bias(const kvblock_backward* a, void*) {
  return Refuse(kvblock_attention_check_backward(a, KVBLOCK_BACKWARD_BIAS));
}
