// The CUDA launchers of lists of tiles: check, fill in the parameters, launch.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "host/message.h"
#include "kvblock/select.h"
#include "ops/select/select_kernel.cuh"

namespace kvblock {
namespace {

// Columns of a thread, in rows up to so long and in longer ones.
constexpr int kFew = 8, kMany = 16;
constexpr int64_t kMostOfFew = int64_t{kFew} * kSelectMostThreads;
static_assert(int64_t{kMany} * kSelectMostThreads >= KVBLOCK_MOST_COLUMNS);

template <typename Params>
const char* Launch(const char* where, void (*kernel)(Params), const Params& params, int64_t rows,
                   int each, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(rows));
  const int warps = (params.columns + 32 * each - 1) / (32 * each);
  config.blockDim = dim3(static_cast<unsigned>(32 * (warps == 0 ? 1 : warps)));
  config.stream = stream;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, params);
  if (status == cudaSuccess) return nullptr;
  return Message(std::string(where) + ": " + cudaGetErrorString(status));
}

}  // namespace
}  // namespace kvblock

extern "C" const char* kvblock_keep_cuda(const kvblock_keep* a, void* stream) {
  using namespace kvblock;
  if (const char* error = kvblock_keep_check(a)) return error;
  if (a->rows == 0 || a->columns == 0) return nullptr;
  KeepParams p{};
  p.scores = a->scores;
  p.states = a->states;
  p.limits = a->limits;
  p.kept = a->kept;
  p.masses = a->masses;
  p.tau = a->tau;
  p.columns = static_cast<int32_t>(a->columns);
  const bool few = a->columns <= kMostOfFew, mass = a->tau > 0.0f;
  const auto kernel = few ? (mass ? Keep<kFew, true> : Keep<kFew, false>)
                          : (mass ? Keep<kMany, true> : Keep<kMany, false>);
  return Launch("keep", kernel, p, a->rows, few ? kFew : kMany, static_cast<cudaStream_t>(stream));
}

extern "C" const char* kvblock_lists_cuda(const kvblock_lists* a, void* stream) {
  using namespace kvblock;
  if (const char* error = kvblock_lists_check(a)) return error;
  if (a->rows == 0) return nullptr;
  ListsParams p{};
  p.map = a->map;
  p.indices = a->indices;
  p.counts = a->counts;
  p.columns = static_cast<int32_t>(a->columns);
  p.width = static_cast<int32_t>(a->width);
  const bool few = a->columns <= kMostOfFew;
  return Launch("lists", few ? Lists<kFew> : Lists<kMany>, p, a->rows, few ? kFew : kMany,
                static_cast<cudaStream_t>(stream));
}
