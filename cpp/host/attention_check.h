// What the attention launchers check on the host before they launch.
#ifndef KVBLOCK_HOST_ATTENTION_CHECK_H_
#define KVBLOCK_HOST_ATTENTION_CHECK_H_

#include "kvblock/attention.h"

namespace kvblock {

enum class AttentionPass { kForward, kBackwardKv, kBackwardQ, kBackwardBias };

// NULL, or what is wrong with `a`: sizes, options that do not go together, missing operands and
// outputs of this pass. What lies in device memory is not looked at; the kernels trust none of it.
const char* CheckAttention(const kvblock_attention* a, AttentionPass pass);

}  // namespace kvblock

#endif  // KVBLOCK_HOST_ATTENTION_CHECK_H_
