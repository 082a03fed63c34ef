// What copies of strips check before they touch anything, and the copy on the CPU.
#include "host/copy_stream_check.h"

#include <cstring>
#include <string>

#include "host/message.h"

namespace kvblock {
namespace {

char* Moved(void* address, int64_t bytes) { return static_cast<char*>(address) + bytes; }
const char* Moved(const void* address, int64_t bytes) {
  return static_cast<const char*>(address) + bytes;
}

std::string CheckStrip(const kvblock_strip& strip) {
  if (strip.to == nullptr) return "to is NULL";
  if (strip.from == nullptr) return "from is NULL";
  if (strip.bytes < 1) return Got("bytes must be at least 1", strip.bytes);
  if (strip.rows < 1) return Got("rows must be at least 1", strip.rows);
  if (strip.rows == 1) return "";
  const struct {
    const char* name;
    int64_t pitch;
  } sides[] = {{"to_pitch", strip.to_pitch}, {"from_pitch", strip.from_pitch}};
  for (const auto& side : sides) {
    if (side.pitch < strip.bytes || side.pitch > INT32_MAX) {
      return Got(std::string(side.name) + " must be from bytes (" + std::to_string(strip.bytes) +
                     ") to 2^31 - 1",
                 side.pitch);
    }
  }
  if (strip.rows > INT64_MAX / INT32_MAX) return Got("rows must be below 2^32", strip.rows);
  return "";
}

// Rows without gaps on either side are one row.
kvblock_strip Flat(kvblock_strip strip) {
  if (strip.rows > 1 && strip.to_pitch == strip.bytes && strip.from_pitch == strip.bytes) {
    strip.bytes *= strip.rows;
    strip.rows = 1;
  }
  return strip;
}

// Takes `next` into `last` where it goes on there.
bool Continue(kvblock_strip& last, const kvblock_strip& next) {
  if (last.rows == 1 && next.rows == 1) {
    if (Moved(last.to, last.bytes) != next.to) return false;
    if (Moved(last.from, last.bytes) != next.from) return false;
    last.bytes += next.bytes;
    return true;
  }
  const bool alike = last.rows > 1 && next.rows > 1 && last.bytes == next.bytes &&
                     last.to_pitch == next.to_pitch && last.from_pitch == next.from_pitch;
  if (!alike) return false;
  if (Moved(last.to, last.rows * last.to_pitch) != next.to) return false;
  if (Moved(last.from, last.rows * last.from_pitch) != next.from) return false;
  last.rows += next.rows;
  return true;
}

}  // namespace

std::vector<kvblock_strip> JoinStrips(const kvblock_strip* strips, int64_t count) {
  std::vector<kvblock_strip> joined;
  for (int64_t i = 0; i < count; ++i) {
    const kvblock_strip strip = Flat(strips[i]);
    if (joined.empty() || !Continue(joined.back(), strip)) joined.push_back(strip);
  }
  return joined;
}

}  // namespace kvblock

extern "C" const char* kvblock_strips_check(const kvblock_strip* strips, int64_t count) {
  using namespace kvblock;
  if (count < 0) return Message(Got("strips: count must be at least 0", count));
  if (count > 0 && strips == nullptr) return Message("strips: strips is NULL");
  for (int64_t i = 0; i < count; ++i) {
    const std::string error = CheckStrip(strips[i]);
    if (!error.empty()) return Message("strips: strip " + std::to_string(i) + ": " + error);
  }
  return nullptr;
}

extern "C" const char* kvblock_strips_copy_cpu(const kvblock_strip* strips, int64_t count) {
  using namespace kvblock;
  if (const char* error = kvblock_strips_check(strips, count)) return error;
  for (const kvblock_strip& strip : JoinStrips(strips, count)) {
    for (int64_t i = 0; i < strip.rows; ++i) {
      std::memcpy(Moved(strip.to, i * strip.to_pitch), Moved(strip.from, i * strip.from_pitch),
                  strip.bytes);
    }
  }
  return nullptr;
}
