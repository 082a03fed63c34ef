// Stands in for the CUDA launchers in a build without CUDA: they check, and launch nothing.
#include "kvblock/attention.h"

namespace {

const char* Refuse(const kvblock_attention* a, kvblock_attention_pass pass) {
  if (const char* error = kvblock_attention_check(a, pass)) return error;
  return "this build of jax_kvblock has no CUDA kernels; rebuild it where nvcc is on the PATH";
}

}  // namespace

extern "C" const char* kvblock_attention_forward(const kvblock_attention* a, void*) {
  return Refuse(a, KVBLOCK_FORWARD);
}
extern "C" const char* kvblock_attention_forward_split(const kvblock_attention* a, void*, void*) {
  return Refuse(a, KVBLOCK_FORWARD_SPLIT);
}
extern "C" const char* kvblock_attention_backward_kv(const kvblock_attention* a, void*) {
  return Refuse(a, KVBLOCK_BACKWARD_KV);
}
extern "C" const char* kvblock_attention_backward_q(const kvblock_attention* a, void*) {
  return Refuse(a, KVBLOCK_BACKWARD_Q);
}
extern "C" const char* kvblock_attention_backward_bias(const kvblock_attention* a, void*) {
  return Refuse(a, KVBLOCK_BACKWARD_BIAS);
}
