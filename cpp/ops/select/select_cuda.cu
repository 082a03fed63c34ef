// The CUDA launchers that choose tiles: check, fill in the parameters, launch.
#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>

#include "host/message.h"
#include "kvblock/select.h"
#include "ops/select/launch.cuh"
#include "ops/select/pool_kernel.cuh"
#include "ops/select/select_kernel.cuh"

namespace kvblock {
namespace {

SelectSides SidesOf(int64_t columns, std::initializer_list<const void*> arrays) {
  return {static_cast<int32_t>(columns), columns % kSelectEach == 0 && !Misaligned(arrays, 16)};
}

// A CTA for each row.
template <typename Params>
const char* LaunchRows(const char* where, void (*kernel)(Params), const Params& params,
                       int64_t rows, void* stream) {
  constexpr int kOfWarp = 32 * kSelectEach;
  const int warps = (params.sides.columns + kOfWarp - 1) / kOfWarp;
  return Launch(where, kernel, params, dim3(static_cast<unsigned>(rows)),
                32 * (warps == 0 ? 1 : warps), stream);
}

template <typename T>
const char* LaunchPoolPieces(const kvblock_pool_pieces& a, void* stream) {
  PoolPiecesParams p{};
  p.x = a.x;
  p.ends = a.ends;
  p.means = a.means;
  p.largest = a.largest;
  p.smallest = a.smallest;
  p.length = static_cast<int32_t>(a.length);
  p.width = static_cast<int32_t>(a.width);
  p.side = a.side;
  p.rounded = a.rounded != 0;
  p.normed = a.normed;
  p.pieces = static_cast<int32_t>(a.pieces);
  constexpr int kOfCta = kPoolThreads * kPoolColumns<T>;
  const dim3 grid(static_cast<unsigned>(a.members * a.pieces),
                  static_cast<unsigned>((a.width + kOfCta - 1) / kOfCta));
  const auto kernel = a.normed != 0          ? PoolPieces<T, Pooled::kNormed>
                      : a.largest != nullptr ? PoolPieces<T, Pooled::kExtremes>
                                             : PoolPieces<T, Pooled::kMeans>;
  return Launch("pool_pieces", kernel, p, grid, kPoolThreads, stream);
}

}  // namespace
}  // namespace kvblock

extern "C" const char* kvblock_pool_pieces_cuda(const kvblock_pool_pieces* a, void* stream) {
  using namespace kvblock;
  if (const char* error = kvblock_pool_pieces_check(a)) return error;
  if (a->members * a->pieces * a->width == 0) return nullptr;
  switch (a->dtype) {
    case KVBLOCK_PIECES_BF16: return LaunchPoolPieces<__nv_bfloat16>(*a, stream);
    case KVBLOCK_PIECES_F16: return LaunchPoolPieces<__half>(*a, stream);
    default: return LaunchPoolPieces<float>(*a, stream);
  }
}

extern "C" const char* kvblock_keep_tiles_cuda(const kvblock_keep_tiles* a, void* stream) {
  using namespace kvblock;
  if (const char* error = kvblock_keep_tiles_check(a)) return error;
  if (a->rows == 0 || a->columns == 0) return nullptr;
  KeepTilesParams p{};
  p.scores = a->scores;
  p.states = a->states;
  p.limits = a->limits;
  p.kept = a->kept;
  p.masses = a->masses;
  p.tau = a->tau;
  p.sides = SidesOf(a->columns, {a->scores, a->states, a->kept});
  const auto kernel = a->tau > 0.0f ? KeepTiles<true> : KeepTiles<false>;
  return LaunchRows("keep_tiles", kernel, p, a->rows, stream);
}

extern "C" const char* kvblock_list_tiles_cuda(const kvblock_list_tiles* a, void* stream) {
  using namespace kvblock;
  if (const char* error = kvblock_list_tiles_check(a)) return error;
  if (a->rows == 0) return nullptr;
  ListTilesParams p{};
  p.map = a->map;
  p.indices = a->indices;
  p.counts = a->counts;
  p.sides = SidesOf(a->columns, {a->map});
  p.width = static_cast<int32_t>(a->width);
  return LaunchRows("list_tiles", ListTiles, p, a->rows, stream);
}
