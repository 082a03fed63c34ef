// What the launchers that choose tiles check before they launch.
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>

#include "host/message.h"
#include "kvblock/select.h"

namespace kvblock {
namespace {

std::string Check(const kvblock_pool_pieces& a) {
  if (a.dtype < KVBLOCK_PIECES_BF16 || a.dtype > KVBLOCK_PIECES_F32) {
    return Got("dtype must be KVBLOCK_PIECES_BF16, F16 or F32", a.dtype);
  }
  if (a.rounded != 0 && a.rounded != 1) return Got("rounded must be 0 or 1", a.rounded);
  if (a.side < 1) return Got("side must be at least 1", a.side);
  const struct {
    const char* name;
    int64_t size;
  } axes[] = {
      {"members", a.members}, {"length", a.length}, {"width", a.width}, {"pieces", a.pieces}};
  for (const auto& axis : axes) {
    if (axis.size < 0 || axis.size > INT32_MAX) {
      return Got(std::string(axis.name) + " must be from 0 to 2^31 - 1", axis.size);
    }
  }
  const int64_t of_piece = a.dtype == KVBLOCK_PIECES_F32 ? 4 : 8;
  if (a.width % of_piece != 0 || a.width > 1 << 24) {
    return Got("width must be a multiple of " + std::to_string(of_piece) + " up to 2^24", a.width);
  }
  const int64_t lanes = a.normed / of_piece;
  if (a.normed < 0 || a.normed % of_piece != 0 || lanes > 32 || (lanes & (lanes - 1)) != 0 ||
      (lanes != 0 && a.width % a.normed != 0)) {
    return Got("normed must be 0, or 1, 2, 4, 8, 16 or 32 times " + std::to_string(of_piece) +
                   " and divide the width",
               a.normed);
  }
  if (a.members * a.pieces > INT32_MAX || a.pieces * a.side > 1 << 30) {
    return "there must be fewer than 2^31 pieces, and 2^30 rows of a member's at most";
  }
  if (a.members * a.pieces * a.width == 0) return "";
  if (a.x == nullptr && a.length != 0) return "x is NULL";
  if (a.means == nullptr) return "means is NULL";
  if ((a.largest == nullptr) != (a.smallest == nullptr)) {
    return "one of largest and smallest is NULL, and the other is not";
  }
  if (Misaligned({a.x, a.means, a.largest, a.smallest}, 16)) {
    return "x, means, largest and smallest must be aligned to 16 bytes";
  }
  if (a.normed != 0 && (a.largest != nullptr || a.rounded != 0)) {
    return "largest and smallest must be NULL, and rounded 0, where normed is not 0";
  }
  if (Misaligned({a.ends}, 4)) return "ends must be aligned to 4 bytes";
  return "";
}

bool IsPowerOfTwo(int32_t x) { return x > 0 && (x & (x - 1)) == 0; }

std::string Check(const kvblock_weigh_tiles& a) {
  if (a.dtype != KVBLOCK_PIECES_BF16 && a.dtype != KVBLOCK_PIECES_F16) {
    return Got("dtype must be KVBLOCK_PIECES_BF16 or F16", a.dtype);
  }
  for (const auto& [name, pieces] :
       {std::pair{"q_pieces", a.q_pieces}, std::pair{"kv_pieces", a.kv_pieces}}) {
    if (!IsPowerOfTwo(pieces) || pieces > KVBLOCK_MOST_PIECES) {
      return Got(std::string(name) + " must be a power of two up to KVBLOCK_MOST_PIECES, 32",
                 pieces);
    }
  }
  if (!std::isfinite(a.scale)) return "scale must be finite";
  for (const auto& [name, size] : {std::pair{"members", a.members}, std::pair{"heads", a.heads},
                                   std::pair{"kv_heads", a.kv_heads}, std::pair{"rows", a.rows}}) {
    if (size < 0 || size > INT32_MAX) {
      return Got(std::string(name) + " must be from 0 to 2^31 - 1", size);
    }
  }
  if (a.columns < 0 || a.columns > 1 << 24) {
    return Got("columns must be from 0 to 2^24", a.columns);
  }
  if (a.dim < 1 || a.dim % 8 != 0 || a.dim > KVBLOCK_MOST_PIECE_DIM) {
    return Got("dim must be a multiple of 8 up to KVBLOCK_MOST_PIECE_DIM, 256", a.dim);
  }
  if (a.members == 0 || a.heads == 0 || a.rows == 0 || a.columns == 0) return "";
  if (a.kv_heads == 0 || a.heads % a.kv_heads != 0) {
    return Got("kv_heads must divide heads, " + std::to_string(a.heads), a.kv_heads);
  }
  if (a.rows * a.heads > INT32_MAX / KVBLOCK_MOST_PIECES ||
      a.members * a.rows * a.heads > INT32_MAX) {
    return "there must be fewer than 2^26 rows of tiles of all heads, and 2^31 of all members";
  }
  if (a.queries == nullptr) return "queries is NULL";
  if (a.keys == nullptr) return "keys is NULL";
  if (a.bounds == nullptr) return "bounds is NULL";
  if (a.shares == nullptr) return "shares is NULL";
  if ((a.q_ranges == nullptr) != (a.kv_ranges == nullptr)) {
    return "one of q_ranges and kv_ranges is NULL, and the other is not";
  }
  if ((a.places == nullptr) != (a.distance == nullptr) ||
      (a.places == nullptr) != (a.first == nullptr)) {
    return "some of places, distance and first are NULL, and others are not";
  }
  if (Misaligned({a.queries, a.keys}, 16)) {
    return "queries and keys must be aligned to 16 bytes";
  }
  if (Misaligned({a.bounds, a.q_ranges, a.kv_ranges}, 8)) {
    return "bounds and ranges must be aligned to 8 bytes";
  }
  if (Misaligned({a.factors, a.places, a.distance, a.first, a.shares}, 4)) {
    return "factors, places, distance, first and shares must be aligned to 4 bytes";
  }
  return "";
}

std::string CheckMap(int64_t rows, int64_t columns) {
  if (rows < 0 || rows > INT32_MAX) return Got("rows must be from 0 to 2^31 - 1", rows);
  if (columns < 0 || columns > KVBLOCK_MOST_COLUMNS) {
    return Got("columns must be from 0 to KVBLOCK_MOST_COLUMNS, 16384", columns);
  }
  return "";
}

std::string Check(const kvblock_keep_tiles& a) {
  std::string error = CheckMap(a.rows, a.columns);
  if (!error.empty()) return error;
  if (!(a.tau >= 0.0f && a.tau <= 1.0f)) return "tau must be from 0 to 1";
  if (a.rows == 0 || a.columns == 0) return "";
  if (a.scores == nullptr) return "scores is NULL";
  if (a.states == nullptr) return "states is NULL";
  if (a.limits == nullptr) return "limits is NULL";
  if (a.kept == nullptr) return "kept is NULL";
  if (a.tau > 0.0f && a.masses == nullptr) return "masses is NULL, and tau is not 0";
  if (Misaligned({a.scores, a.limits, a.masses}, 4)) {
    return "scores, limits and masses must be aligned to 4 bytes";
  }
  return "";
}

std::string Check(const kvblock_list_tiles& a) {
  std::string error = CheckMap(a.rows, a.columns);
  if (!error.empty()) return error;
  if (a.width < 1 || a.width > INT32_MAX) return Got("width must be from 1 to 2^31 - 1", a.width);
  if (a.rows == 0) return "";
  if (a.map == nullptr && a.columns != 0) return "map is NULL";
  if (a.indices == nullptr) return "indices is NULL";
  if (a.counts == nullptr) return "counts is NULL";
  if (Misaligned({a.indices, a.counts}, 4)) return "indices and counts must be aligned to 4 bytes";
  return "";
}

template <typename Call>
const char* Said(const std::string& where, const Call* a) {
  const std::string error = a == nullptr ? "the struct is NULL" : Check(*a);
  return error.empty() ? nullptr : Message(where + ": " + error);
}

}  // namespace
}  // namespace kvblock

extern "C" const char* kvblock_pool_pieces_check(const kvblock_pool_pieces* a) {
  return kvblock::Said("pool_pieces", a);
}

extern "C" const char* kvblock_weigh_tiles_check(const kvblock_weigh_tiles* a) {
  return kvblock::Said("weigh_tiles", a);
}

extern "C" const char* kvblock_keep_tiles_check(const kvblock_keep_tiles* a) {
  return kvblock::Said("keep_tiles", a);
}

extern "C" const char* kvblock_list_tiles_check(const kvblock_list_tiles* a) {
  return kvblock::Said("list_tiles", a);
}
