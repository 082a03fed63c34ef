// Stands in for select_cuda.cu in a build without CUDA.
#include "kvblock/select.h"

namespace {

constexpr const char* kNoCuda =
    "this build of jax_kvblock has no CUDA kernels; rebuild it where nvcc is on the PATH";

}  // namespace

extern "C" const char* kvblock_pool_cuda(const kvblock_pool* a, void*) {
  const char* const error = kvblock_pool_check(a);
  return error != nullptr ? error : kNoCuda;
}

extern "C" const char* kvblock_keep_cuda(const kvblock_keep* a, void*) {
  const char* const error = kvblock_keep_check(a);
  return error != nullptr ? error : kNoCuda;
}

extern "C" const char* kvblock_lists_cuda(const kvblock_lists* a, void*) {
  const char* const error = kvblock_lists_check(a);
  return error != nullptr ? error : kNoCuda;
}
