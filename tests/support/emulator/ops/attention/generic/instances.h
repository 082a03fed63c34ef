// The generic instances that the emulator has: each takes a while to compile. The race checker has
// one.
#pragma once

#include <algorithm>
#include <type_traits>

#include "device/tf32.cuh"
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
  if (dim > 128 && a.dtype == KVBLOCK_F16) return launch(Instance<__half, 256>());
  return Message("the emulator has head dims up to 64, in bfloat16 up to 128, in float16 others");
}

// Those of float32 are a library of their own (float32.cc), all of them but the race checker's.
template <int kWidest, typename Launch>
const char* ForAnyInstance(const AttentionCall& a, const Launch& launch) {
#if KVBLOCK_EMULATES_FLOAT32
  const auto of = [&](auto dim) -> const char* {
    constexpr int kDim = decltype(dim)::value;
#if KVBLOCK_CHECK_RACES
    if (kDim <= 128) return launch(Instance<Tf32, kDim <= 128 ? kDim : 128>());
    return Message("the race checker has head dims up to 128, in TF32");
#endif
    if (a.dtype != KVBLOCK_F32) return "float32 alone is emulated here";
    return a.precision == KVBLOCK_PRECISION_DEFAULT ? launch(Instance<Tf32, kDim>())
                                                    : launch(Instance<Tf32x3, kDim>());
  };
  const int dim = std::max(a.head_dim, a.value_dim);
  if (dim <= 64) return of(std::integral_constant<int, 64>());
  if (dim <= 128 || kWidest == 128) return of(std::integral_constant<int, 128>());
  return of(std::integral_constant<int, kWidest>());
#else
  if (a.dtype != KVBLOCK_F32) return ForInstance(a, launch);
  return "float32 is emulated by float32.cc";
#endif
}

}  // namespace kvblock::generic
