// The generic instances that the emulator has: each takes a while to compile. The race checker has
// one.
#pragma once

#include <algorithm>

#include "host/message.h"
#include "ops/attention/contract/instances.h"

namespace kvblock::generic {

template <typename Launch>
const char* ForInstance(const AttentionCall& a, const Launch& launch) {
  const int dim = std::max(a.head_dim, a.value_dim);
#if KVBLOCK_CHECK_RACES
  if (dim <= 64 && a.dtype == KVBLOCK_BF16) return launch(Instance<__nv_bfloat16, 64>());
  return Message("the race checker has head dims up to 64, in bfloat16");
#endif
  if (dim <= 64) return ForType<64>(a, launch);
  if (dim <= 128 && a.dtype == KVBLOCK_BF16) return launch(Instance<__nv_bfloat16, 128>());
  if (dim > 192 && a.dtype == KVBLOCK_F16) return launch(Instance<__half, 256>());
  return Message("the emulator has head dims up to 64, in bfloat16 up to 128, and in float16 256");
}

}  // namespace kvblock::generic
