// The inner loops of block_copy on the CPU: one box of runs, all inside one pair of buffers.
#ifndef KVBLOCK_OPS_BLOCK_COPY_BLOCK_COPY_CPU_BOX_H_
#define KVBLOCK_OPS_BLOCK_COPY_BLOCK_COPY_CPU_BOX_H_

#include <cstdint>

namespace kvblock {

// `count` steps, and by how many bytes each moves the source and the destination.
struct BoxDim {
  int64_t count = 1, src = 0, dst = 0;
};

struct Box {
  static constexpr int kDims = 3;
  BoxDim dims[kDims];  // outermost first
  int64_t bytes = 0;   // of a run
};

using CopyBox = void (*)(const Box& box, const char* src, char* dst);

// The loops for runs of `bytes`. `alignment` divides the address and length of every run of the
// destination. `stream` asks for stores past the cache, where runs are whole cache lines.
CopyBox ChooseCopyBox(int64_t bytes, int64_t alignment, bool stream);

void ZeroBox(const Box& box, char* dst);

}  // namespace kvblock

#endif  // KVBLOCK_OPS_BLOCK_COPY_BLOCK_COPY_CPU_BOX_H_
