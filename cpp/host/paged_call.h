// A call of paged attention: what the workspace and the launcher both say of it.
#ifndef KVBLOCK_HOST_PAGED_CALL_H_
#define KVBLOCK_HOST_PAGED_CALL_H_

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "host/attention_workspace.h"
#include "kvblock/paged_attention.h"

namespace kvblock {

// Packed rows (queries of all heads that share a key head) up to which a sequence has few queries.
// One with more is computed, where it can be, by a kernel that shares out queries instead of keys.
inline int32_t PagedFewRows(const kvblock_paged_attention& a) {
  constexpr int64_t kRows = 64, kQueries = 16;
  const int64_t group = a.num_heads / std::max(a.num_kv_heads, 1);
  return static_cast<int32_t>(std::min<int64_t>(std::max(kRows, kQueries * group), INT32_MAX));
}

// Packed rows that a sequence has on average: lengths lie on the device. Where that is more than
// `most_rows`, it is because of sequences that do not count, and the others are taken for short.
inline int64_t PagedMeanRows(const kvblock_paged_attention& a, int32_t most_rows = INT32_MAX) {
  const int64_t sequences = std::max(a.sequences, 1);
  const int64_t queries = (a.rows + sequences - 1) / sequences;
  const int64_t group = a.num_heads / std::max(a.num_kv_heads, 1), rows = queries * group;
  return rows > most_rows ? group : rows;
}

// Packed rows of a tile: as many as the sequences have on average, or where nothing may depend on
// other sequences, as a query has.
inline int32_t PagedTileRows(const kvblock_paged_attention& a, int32_t most_rows = INT32_MAX) {
  const int64_t group = a.num_heads / std::max(a.num_kv_heads, 1);
  const int32_t rows = TileRows(a.split_size > 0 ? group : PagedMeanRows(a, most_rows));
  return rows > 16 && a.cache_dtype >= KVBLOCK_E4M3 ? 64 : rows;  // fewer instances
}

// Whether two tiles of a sequence's packed rows make a unit of a latent cache, where the GPU has
// clusters of CTAs for it: such a unit's keys are loaded once (hopper/latent/). A query must have
// more than one tile, or sequences on average two: those with one tile take two CTAs then.
constexpr int32_t kPairedRows = 128;
inline bool PagedPairsTiles(const kvblock_paged_attention& a) {
  constexpr int64_t kTile = kPairedRows / 2;
  const int64_t group = a.num_heads / std::max(a.num_kv_heads, 1);
  const bool on_average =
      a.split_size == 0 && a.rows * group >= std::max(a.sequences, 1) * 2 * kTile;
  return a.values_in_keys && a.head_dim == 576 && (group > kTile || on_average);
}

// Tiles of so many packed rows, at the most: each sequence that has queries has one that is not
// full, and no query needs more than what its own rows do.
inline int64_t PagedTilesOfRows(const kvblock_paged_attention& a, int64_t tile,
                                int32_t most_rows = INT32_MAX) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  const int64_t some = std::min<int64_t>(a.sequences, a.rows);
  const int64_t together = (a.rows * group + some * (tile - 1)) / tile;
  const int64_t each = some * ((int64_t{most_rows} + tile - 1) / tile);
  return a.calls * std::min({together, each, a.rows * ((group + tile - 1) / tile)});
}

// Tiles of so many queries of the sequences with more than few rows, at the most.
inline int64_t PagedLongTiles(const kvblock_paged_attention& a, int64_t queries) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  const int64_t some = std::min<int64_t>(a.sequences, a.rows * group / (PagedFewRows(a) + 1));
  return some > 0 ? a.calls * ((a.rows + some * (queries - 1)) / queries) : 0;
}

// How many of the heads of a group are rows of one tile of those: a divisor, the largest that
// leaves at most a tenth of a tile's rows without a query, or the one that leaves the fewest.
inline int32_t HeadsOfTile(int32_t group, int32_t rows) {
  int32_t best = 1;
  for (int32_t heads = 1; heads <= std::min(group, rows); ++heads) {
    if (group % heads == 0 && rows / heads * heads * 10 >= rows * 9) best = heads;
  }
  return best;
}

// Whether rows see keys of their own. Then the kernel for few queries computes all of them.
inline bool RowsDiffer(const kvblock_paged_attention& a) {
  return a.ranges != nullptr || a.tree_mask != nullptr;
}

// What the host knows: some sequence may have more than few rows; all have. With no more queries
// than sequences all are taken for short: if some are not, others have none, and it takes no longer
// than a query for each. But where nothing may depend on other sequences, who computes must not.
inline bool SomeMayBeLong(const kvblock_paged_attention& a) {
  const bool more = a.rows > a.sequences || a.split_size > 0;
  return more && a.rows * (a.num_heads / a.num_kv_heads) > PagedFewRows(a);
}
inline bool AllAreLong(const kvblock_paged_attention& a) {
  return a.query_start == nullptr && a.q_lens == nullptr && SomeMayBeLong(a);
}

// Keys that the table has room for, and keys of a piece, where units are cut at multiples of these.
inline int64_t PagedKeysOfTable(const kvblock_paged_attention& a) {
  constexpr int64_t kMost = (int64_t{1} << 30) - 256;
  return std::min(int64_t{a.table_width} * a.block_size, kMost);
}
inline int64_t PagedSplitKeys(const kvblock_paged_attention& a) {
  constexpr int64_t kUnit = KVBLOCK_PAGED_SPLIT;
  return (a.split_size + kUnit - 1) / kUnit * kUnit;
}

