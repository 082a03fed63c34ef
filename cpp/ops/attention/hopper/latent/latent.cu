// Which latent caches Hopper's kernel serves, and by which instance.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <numeric>

#include "host/paged_call.h"
#include "ops/attention/contract/head_array.h"
#include "ops/attention/hopper/current_gpu.h"
#include "ops/attention/hopper/latent/launcher.h"
#include "ops/attention/hopper/tensor_map.h"

namespace kvblock::hopper {
namespace {

// Boxes of rows of a block: a tile is some of them, and they are multiples of what swizzles repeat
// after. Coordinates are (column, row of a block, block, layer).
bool MakeBlockMap(const kvblock_paged_attention& a, LatentMaps* maps) {
  constexpr int kSwizzledRows = 8;
  constexpr int64_t kMostStride = int64_t{1} << 40;
  maps->box_rows = std::gcd(a.block_size, kLatentTileKeys);
  if (maps->box_rows % kSwizzledRows != 0 || a.num_arrays != 1 || a.num_blocks == 0) return false;
  // Of one there is no next.
  const auto stride = [](int64_t size, int64_t bytes) { return size == 1 ? 16 : bytes; };
  const int64_t rows = stride(a.block_size, a.k_strides.token);
  const int64_t blocks = stride(a.num_blocks, a.k_strides.block);
  const int64_t layers = stride(a.num_layers, a.layer_stride);
  for (const int64_t bytes : {rows, blocks, layers}) {
    if (bytes <= 0 || bytes >= kMostStride) return false;
  }
  // There is one key head: rows of a block take the place of heads.
  const HeadArray keys = {a.k[0],     a.dtype, a.num_layers, a.num_blocks, a.block_size,
                          a.head_dim, layers,  blocks,       rows};
  return MakeTensorMap(keys, 1, &maps->k, maps->box_rows) == nullptr;
}

}  // namespace

bool ServesLatent(const kvblock_paged_attention& a, int32_t rows, LatentMaps* maps) {
  constexpr int kTileRows = 64;
  // Packed rows of all sequences, one after the other.
  const int64_t all_rows = a.calls * a.rows * a.num_heads;
  if (rows <= 16 || rows > kTileRows || a.head_dim != 576 || RowsDiffer(a)) return false;
  if (a.softcap > 0.0f || !(a.scale > 0.0f) || all_rows > INT32_MAX) return false;
  if (!OnHopper() || !MakeBlockMap(a, maps)) return false;
  const HeadArray q = DenseHeads(a.q, a.dtype, 1, all_rows, 1, a.head_dim);
  return MakeTensorMap(q, kTileRows, &maps->q) == nullptr;
}

cudaError_t LaunchLatentShares(const PagedParams& p, const LatentMaps& maps, unsigned shares,
                               cudaStream_t stream) {
  return p.dtype == KVBLOCK_BF16
             ? LaunchLatentSharesOf<__nv_bfloat16, 576, 512>(p, maps, shares, stream)
             : LaunchLatentSharesOf<__half, 576, 512>(p, maps, shares, stream);
}

}  // namespace kvblock::hopper
