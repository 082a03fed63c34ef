// Picks the instance that serves a latent cache; IsLatentDims in host/paged_call.h has the same
// dims.
#pragma once

#include "kvblock/paged_attention.h"
#include "ops/attention/contract/instances.h"

namespace kvblock::generic {

template <typename Launch>
const char* ForLatentInstance(const kvblock_paged_attention& a, const Launch& launch) {
  AttentionCall call{};
  call.dtype = a.dtype;
  return a.head_dim == 576 ? ForType<576, 512>(call, launch) : ForType<192, 128>(call, launch);
}

}  // namespace kvblock::generic
