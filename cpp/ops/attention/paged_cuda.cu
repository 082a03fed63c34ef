// The CUDA launcher of paged attention: checks, and hands the call to its kernels.
#include <cuda_runtime.h>

#include <cstdint>

#include "host/paged_call.h"
#include "kvblock/paged_attention.h"
#include "ops/attention/generic/latent/launcher.h"
#include "ops/attention/generic/paged/launcher.h"
#include "ops/attention/hopper/paged/launcher.h"

extern "C" const char* kvblock_paged_attention_forward(const kvblock_paged_attention* a,
                                                       void* stream) {
  if (const char* error = kvblock_paged_attention_check(a)) return error;
  if (a->calls == 0 || a->rows == 0) return nullptr;
  using namespace kvblock;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (a->values_in_keys) return generic::LaunchLatent(*a, cuda_stream);
  // Only the device knows the lengths: where some sequences may be long and others not, both
  // launch.
  const bool some = SomeMayBeLong(*a) && !RowsDiffer(*a) && hopper::ServesPaged(*a);
  const bool all = some && AllAreLong(*a);
  if (!all) {
    const int32_t most_rows = some ? PagedFewRows(*a) : INT32_MAX;
    if (const char* error = generic::LaunchPaged(*a, most_rows, cuda_stream)) return error;
  }
  return some ? hopper::LaunchPaged(*a, !all, cuda_stream) : nullptr;
}
