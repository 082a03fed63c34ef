#include "host/attention_workspace.h"

#include <algorithm>

extern "C" int64_t kvblock_attention_workspace(const kvblock_attention* a, int32_t backward) {
  using namespace kvblock;
  if (a == nullptr) return 0;
  if (IsNarrow(*a)) return backward != 0 ? 0 : kTransposedAt + TransposedBytes(*a);
  if (backward != 0) return a->kernels == KVBLOCK_KERNELS_SM90 ? DqPlaces(*a).bytes : 0;
  if (SharesKeys(*a)) {
    const int64_t rows =
        std::max(a->q_len, int64_t{0}) * a->num_heads / std::max(a->num_kv_heads, 1);
    const int64_t floats = PieceFloats(kMostCtas, TileRows(rows), a->value_dim);
    return floats * static_cast<int64_t>(sizeof(float));
  }
  return a->kernels == KVBLOCK_KERNELS_SM90 && IsUneven(*a) ? kCounterBytes : 0;
}
