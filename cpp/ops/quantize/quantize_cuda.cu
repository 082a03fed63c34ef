// The CUDA launcher of quantization: check, plan the launches, fill in their parameters, launch.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "host/message.h"
#include "host/quantize_parts.h"
#include "kvblock/quantize.h"
#include "ops/quantize/quantize_kernel.cuh"

namespace kvblock {
namespace {

bool SharesMore(const kvblock_quantize_array& a) { return a.shared != KVBLOCK_QUANTIZE_BLOCK; }
bool AsItIs(const kvblock_quantize_array& a) { return a.mean == nullptr && !a.turns; }

// What is found of an array before it is written. Sums and largest sizes of rows as they are come
// of one launch, the largest sizes of what is computed first of a second one, with those of rows as
// they are, unless there is the first.
struct QuantizePlan {
  bool parts = false, tiles = false;  // the launches in front

  explicit QuantizePlan(const kvblock_quantize& call) {
    bool largest = false;
    for (int i = 0; i < call.num_arrays; ++i) {
      const kvblock_quantize_array& a = call.arrays[i];
      parts = parts || a.mean != nullptr;
      tiles = tiles || (SharesMore(a) && !AsItIs(a));
      largest = largest || (SharesMore(a) && AsItIs(a));
    }
    parts = parts || (largest && !tiles);
  }
  bool InParts(const kvblock_quantize_array& a) const {
    return parts && (a.mean != nullptr || (SharesMore(a) && AsItIs(a)));
  }
  bool InTiles(const kvblock_quantize_array& a) const {
    return tiles && SharesMore(a) && !(parts && AsItIs(a));
  }
};

// Where the parts of an array lie in the workspace. Moves `workspace` behind them.
void FillIn(const kvblock_quantize& call, const kvblock_quantize_array& from, float** workspace,
            QuantizeArray* to) {
  const auto take = [&](int64_t numbers) {
    float* const here = *workspace;
    *workspace += numbers;
    return numbers > 0 ? here : nullptr;
  };
  to->x = static_cast<const char*>(from.x);
  to->out = static_cast<char*>(from.out);
  to->scales = from.scales;
  to->mean = from.mean;
  to->lens = from.lens;
  to->sums = take(QuantizeSumCount(call, from));
  to->turned = from.turns ? take(QuantizeSumCount(call, from)) : nullptr;
  to->largest = take(QuantizeLargestCount(call, from));
  to->batch_stride = from.batch_stride;
  to->row_stride = static_cast<uint32_t>(from.row_stride);
  to->head_stride = from.head_stride;
  to->out_batch_stride = from.out_batch_stride;
  to->out_row_stride = static_cast<uint32_t>(from.out_row_stride);
  to->out_head_stride = from.out_head_stride;
  to->rows = static_cast<int32_t>(from.rows);
  to->heads = from.heads;
  to->dim = from.dim;
  to->blocks = static_cast<int32_t>(QuantizeBlockCount(from));
  to->parts = static_cast<int32_t>(QuantizePartCount(from));
  to->part_blocks = static_cast<int32_t>(QuantizePartBlocks(from));
  to->shared = from.shared;
  to->turns = from.turns != 0;
  to->integers = from.integers != 0;
}

// Some of a call's arrays, and their CTAs.
struct QuantizeLaunch {
  QuantizeParams p{};
  int arrays = 0, ctas = 0;

  void Add(const kvblock_quantize& call, const QuantizeArray& a, bool parts) {
    const int pieces = parts ? a.parts : a.blocks;
    ctas += static_cast<int>(call.batch) * a.heads * pieces;
    QuantizeArray& added = p.arrays[arrays++];
    added = a;
    added.end = ctas;
    added.of_heads = FastDiv(static_cast<uint32_t>(a.heads));
    added.of_pieces = FastDiv(static_cast<uint32_t>(pieces));
  }
  const char* Run(void (*kernel)(QuantizeParams), cudaStream_t stream) const {
    if (ctas == 0) return nullptr;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(ctas));
    config.blockDim = dim3(kQuantizeThreads);
    config.stream = stream;
    const cudaError_t status = cudaLaunchKernelEx(&config, kernel, p);
    if (status == cudaSuccess) return nullptr;
    return Message(std::string("quantize: ") + cudaGetErrorString(status));
  }
};

template <typename T, bool kWrites>
const char* RunTiles(const QuantizeLaunch& launch, int dim, cudaStream_t stream) {
  switch (dim) {
    case 16: return launch.Run(QuantizeTiles<T, 16, kWrites>, stream);
    case 32: return launch.Run(QuantizeTiles<T, 32, kWrites>, stream);
    case 48: return launch.Run(QuantizeTiles<T, 48, kWrites>, stream);
    case 64: return launch.Run(QuantizeTiles<T, 64, kWrites>, stream);
    case 80: return launch.Run(QuantizeTiles<T, 80, kWrites>, stream);
    case 96: return launch.Run(QuantizeTiles<T, 96, kWrites>, stream);
    case 112: return launch.Run(QuantizeTiles<T, 112, kWrites>, stream);
    default: return launch.Run(QuantizeTiles<T, 128, kWrites>, stream);
  }
}

template <typename T>
const char* Launch(const kvblock_quantize& call, cudaStream_t stream) {
  QuantizeArray arrays[KVBLOCK_QUANTIZE_MAX_ARRAYS] = {};
  float* workspace = static_cast<float*>(call.workspace);
  for (int i = 0; i < call.num_arrays; ++i) FillIn(call, call.arrays[i], &workspace, &arrays[i]);
  const QuantizePlan plan(call);

  QuantizeLaunch in_front;
  for (int i = 0; i < call.num_arrays; ++i) {
    if (plan.InParts(call.arrays[i])) in_front.Add(call, arrays[i], true);
  }
  if (const char* error = in_front.Run(QuantizeParts<T>, stream)) return error;

  // A launch has arrays of one dim; those of another have one of their own.
  for (const bool writes : {false, true}) {
    for (int dim = KVBLOCK_QUANTIZE_MAX_DIM; dim > 0; dim -= 16) {
      QuantizeLaunch launch;
      for (int i = 0; i < call.num_arrays; ++i) {
        if (arrays[i].dim != dim || !(writes || plan.InTiles(call.arrays[i]))) continue;
        launch.Add(call, arrays[i], !writes);
      }
      const char* const error =
          writes ? RunTiles<T, true>(launch, dim, stream) : RunTiles<T, false>(launch, dim, stream);
      if (error != nullptr) return error;
    }
  }
  return nullptr;
}

}  // namespace
}  // namespace kvblock

extern "C" const char* kvblock_quantize_cuda(const kvblock_quantize* a, void* stream) {
  using namespace kvblock;
  if (const char* error = kvblock_quantize_check(a)) return error;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (a->dtype == KVBLOCK_QUANTIZE_BF16) return Launch<__nv_bfloat16>(*a, cuda_stream);
  return Launch<__half>(*a, cuda_stream);
}
