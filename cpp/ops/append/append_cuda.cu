// The CUDA launcher of the append: check, fill in the parameters, pick an instance, launch.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "host/message.h"
#include "kvblock/append.h"
#include "ops/append/append_kernel.cuh"

namespace kvblock {
namespace {

// About as many CTAs as a large GPU has at a time. With fewer tokens some CTAs share one.
constexpr int64_t kAppendCtas = 1024;
constexpr int kLeastAngles = 16;  // that a token is taken to have

bool Aligned(std::initializer_list<const void*> arrays, uintptr_t bytes) {
  for (const void* array : arrays) {
    if (reinterpret_cast<uintptr_t>(array) % bytes != 0) return false;
  }
  return true;
}

// Elements from a token of q, or of k and v, to the next.
int64_t QTokenStride(const kvblock_append& a) {
  return a.q_token_stride ? a.q_token_stride : int64_t{a.num_heads} * a.head_dim;
}
int64_t KvTokenStride(const kvblock_append& a) {
  return a.kv_token_stride ? a.kv_token_stride : int64_t{a.num_kv_heads} * a.head_dim;
}

// Whether every chunk of a row begins and ends at a multiple of its width.
bool WholeChunks(const kvblock_append& a, int width) {
  const int turning = a.interleaved ? a.rotary_dim : a.rotary_dim / 2;
  return a.head_dim % width == 0 && turning % width == 0;
}

bool CacheIsAligned(const kvblock_append& a, int64_t element, int64_t bytes) {
  if (a.dim_stride != element) return false;
  for (const int64_t stride :
       {a.layer_stride, a.block_stride, a.outer_stride, a.token_stride, a.head_stride}) {
    if (stride % bytes != 0) return false;
  }
  for (int64_t i = 0; i < a.num_buffers; ++i) {
    if (!Aligned({a.buffers[i]}, bytes)) return false;
  }
  return true;
}

float LargestOf(int32_t cache_dtype) {
  if (cache_dtype == KVBLOCK_APPEND_E4M3) return 448.0f;
  return cache_dtype == KVBLOCK_APPEND_E5M2 ? 57344.0f : 127.0f;
}

// Whether all chunks are whole, and none lies across a multiple of its width.
template <typename T>
bool InVectors(const kvblock_append& a) {
  constexpr int W = kAppendWidth<T>;
  const int64_t element = a.cache_dtype == a.dtype ? sizeof(T) : 1;
  return WholeChunks(a, W) && QTokenStride(a) % W == 0 && KvTokenStride(a) % W == 0 &&
         Aligned({a.q, a.k, a.v, a.q_out, a.q_norm, a.k_norm}, 16) &&
         CacheIsAligned(a, element, element * W);
}

template <typename T>
AppendParams ParamsOf(const kvblock_append& a) {
  AppendParams p{};
  p.q = a.q;
  p.k = a.k;
  p.v = a.v;
  p.q_out = a.q_out;
  p.slots = a.slots;
  p.positions = a.positions;
  p.layer_at = a.layer_at;
  p.inv_freq = a.inv_freq;
  p.cos_sin = a.cos_sin;
  p.q_norm = a.q_norm;
  p.k_norm = a.k_norm;
  p.k_scale = a.k_scale;
  p.v_scale = a.v_scale;
  p.k_scales = a.k_scales;
  p.v_scales = a.v_scales;
  p.layer_stride = a.layer_stride;
  p.block_stride = a.block_stride;
  p.outer_stride = a.outer_stride;
  p.token_stride = a.token_stride;
  p.head_stride = a.head_stride;
  p.dim_stride = a.dim_stride;
  p.scale_layer_stride = a.scale_layers > 1 ? a.num_blocks * a.block_size * a.num_kv_heads : 0;
  p.cos_sin_rows = a.cos_sin_rows;
  p.q_token_stride = QTokenStride(a);
  p.kv_token_stride = KvTokenStride(a);
  p.tokens = static_cast<int32_t>(a.tokens);
  p.num_heads = a.num_heads;
  p.num_kv_heads = a.num_kv_heads;
  p.num_rows = a.num_heads + a.num_outer * a.num_kv_heads;
  p.head_dim = a.head_dim;
  p.num_layers = static_cast<int32_t>(a.num_layers);
  p.layer = static_cast<int32_t>(a.layer);
  p.layer_table_stride = static_cast<int32_t>(a.layer_table_stride);
  p.num_slots = static_cast<int32_t>(a.num_blocks * a.block_size);
  p.block_size = static_cast<int32_t>(a.block_size);
  p.k_scale_stride = a.k_scale_heads > 1;
  p.v_scale_stride = a.v_scale_heads > 1;
  p.rotary_dim = a.rotary_dim;
  p.cache_dtype = a.cache_dtype;
  p.norm_eps = a.norm_eps;
  p.largest = LargestOf(a.cache_dtype);
  p.interleaved = a.interleaved != 0;
  p.zero_tail = a.zero_tail != 0;
  p.q_norm_wide = a.q_norm_dtype != a.dtype;
  p.k_norm_wide = a.k_norm_dtype != a.dtype;
  for (int64_t i = 0; i < a.num_buffers; ++i) p.buffers[i] = static_cast<char*>(a.buffers[i]);
  return p;
}

template <typename T, int kUnits>
const char* Launch(const kvblock_append& a, int units, cudaStream_t stream) {
  AppendParams p = ParamsOf<T>(a);
  for (p.lanes = 1; p.lanes < units && p.lanes < 32;) p.lanes *= 2;
  const int64_t tokens = a.tokens * a.layers, groups = kAppendThreads / p.lanes;
  // Where that leaves CTAs enough, a CTA has tokens for all of its threads to compute angles of.
  p.all_tokens = static_cast<int32_t>(tokens);
  for (p.tokens_each = 1; p.tokens_each * 2 <= groups; p.tokens_each *= 2) {
    if (p.tokens_each * 2 * std::max(a.rotary_dim / 2, kLeastAngles) > kAppendThreads) break;
    if (tokens < kAppendCtas * p.tokens_each * 2) break;
  }
  const int64_t ctas = (tokens + p.tokens_each - 1) / p.tokens_each;
  const int64_t most = (p.num_rows + groups - 1) / groups, wanted = (kAppendCtas + ctas - 1) / ctas;
  const int64_t slices = p.tokens_each == 1 ? std::min(most, wanted) : 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas), static_cast<unsigned>(slices));
  config.blockDim = dim3(kAppendThreads);
  config.stream = stream;
  const bool vectors = InVectors<T>(a);
  const auto kernel = a.cache_dtype != a.dtype
                          ? vectors ? Append<T, kUnits, true, true> : Append<T, kUnits, false, true>
                      : vectors ? Append<T, kUnits, true, false>
                                : Append<T, kUnits, false, false>;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, p);
  if (status == cudaSuccess) return nullptr;
  return Message(std::string("append: ") + cudaGetErrorString(status));
}

template <typename T>
const char* Launch(const kvblock_append& a, cudaStream_t stream) {
  constexpr int W = kAppendWidth<T>, kMost = 3;  // units of a lane, of the longest rows
  static_assert(kMost * 32 * 2 * W * sizeof(T) >= KVBLOCK_APPEND_MAX_ROW + 4 * W * sizeof(T));
  const int half = a.rotary_dim / 2, rest = a.head_dim - a.rotary_dim;
  const int units = (half + W - 1) / W + (rest + 2 * W - 1) / (2 * W);
  return units <= 32 ? Launch<T, 1>(a, units, stream) : Launch<T, kMost>(a, units, stream);
}

}  // namespace
}  // namespace kvblock

extern "C" const char* kvblock_append_cuda(const kvblock_append* a, void* stream) {
  using namespace kvblock;
  if (const char* error = kvblock_append_check(a)) return error;
  if (a->tokens == 0) return nullptr;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (a->dtype) {
    case KVBLOCK_APPEND_BF16: return Launch<__nv_bfloat16>(*a, cuda_stream);
    case KVBLOCK_APPEND_F16: return Launch<__half>(*a, cuda_stream);
    default: return Launch<float>(*a, cuda_stream);
  }
}
