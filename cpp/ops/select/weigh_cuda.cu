// The CUDA launcher of tiles' shares: check, fill in the parameters, launch.
#include <cuda_runtime.h>

#include <cstdint>

#include "kvblock/select.h"
#include "ops/select/launch.cuh"
#include "ops/select/weigh_kernel.cuh"

namespace kvblock {
namespace {

int LogOf(int32_t power_of_two) {
  int log = 0;
  while (1 << log < power_of_two) ++log;
  return log;
}

template <typename Traits>
const char* LaunchAs(const WeighTilesParams& p, void* stream) {
  const int64_t units = int64_t{p.rows} * p.group, of_cta = Traits::kRows >> p.down;
  const int64_t blocks = (units + of_cta - 1) / of_cta * p.pairs;
  return Launch("weigh_tiles", WeighTiles<Traits>, p, dim3(static_cast<unsigned>(blocks)),
                Traits::kThreads, stream, Traits::kSharedBytes);
}

// By the bytes of a piece, with zeros behind its own.
template <typename T, bool kNear>
const char* LaunchOf(const WeighTilesParams& p, void* stream) {
  if (p.dim <= 64) return LaunchAs<WeighTraits<T, 128, kNear>>(p, stream);
  if (p.dim <= 128) return LaunchAs<WeighTraits<T, 256, kNear>>(p, stream);
  return LaunchAs<WeighTraits<T, 512, kNear>>(p, stream);
}

template <typename T>
const char* LaunchOf(const WeighTilesParams& p, void* stream) {
  return p.distance != nullptr ? LaunchOf<T, true>(p, stream) : LaunchOf<T, false>(p, stream);
}

}  // namespace
}  // namespace kvblock

extern "C" const char* kvblock_weigh_tiles_cuda(const kvblock_weigh_tiles* a, void* stream) {
  using namespace kvblock;
  if (const char* error = kvblock_weigh_tiles_check(a)) return error;
  if (a->members == 0 || a->heads == 0 || a->rows == 0 || a->columns == 0) return nullptr;
  WeighTilesParams p{};
  p.queries = a->queries;
  p.keys = a->keys;
  p.factors = a->factors;
  p.bounds = a->bounds;
  p.q_ranges = a->q_ranges;
  p.kv_ranges = a->kv_ranges;
  p.places = a->places;
  p.distance = a->distance;
  p.first = a->first;
  p.shares = a->shares;
  p.heads = static_cast<int32_t>(a->heads);
  p.kv_heads = static_cast<int32_t>(a->kv_heads);
  p.group = static_cast<int32_t>(a->heads / a->kv_heads);
  p.pairs = static_cast<int32_t>(a->members * a->kv_heads);
  p.dim = static_cast<int32_t>(a->dim);
  p.rows = static_cast<int32_t>(a->rows);
  p.columns = static_cast<int32_t>(a->columns);
  p.down = LogOf(a->q_pieces);
  p.across = LogOf(a->kv_pieces);
  p.scale = a->scale * kLog2E;
  return a->dtype == KVBLOCK_PIECES_BF16 ? LaunchOf<__nv_bfloat16>(p, stream)
                                         : LaunchOf<__half>(p, stream);
}
