// Picks the generic instance that serves a call.
#pragma once

#include <algorithm>

#include "ops/attention/contract/instances.h"

namespace kvblock::generic {

// Calls launch with the smallest instance that holds head_dim and value_dim.
template <typename Launch>
const char* ForInstance(const AttentionCall& a, const Launch& launch) {
  const int dim = std::max(a.head_dim, a.value_dim);
  if (dim <= 64) return ForType<64>(a, launch);
  if (dim <= 128) return ForType<128>(a, launch);
  if (dim <= 192) return ForType<192>(a, launch);
  return ForType<256>(a, launch);
}

}  // namespace kvblock::generic
