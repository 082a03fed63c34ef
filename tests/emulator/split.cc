// The attention kernels for few queries, run by the emulator.
#include <string>
#include <vector>

#include "cuda_runtime.h"
#include "ops/attention/combine/combine.cuh"
#include "ops/attention/generic/split/kernel.cuh"
#include "ops/attention/generic/split/plan.h"

namespace {

using namespace kvblock;
using namespace kvblock::generic;

template <typename T, int kDim, int kTileBlocks>
void Run(const ShareParams& p) {
  using Traits = SplitTraits<T, kDim, kTileBlocks>;
  static_assert(Traits::kSharedBytes <= emulator::kSharedBytes);
  emulator::Launch(p.ctas, 1, Traits::kThreads, [&] { AttentionSplit<T, kDim, kTileBlocks>(p); });
  if (p.ctas == 1) return;
  constexpr int kThreads = 64;
  emulator::Launch(p.ctas - 1, p.rows, kThreads,
                   [&] { AttentionCombine<T, Traits::kTileKeys, kThreads>(p); });
}

template <typename T, int kDim>
void RunDim(const ShareParams& p) {
  if (p.rows == 16) return Run<T, kDim, 1>(p);
  if (p.rows == 32) return Run<T, kDim, 2>(p);
  Run<T, kDim, 4>(p);
}

template <typename T>
void RunType(const ShareParams& p) {
  const int dim = max(p.head_dim, p.value_dim);
  if (dim <= 64) return RunDim<T, 64>(p);
  if (dim <= 128) return RunDim<T, 128>(p);
  if (dim <= 192) return RunDim<T, 192>(p);
  RunDim<T, 256>(p);
}

}  // namespace

// Computes o and lse with so many CTAs.
extern "C" void emulate_split(const kvblock_attention* a, int32_t ctas) {
  const ShareParams sizes = MakeShareParams(*a, ctas, nullptr);
  std::vector<float> pieces(PieceFloats(ctas, sizes.rows, a->value_dim), NAN);
  const ShareParams p = MakeShareParams(*a, ctas, pieces.data());
  if (a->dtype == KVBLOCK_BF16) {
    RunType<__nv_bfloat16>(p);
  } else {
    RunType<__half>(p);
  }
}
