// How a call of few queries is launched: which CTAs, and how many.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/attention_workspace.h"
#include "ops/attention/schedule/shares.cuh"

namespace kvblock::generic {

// The work of a call, as the host knows it. Lengths lie on the device: there may be less.
struct SplitWork {
  int32_t rows;    // of a tile of packed rows
  int64_t filled;  // of these, those that there are, about
  int64_t units;   // tiles of rows of all members and key heads, at the most
  bool same_keys;  // all members have as many keys, as far as the host knows
  bool alike;      // all units have as many KV tiles
};

inline SplitWork WorkOf(const AttentionCall& a) {
  const int64_t rows = a.q_len * (a.num_heads / a.num_kv_heads);
  const int32_t tile = TileRows(rows);
  const int64_t row_tiles = (rows + tile - 1) / tile;
  const bool alike = row_tiles == 1 && !a.kv_lens && !a.q_lens && !a.shift;
  return {tile, std::min<int64_t>(tile, rows), a.batch * row_tiles * a.num_kv_heads, !a.kv_lens,
          alike};
}

// One that sees nothing has a tile, too.
inline int64_t TilesOfUnit(int64_t keys, int64_t tile) {
  return std::max<int64_t>((keys + tile - 1) / tile, 1);
}

// How a launch is cut: lines, and the CTAs of each (schedule/shares.cuh).
struct Cut {
  int32_t lines, ctas;
  int64_t units;  // of a line
  bool combines;  // some unit may be cut between CTAs
};

// For units of so many KV tiles, at most `places` CTAs. As many heads side by side as there can be
// without leaving many places empty. Then all places, but if a few fewer give each unit the same
// number of CTAs, or each CTA the same number of units: then fewer are cut.
inline Cut CutFor(const SplitWork& work, int32_t heads, int64_t tiles_of_unit, int64_t places) {
  int64_t lines = 1;
  for (int64_t some = 2; some <= std::min<int64_t>(heads, places); ++some) {
    if (heads % some == 0 && places / some * some * 100 >= places * 96) lines = some;
  }
  const int64_t units = work.units / lines, most = places / lines;
  const auto cut = [&](int64_t ctas) {
    const bool whole = ctas <= 1 || (work.alike && units % ctas == 0);
    return Cut{static_cast<int32_t>(lines), static_cast<int32_t>(ctas), units, !whole};
  };
  if (units * tiles_of_unit <= most) return cut(units * tiles_of_unit);
  if (!work.same_keys) return cut(most);
  const int64_t each = (units + most - 1) / most;  // units of a CTA
  const int64_t even = units <= most ? most / units * units : units / each;
  const bool fits = units <= most || units % each == 0;
  return cut(fits && even * 100 >= most * 94 ? even : most);
}

// How many threads share out the pieces of a row: each has five at most, if units are alike. Where
// lengths differ, a unit may have more, and its threads more rounds.
inline int32_t ThreadsThatJoin(int64_t units, int32_t ctas) {
  const int64_t pieces = ctas / std::max<int64_t>(units, 1) + 2;
  return pieces < 6 ? 1 : pieces < 12 ? 2 : pieces < 24 ? 4 : 8;
}

inline ShareParams MakeShareParams(const AttentionCall& a, const SplitWork& work, const Cut& cut) {
  ShareParams p{};
  static_cast<AttentionParams&>(p) = MakeAttentionParams(a);
  p.rows = work.rows;
  p.by_group = FastDiv(static_cast<uint32_t>(p.group));
  p.alike = work.alike;
  p.split = kNoSplit;
  p.lines = cut.lines;
  p.heads = p.num_kv_heads / cut.lines;
  p.by_lines = FastDiv(static_cast<uint32_t>(cut.lines));
  p.ctas = cut.ctas;
  p.ctas_inverse = static_cast<uint32_t>(((int64_t{1} << 32) + cut.ctas - 1) / cut.ctas);
  p.combine_units = cut.units < cut.ctas;
  p.joining = ThreadsThatJoin(cut.units, cut.ctas);
  float* const pieces = static_cast<float*>(a.workspace);
  p.piece_o = pieces;
  const int64_t places = 2 * int64_t{cut.lines} * cut.ctas * p.rows;
  p.piece_lse = pieces + places * a.value_dim;
  p.piece_there = reinterpret_cast<int32_t*>(p.piece_lse + places);
  return p;
}

}  // namespace kvblock::generic
