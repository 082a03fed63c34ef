// The messages that the C interface returns, and what its checks share.
#ifndef KVBLOCK_HOST_MESSAGE_H_
#define KVBLOCK_HOST_MESSAGE_H_

#include <cstdint>
#include <initializer_list>
#include <string>

namespace kvblock {

// Keeps a message alive until this thread's next call, as the C interface promises.
const char* Message(std::string text);

// What was expected, and the number that came.
std::string Got(const std::string& what, int64_t value);

// Whether one of these addresses is no multiple of so many bytes; NULL is one of any.
bool Misaligned(std::initializer_list<const void*> arrays, uintptr_t bytes);

}  // namespace kvblock

#endif  // KVBLOCK_HOST_MESSAGE_H_
