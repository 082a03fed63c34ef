// What the launchers of lists of tiles check before they launch.
#include <cstdint>
#include <string>

#include "host/message.h"
#include "kvblock/select.h"

namespace kvblock {
namespace {

std::string CheckMap(int64_t rows, int64_t columns) {
  if (rows < 0 || rows > INT32_MAX) return Got("rows must be from 0 to 2^31 - 1", rows);
  if (columns < 0 || columns > KVBLOCK_MOST_COLUMNS) {
    return Got("columns must be from 0 to KVBLOCK_MOST_COLUMNS, 16384", columns);
  }
  return "";
}

std::string Check(const kvblock_keep& a) {
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

std::string Check(const kvblock_lists& a) {
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

extern "C" const char* kvblock_keep_check(const kvblock_keep* a) {
  return kvblock::Said("keep", a);
}

extern "C" const char* kvblock_lists_check(const kvblock_lists* a) {
  return kvblock::Said("lists", a);
}