// Places for the pieces of a call that is cut so, of units of so many packed rows: of all lines as
// schedule/shares.cuh has them, whatever the tiles are that its split counts.
inline int64_t PagedSplitPlaces(const kvblock_paged_attention& a, int32_t rows) {
  constexpr int64_t kUnit = KVBLOCK_PAGED_SPLIT;
  const int64_t heads = std::max(a.num_kv_heads, 1);
  const int64_t keys = (PagedKeysOfTable(a) + kUnit - 1) / kUnit * kUnit + kUnit;
  const int64_t most = PagedTilesOfRows(a, rows) * heads;
  return 2 * (most * keys / PagedSplitKeys(a) + heads);
}

// Rows of these places, whichever units the GPU makes it.
inline int64_t PagedSplitRows(const kvblock_paged_attention& a) {
  const auto of_units = [&](int32_t rows) { return PagedSplitPlaces(a, rows) * rows; };
  const int64_t rows = of_units(PagedTileRows(a));
  return PagedPairsTiles(a) ? std::max(rows, of_units(kPairedRows)) : rows;
}

// Items of Hopper's kernel, and its consumers, whose keys are shared out at the most
// (hopper/forward/pieces.cuh).
constexpr int32_t kMostLongPieces = 160, kLongConsumers = 2;

// The workspace: results of pieces, then what begins with 0 where two launches run side by side: a
// counter, a word each of Sharing (schedule/beside.cuh), which pieces are there, and how many have
// come of those of Hopper's kernel.
struct PagedCounters {
  unsigned next_tile;
  int32_t sharing[3];
  int32_t piece_there[2 * kMostCtas];
  int32_t arrived[kLongConsumers * kMostLongPieces];
};
inline int64_t PagedPieceBytes(const kvblock_paged_attention& a) {
  const int32_t rows = PagedTileRows(a);
  const int64_t floats = a.split_size > 0 ? PagedSplitRows(a) * (a.value_dim + int64_t{1})
                                          : PieceFloats(kMostCtas, rows, a.value_dim);
  return (floats * static_cast<int64_t>(sizeof(float)) + 15) / 16 * 16;
}
// Between these, pieces of Hopper's kernel, where it may have some. In bytes: of each consumer's
// 128 threads a float4 for eight columns, and one for what they are relative to.
inline int64_t LongPieceBytes(const kvblock_paged_attention& a) {
  const int64_t dim = std::max(a.head_dim, a.value_dim), columns = (dim + 63) / 64 * 64;
  const bool may = SomeMayBeLong(a) && a.split_size == 0 && a.cache_dtype < KVBLOCK_E4M3;
  constexpr int64_t kColumnBytes = 128 * 16;
  return may && columns <= 256 ? kMostLongPieces * kLongConsumers * (columns / 8 + 1) * kColumnBytes
                               : 0;
}
inline PagedCounters* CountersOf(const kvblock_paged_attention& a) {
  char* const workspace = static_cast<char*>(a.workspace);
  return reinterpret_cast<PagedCounters*>(workspace + PagedPieceBytes(a) + LongPieceBytes(a));
}

// Behind these, with narrow_queries, what the kernel in 8 bits reads, as
// hopper/forward/paged_params.cuh has it: V^T of all tables, queries, and their scales. In bytes.
inline int64_t PagedPaddedKeys(const kvblock_paged_attention& a) {
  return (PagedKeysOfTable(a) + 127) / 128 * 128;
}
// Rows of the queries: a tile of them more for each sequence.
constexpr int32_t kNarrowTileRows = 128;
inline int64_t PagedNarrowRows(const kvblock_paged_attention& a) {
  const int32_t group = a.num_heads / std::max(a.num_kv_heads, 1);
  const int32_t queries = kNarrowTileRows / std::max(HeadsOfTile(group, kNarrowTileRows), 1);
  return a.calls * (a.rows + int64_t{a.sequences} * queries);
}
struct NarrowPlaces {
  int64_t values, queries, scales, bytes;

  explicit NarrowPlaces(const kvblock_paged_attention& a) {
    constexpr int64_t kUnit = 128;
    const auto up = [](int64_t n) { return (n + kUnit - 1) / kUnit * kUnit; };
    const int64_t rows = a.calls * a.rows;
    const int32_t group = a.num_heads / std::max(a.num_kv_heads, 1);
    values = up(PagedPieceBytes(a) + static_cast<int64_t>(sizeof(PagedCounters)));
    queries =
        values + up(PagedPaddedKeys(a) * a.calls * a.sequences * a.num_kv_heads * a.value_dim);
    scales = queries + up(PagedNarrowRows(a) * a.num_heads * a.head_dim);
    bytes = scales + rows * (a.num_heads / std::max(HeadsOfTile(group, kNarrowTileRows), 1)) *
                         static_cast<int64_t>(sizeof(float));
  }
};

// Of a latent cache: what there are kernels for (generic/latent/instances.h).
inline bool IsLatentDims(int32_t head_dim, int32_t value_dim) {
  return (head_dim == 576 && value_dim == 512) || (head_dim == 192 && value_dim == 128);
}
inline kvblock_page_strides ValueStrides(const kvblock_paged_attention& a) {
  return a.values_in_keys ? a.k_strides : a.v_strides;
}

// The largest number of bytes that all strides are multiples of.
inline int64_t PageUnit(const kvblock_paged_attention& a) {
  int64_t unit = 0;
  for (const kvblock_page_strides& s : {a.k_strides, ValueStrides(a)}) {
    for (const int64_t stride : {s.block, s.token, s.head}) unit = std::gcd(unit, stride);
  }
  return std::clamp<int64_t>(unit, 1, INT32_MAX);
}

}  // namespace kvblock

#endif  // KVBLOCK_HOST_PAGED_CALL_H_
