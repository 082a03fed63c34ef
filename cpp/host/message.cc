#include "host/message.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

namespace kvblock {

const char* Message(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

std::string Got(const std::string& what, int64_t value) {
  return what + ", got " + std::to_string(value);
}

bool Misaligned(std::initializer_list<const void*> arrays, uintptr_t bytes) {
  return std::any_of(arrays.begin(), arrays.end(), [&](const void* array) {
    return reinterpret_cast<uintptr_t>(array) % bytes != 0;
  });
}

}  // namespace kvblock
