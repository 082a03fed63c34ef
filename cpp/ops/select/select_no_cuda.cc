// Stands in for select_cuda.cu and weigh_cuda.cu in a build without CUDA.
#include "kvblock/select.h"

namespace {

constexpr const char* kNoCuda =
    "this build of jax_kvblock has no CUDA kernels; rebuild it where nvcc is on the PATH";

}  // namespace

extern "C" const char* kvblock_pool_pieces_cuda(const kvblock_pool_pieces* a, void*) {
  const char* const error = kvblock_pool_pieces_check(a);
  return error != nullptr ? error : kNoCuda;
}

extern "C" const char* kvblock_weigh_tiles_cuda(const kvblock_weigh_tiles* a, void*) {
  const char* const error = kvblock_weigh_tiles_check(a);
  return error != nullptr ? error : kNoCuda;
}

extern "C" const char* kvblock_keep_tiles_cuda(const kvblock_keep_tiles* a, void*) {
  const char* const error = kvblock_keep_tiles_check(a);
  return error != nullptr ? error : kNoCuda;
}

extern "C" const char* kvblock_list_tiles_cuda(const kvblock_list_tiles* a, void*) {
  const char* const error = kvblock_list_tiles_check(a);
  return error != nullptr ? error : kNoCuda;
}
