// What copies of strips share on every platform: their checks, and which strips are one.
#ifndef KVBLOCK_HOST_COPY_STREAM_CHECK_H_
#define KVBLOCK_HOST_COPY_STREAM_CHECK_H_

#include <cstdint>
#include <vector>

#include "kvblock/copy_stream.h"

namespace kvblock {

// The same copy in fewer strips: those that continue each other on both sides are one.
std::vector<kvblock_strip> JoinStrips(const kvblock_strip* strips, int64_t count);

}  // namespace kvblock

#endif  // KVBLOCK_HOST_COPY_STREAM_CHECK_H_
