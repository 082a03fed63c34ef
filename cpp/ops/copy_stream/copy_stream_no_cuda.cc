// Stands in for copy_stream_cuda.cu in a build without CUDA.
#include "kvblock/copy_stream.h"

namespace {
constexpr char kMissing[] =
    "this build of jax_kvblock has no CUDA kernels; rebuild it where nvcc is on the PATH";
}  // namespace

extern "C" const char* kvblock_copy_stream_open(int, kvblock_copy_stream**) { return kMissing; }

extern "C" const char* kvblock_copy_stream_close(kvblock_copy_stream*) { return kMissing; }

extern "C" const char* kvblock_copy_stream_start(kvblock_copy_stream*, const kvblock_strip* strips,
                                                 int64_t count, kvblock_copy_mark**) {
  if (const char* error = kvblock_strips_check(strips, count)) return error;
  return kMissing;
}

extern "C" const char* kvblock_copy_mark_done(kvblock_copy_mark*, int*) { return kMissing; }

extern "C" const char* kvblock_copy_mark_wait(kvblock_copy_mark*) { return kMissing; }

extern "C" const char* kvblock_copy_mark_free(kvblock_copy_mark*) { return kMissing; }
