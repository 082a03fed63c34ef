#include "host/message.h"

#include <string>
#include <utility>

namespace kvblock {

const char* Message(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

}  // namespace kvblock
