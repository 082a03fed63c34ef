// How a call of few queries is launched: which CTAs, and how many.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/attention_workspace.h"
#include "ops/attention/schedule/shares.cuh"

namespace kvblock::generic {

// The work of a call, as the host knows it. Lengths lie on the device: there may be less.
struct SplitWork {
  int64_t row_tiles;  // of a member and key head
  int64_t units;      // tiles of rows of all members and key heads
  bool same_keys;     // all members have as many keys
  bool alike;         // all units have as many KV tiles
};

inline SplitWork WorkOf(const AttentionCall& a) {
  const int64_t rows = a.q_len * (a.num_heads / a.num_kv_heads), tile = TileRows(rows);
  const int64_t row_tiles = (rows + tile - 1) / tile;
  const bool alike = row_tiles == 1 && !a.kv_lens && !a.q_lens && !a.shift;
  return {row_tiles, a.batch * row_tiles * a.num_kv_heads, !a.kv_lens, alike};
}

// CTAs for units of so many KV tiles, at most `places`. All places, but if a few fewer give each
// unit the same number of CTAs, or each CTA the same number of units: then fewer are cut.
inline int32_t CtasFor(const SplitWork& work, int64_t tiles_of_unit, int64_t places) {
  const int64_t units = work.units;
  if (units * tiles_of_unit <= places) return static_cast<int32_t>(units * tiles_of_unit);
  if (!work.same_keys) return static_cast<int32_t>(places);
  const int64_t each = (units + places - 1) / places;  // units of a CTA
  const int64_t even = units <= places ? places / units * units : units / each;
  const bool fits = units <= places || units % each == 0;
  return static_cast<int32_t>(fits && even * 100 >= places * 94 ? even : places);
}

// Whether no unit is cut between CTAs, for certain.
inline bool NoneIsCut(const SplitWork& work, int32_t ctas) {
  return ctas <= 1 || (work.alike && work.units % ctas == 0);
}

// How many threads share out the pieces of a row: each has five at most, if units are alike. Where
// lengths differ, a unit may have more, and its threads more rounds.
inline int32_t ThreadsThatJoin(int64_t units, int32_t ctas) {
  const int64_t pieces = ctas / std::max<int64_t>(units, 1) + 2;
  return pieces < 6 ? 1 : pieces < 12 ? 2 : pieces < 24 ? 4 : 8;
}

inline ShareParams MakeShareParams(const AttentionCall& a, const SplitWork& work, int32_t ctas) {
  ShareParams p{};
  static_cast<AttentionParams&>(p) = MakeAttentionParams(a);
  p.rows = TileRows(a.q_len * p.group);
  p.row_tiles = static_cast<int32_t>(work.row_tiles);
  p.alike = work.alike;
  p.ctas = ctas;
  p.ctas_inverse = static_cast<uint32_t>(((int64_t{1} << 32) + ctas - 1) / ctas);
  p.combine_units = work.units < ctas;
  p.joining = ThreadsThatJoin(work.units, ctas);
  float* const pieces = static_cast<float*>(a.workspace);
  p.piece_o = pieces;
  p.piece_lse = pieces + 2 * static_cast<int64_t>(ctas) * p.rows * a.value_dim;
  p.piece_there = reinterpret_cast<int32_t*>(p.piece_lse + 2 * static_cast<int64_t>(ctas) * p.rows);
  return p;
}

}  // namespace kvblock::generic
