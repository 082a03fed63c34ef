// The instances for latent caches that the emulator has: each takes a while to compile.
#pragma once

#include "host/message.h"
#include "kvblock/paged_attention.h"
#include "ops/attention/contract/instances.h"

namespace kvblock::generic {

template <typename Launch>
const char* ForLatentInstance(const kvblock_paged_attention& a, const Launch& launch) {
  if (a.head_dim == 576 && a.dtype == KVBLOCK_BF16) {
    return launch(Instance<__nv_bfloat16, 576, 512>());
  }
  if (a.head_dim == 192 && a.dtype == KVBLOCK_F16) return launch(Instance<__half, 192, 128>());
  return Message("the emulator has latent caches of head dim 576 in bfloat16, 192 in float16");
}

}  // namespace kvblock::generic
