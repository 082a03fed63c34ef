#include "host/attention_split.h"

#include <algorithm>

#include "kvblock/attention.h"

extern "C" int64_t kvblock_attention_workspace(int64_t q_len, int32_t num_heads,
                                               int32_t num_kv_heads, int32_t value_dim) {
  using namespace kvblock;
  const int64_t rows = std::min(q_len, int64_t{64}) * (num_heads / std::max(num_kv_heads, 1));
  return PieceFloats(kMostCtas, TileRows(rows), value_dim) * static_cast<int64_t>(sizeof(float));
}
