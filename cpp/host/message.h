// The messages that the C interface returns.
#ifndef KVBLOCK_HOST_MESSAGE_H_
#define KVBLOCK_HOST_MESSAGE_H_

#include <string>

namespace kvblock {

// Keeps a message alive until this thread's next call, as the C interface promises.
const char* Message(std::string text);

}  // namespace kvblock

#endif  // KVBLOCK_HOST_MESSAGE_H_
