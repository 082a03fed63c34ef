#include <cuda_runtime.h>

#include <atomic>
#include <string>

#include "host/attention_workspace.h"
#include "host/message.h"
#include "kvblock/attention.h"
#include "ops/attention/hopper/tensor_map.h"

namespace kvblock::hopper {
namespace {

// The driver is not linked: a process without a GPU must be able to load this library.
using Encode = decltype(&cuTensorMapEncodeTiled);
Encode FindEncode() {
  static std::atomic<void*> known;
  void* entry = known.load(std::memory_order_relaxed);
  if (entry != nullptr) return reinterpret_cast<Encode>(entry);
  constexpr char kName[] = "cuTensorMapEncodeTiled";
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(kName, &entry, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t status = cudaGetDriverEntryPoint(kName, &entry, cudaEnableDefault, &found);
#endif
  if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  known.store(entry, std::memory_order_relaxed);
  return reinterpret_cast<Encode>(entry);
}

CUtensorMapDataType TypeOf(int32_t dtype) {
  return dtype == KVBLOCK_BF16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
         : dtype == KVBLOCK_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                : CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

}  // namespace

const char* MakeTensorMap(const HeadArray& a, int rows, CUtensorMap* map, int heads) {
  const Encode encode = FindEncode();
  if (encode == nullptr) {
    return Message("attention: this driver has no tensor maps (CUDA 12.0 or newer is needed)");
  }
  const cuuint64_t sizes[4] = {cuuint64_t(a.dim), cuuint64_t(a.heads), cuuint64_t(a.rows),
                               cuuint64_t(a.batch)};
  const cuuint64_t strides[3] = {cuuint64_t(a.head_stride), cuuint64_t(a.row_stride),
                                 cuuint64_t(a.batch_stride)};
  const cuuint32_t columns = IsNarrow(a) ? 128 : 64;
  const cuuint32_t box[4] = {columns, cuuint32_t(heads), cuuint32_t(rows), 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(map, TypeOf(a.dtype), 4, const_cast<void*>(a.data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return nullptr;
  return Message("attention: the driver refused a tensor map, error " +
                 std::to_string(static_cast<int>(result)) + ", for [" + std::to_string(a.batch) +
                 ", " + std::to_string(a.rows) + ", " + std::to_string(a.heads) + ", " +
                 std::to_string(a.dim) + "]");
}

bool MakeTensorMap(const BlockArray& a, int rows, CUtensorMap* map) {
  const Encode encode = FindEncode();
  if (encode == nullptr) return false;
  constexpr int64_t kMostStride = int64_t{1} << 40;
  cuuint64_t sizes[5], strides[4];
  for (int i = 0; i < 5; ++i) sizes[i] = cuuint64_t(a.sizes[i]);
  for (int i = 0; i < 4; ++i) {
    // Of one there is no next.
    const int64_t stride = a.sizes[i + 1] == 1 ? 16 : a.strides[i];
    if (stride <= 0 || stride >= kMostStride) return false;
    strides[i] = cuuint64_t(stride);
  }
  const cuuint32_t columns = IsNarrow(a) ? 128 : 64;
  const cuuint32_t box[5] = {columns, 1, cuuint32_t(rows), 1, 1}, steps[5] = {1, 1, 1, 1, 1};
  return encode(map, TypeOf(a.dtype), 5, const_cast<void*>(a.data), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace kvblock::hopper
