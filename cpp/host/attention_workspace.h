// What a call does with a workspace, how large that is, and what lies where in it.
#ifndef KVBLOCK_HOST_ATTENTION_WORKSPACE_H_
#define KVBLOCK_HOST_ATTENTION_WORKSPACE_H_

#include <algorithm>
#include <cstdint>

#include "kvblock/attention.h"

namespace kvblock {

// Queries of a sequence up to which the keys are shared out over the GPU, instead of the queries.
#ifndef KVBLOCK_MOST_FEW_QUERIES
#define KVBLOCK_MOST_FEW_QUERIES 16
#endif

// Whether elements are of 8 bits, of a call or an array.
template <typename T>
bool IsNarrow(const T& a) {
  return a.dtype == KVBLOCK_E4M3 || a.dtype == KVBLOCK_I8;
}

// Whether a call goes to the kernels for few queries, if it has a workspace. Call has the members
// of kvblock_attention.
template <typename Call>
bool SharesKeys(const Call& a) {
  return a.q_len <= KVBLOCK_MOST_FEW_QUERIES && !a.bias && !a.tile_indices && !a.cu_q &&
         !a.dropout_keys && a.dtype != KVBLOCK_F32 && !IsNarrow(a);
}

// Whether only the device knows how much work each tile of queries is. Then Hopper's kernel hands
// out tiles by a counter, if it has a workspace.
template <typename Call>
bool IsUneven(const Call& a) {
  return a.cu_q || a.q_lens || a.kv_lens || a.q_segments || a.tile_indices;
}

// Where a forward call of 8 bits has V transposed (hopper/forward/transpose_values.cuh), behind the
// counter: rows of so many keys.
constexpr int64_t kCounterBytes = 16, kTransposedAt = 128;
template <typename Call>
int64_t TransposedKeys(const Call& a) {
  return (a.kv_len + 127) / 128 * 128;
}
template <typename Call>
int64_t TransposedBytes(const Call& a) {
  return TransposedKeys(a) * a.batch * a.num_kv_heads * a.value_dim;
}

// CTAs that a launch for few queries has at the most. The workspace is for so many, whatever the
// GPU: a program may be compiled where there is none.
constexpr int32_t kMostCtas = 320;

// Packed rows (queries of all heads that share a key head) in a tile, for so many.
inline int32_t TileRows(int64_t rows) { return rows <= 16 ? 16 : rows <= 32 ? 32 : 64; }

// Floats of what the pieces of so many CTAs come to, and a word for each that tells it is there.
inline int64_t PieceFloats(int32_t ctas, int32_t rows, int32_t value_dim) {
  return 2 * static_cast<int64_t>(ctas) * (rows * (value_dim + int64_t{1}) + 1);
}

// What the sm_90a kernels sum up dq in: tiles of 64 queries of a head (hopper/backward/dq_tile.cuh
// says what is in one).
constexpr int kDqRows = 64;
constexpr int kDqCounters = 2;         // of a tile: who adds first (hopper/backward/dq_state.cuh)
constexpr int64_t kDqAlignment = 128;  // bytes, of a lane's sums

// KV heads whose queries' dq is summed up in one launch. Sums in float32 are twice as large as q,
// so large ones are of few heads at a time: launches go in kDqLanes lanes, each of which has its
// own memory for sums, so that one lane's launch fills the multiprocessors that the last thread
// blocks of the other's leave. A launch has as few heads as fill a GPU for about two milliseconds
// (without a mask), counted in tiles of 128 keys and in steps of 64 queries on such a tile; of tile
// lists twice as many tiles, since thread blocks differ in length and a launch waits for its
// longest. Sums of up to 128 MiB are of all heads, and so are those that would take as much memory
// in lanes. A divisor of all KV heads.
#ifndef KVBLOCK_DQ_FRACTION  // tests on a CPU have small calls
#define KVBLOCK_DQ_FRACTION 1
#endif
constexpr int kDqLanes = 2;
constexpr int64_t kDqTileKeys = 128, kLeastDqTiles = 128 / KVBLOCK_DQ_FRACTION,
                  kLeastDqSteps = (int64_t{1} << 17) / KVBLOCK_DQ_FRACTION;
constexpr int64_t kSmallDqBytes = (int64_t{128} << 20) / KVBLOCK_DQ_FRACTION;
template <typename Call>
int32_t DqKvHeads(const Call& a) {
  const int64_t members = a.cu_q ? 1 : a.batch;
  if (members * a.q_len * a.num_heads * a.head_dim * 4 <= kSmallDqBytes) return a.num_kv_heads;
  const int64_t tiles = (a.kv_len + kDqTileKeys - 1) / kDqTileKeys * members;
  const int64_t queries = a.cu_q ? a.q_len / std::max<int64_t>(a.batch, 1) : a.q_len;
  const int64_t group = a.num_heads / std::max(a.num_kv_heads, 1);
  const int64_t steps = tiles * group * ((queries + kDqRows - 1) / kDqRows);
  const int64_t least_tiles = a.tile_indices != nullptr ? 2 * kLeastDqTiles : kLeastDqTiles;
  const auto suffice = [&](int64_t heads) {
    return heads * tiles >= least_tiles && heads * steps >= kLeastDqSteps;
  };
  int32_t heads = 1;
  while (heads < a.num_kv_heads && (a.num_kv_heads % heads != 0 || !suffice(heads))) ++heads;
  return heads * kDqLanes < a.num_kv_heads ? heads : a.num_kv_heads;
}

// Tiles of one head.
template <typename Call>
#if defined(__CUDACC__)
__host__ __device__
#endif
    inline int64_t DqTiles(const Call& a) {
  return a.cu_q != nullptr ? (a.q_len + int64_t{kDqRows} * a.batch) / kDqRows
                           : (a.q_len + kDqRows - 1) / kDqRows;
}

// Where the parts of a lane lie, in bytes: the sums from 0 on, then each tile's counters, then
// whose turn it is. Lanes lie one after the other.
struct DqPlaces {
  int64_t state, turns, lane_bytes, bytes;

  template <typename Call>
  explicit DqPlaces(const Call& a) {
    const int64_t members = a.cu_q != nullptr ? 1 : a.batch;
    const int64_t heads = a.num_heads / std::max(a.num_kv_heads, 1) * int64_t{DqKvHeads(a)};
    const int64_t tiles = members * heads * DqTiles(a);
    state = tiles * kDqRows * a.head_dim * int64_t{sizeof(float)};
    turns = state + tiles * kDqCounters * int64_t{sizeof(int32_t)};
    const int64_t end = turns + tiles * int64_t{sizeof(int32_t)};
    lane_bytes = (end + kDqAlignment - 1) / kDqAlignment * kDqAlignment;
    bytes = DqKvHeads(a) < a.num_kv_heads ? kDqLanes * lane_bytes : end;
  }
};

}  // namespace kvblock

#endif  // KVBLOCK_HOST_ATTENTION_WORKSPACE_H_
