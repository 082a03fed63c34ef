// Picks the generic instance that serves a call.
#pragma once

#include <algorithm>
#include <type_traits>

#include "device/tf32.cuh"
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

// The same with float32, whose instances are 64, 128 and, where kWidest is so much, 256.
template <int kWidest, typename Launch>
const char* ForAnyInstance(const AttentionCall& a, const Launch& launch) {
  if (a.dtype != KVBLOCK_F32) return ForInstance(a, launch);
  const auto of = [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    return a.precision == KVBLOCK_PRECISION_DEFAULT ? launch(Instance<Tf32, kDim>())
                                                    : launch(Instance<Tf32x3, kDim>());
  };
  const int dim = std::max(a.head_dim, a.value_dim);
  if (dim <= 64) return of(std::integral_constant<int, 64>());
  if (dim <= 128 || kWidest == 128) return of(std::integral_constant<int, 128>());
  return of(std::integral_constant<int, kWidest>());
}

}  // namespace kvblock::generic
