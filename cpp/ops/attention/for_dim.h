// Picks the instance that serves a head dim.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kvblock/attention.h"

namespace kvblock {

// Calls launch with the smallest padded head dim, as a type, that holds head_dim and value_dim.
template <typename Launch>
const char* ForDim(const kvblock_attention& a, const Launch& launch) {
  const int dim = std::max(a.head_dim, a.value_dim);
  if (dim <= 64) return launch(std::integral_constant<int, 64>());
  if (dim <= 128) return launch(std::integral_constant<int, 128>());
  if (dim <= 192) return launch(std::integral_constant<int, 192>());
  return launch(std::integral_constant<int, 256>());
}

}  // namespace kvblock
