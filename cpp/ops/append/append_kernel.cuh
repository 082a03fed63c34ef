// The append as a CUDA kernel: q, k and v of new tokens normed, rotated, quantized and written.
//
// A row is the D elements of one head of one token. A CTA has one token (and layer) and as many of
// its rows as it has groups of lanes; a group has a row, first those of q, then of k, then of v:
//
//   each lane loads its units of the row               16 bytes at a time, where they are aligned
//   the CTA computes the token's cosines and sines     once, in shared memory
//   norm: the group adds up squares; every element times 1 / sqrt(mean + eps) times its weight
//   rotation: a unit holds both elements of its pairs, so no lane asks another
//   q is stored in q_out; k and v: the group finds the scale, divides, rounds, and stores in the
//   slot the first token of a block: zeros where no token of this call goes
//
// A unit is two chunks of W = 16 / sizeof(T) elements, a and b. Of elements that turn, b has the
// partners of a: W beyond rotary_dim / 2, or, interleaved, just the next W. The others follow, two
// chunks after the other. A row of 128 elements of 16 bits is 8 units, so that a warp has 4 rows.
//
// A row that is stored as it came, like v without scales, keeps its bits. Everything travels by
// value in the parameters, the addresses of the pool's arrays, too.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/angle.cuh"
#include "device/narrow.cuh"
#include "kvblock/append.h"

namespace kvblock {

constexpr int kAppendThreads = 128;
constexpr int kAppendAngles = KVBLOCK_APPEND_MAX_ROW / 4;  // pairs of a row of 2 bytes an element
constexpr int kAppendWindow = 2048;                        // slots that are cleared at a time

struct AppendParams {
  const void *q, *k, *v;
  void* q_out;
  const int32_t *slots, *positions, *layer_at;
  const float *inv_freq, *cos_sin;
  const void *q_norm, *k_norm;
  const float *k_scale, *v_scale;
  float *k_scales, *v_scales;
  int64_t layer_stride, block_stride, outer_stride, token_stride, head_stride, dim_stride;
  int64_t scale_layer_stride, cos_sin_rows;
  int64_t q_token_stride, kv_token_stride;  // in elements, of q, and of k and v
  int32_t tokens, num_heads, num_kv_heads, num_rows, head_dim;
  int32_t num_layers, layer, layer_table_stride, num_slots, block_size;
  int32_t k_scale_stride, v_scale_stride;  // 0 where all heads have one scale
  int32_t rotary_dim, cache_dtype;
  int32_t lanes;  // of a group, a power of 2
  float norm_eps, largest;
  bool interleaved, zero_tail, quantizes;
  bool q_norm_wide, k_norm_wide;      // weights are float32
  bool whole_vectors, cache_vectors;  // chunks of q, k, v and norms, and of the cache, are aligned
  char* buffers[KVBLOCK_APPEND_MAX_BUFFERS];
};

template <typename T>
constexpr int kAppendWidth = 16 / sizeof(T);

// Where a unit lies in its row.
struct AppendUnit {
  int a, b, a_count, b_count;
  int angle;  // of its first pair
  bool turns;
};

template <int W>
__device__ __forceinline__ AppendUnit UnitOf(const AppendParams& p, int unit) {
  const int half = p.rotary_dim / 2, turning = (half + W - 1) / W;
  AppendUnit u{};
  u.turns = unit < turning;
  u.angle = unit * W;
  if (u.turns && !p.interleaved) {
    u.a = unit * W;
    u.b = u.a + half;
    u.a_count = u.b_count = min(W, half - u.a);
    return u;
  }
  const int end = u.turns ? p.rotary_dim : p.head_dim;
  u.a = u.turns ? 2 * W * unit : p.rotary_dim + 2 * W * (unit - turning);
  u.b = u.a + W;
  u.a_count = max(0, min(W, end - u.a));
  u.b_count = max(0, min(W, end - u.b));
  return u;
}

// `count` elements as float32, zeros behind them.
template <int W, typename T>
__device__ __forceinline__ void LoadChunk(const T* from, int count, bool vectors, float (&x)[W]) {
  if (vectors && count == W) {
    constexpr int kPart = 16 / sizeof(T);
    static_assert(W % kPart == 0);
#pragma unroll
    for (int part = 0; part < W / kPart; ++part) {
      alignas(16) T loaded[kPart];
      *reinterpret_cast<uint4*>(loaded) = __ldg(reinterpret_cast<const uint4*>(from) + part);
#pragma unroll
      for (int i = 0; i < kPart; ++i) x[part * kPart + i] = static_cast<float>(loaded[i]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < W; ++i) x[i] = i < count ? static_cast<float>(from[i]) : 0.0f;
}

// The same elements, in place of their bits.
template <int W, typename T>
__device__ __forceinline__ void CopyChunk(const T* from, int count, bool from_vectors, char* to,
                                          int64_t stride, bool to_vectors) {
  if (from_vectors && to_vectors && count == W) {
    *reinterpret_cast<uint4*>(to) = __ldg(reinterpret_cast<const uint4*>(from));
    return;
  }
  for (int i = 0; i < count; ++i) *reinterpret_cast<T*>(to + i * stride) = from[i];
}

template <int W, typename T>
__device__ __forceinline__ void StoreChunk(T* to, int count, bool vectors, const float (&y)[W]) {
  if (vectors && count == W) {
    alignas(16) T made[W];
#pragma unroll
    for (int i = 0; i < W; ++i) made[i] = static_cast<T>(y[i]);
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(made);
    return;
  }
#pragma unroll
  for (int i = 0; i < W; ++i) {
    if (i < count) to[i] = static_cast<T>(y[i]);
  }
}

__device__ __forceinline__ uint16_t PairOf(int cache_dtype, float x, float y) {
  if (cache_dtype == KVBLOCK_APPEND_E4M3) return PairToE4m3(x, y);
  if (cache_dtype == KVBLOCK_APPEND_E5M2) return PairToE5m2(x, y);
  return PairToInt8(x, y);
}

// Elements of 8 bits, W at a time.
template <int W>
__device__ __forceinline__ void StoreBytes(char* to, int count, int64_t stride, bool vectors,
                                           int cache_dtype, const float (&y)[W]) {
  alignas(8) uint16_t pairs[W / 2];
#pragma unroll
  for (int i = 0; i < W / 2; ++i) pairs[i] = PairOf(cache_dtype, y[2 * i], y[2 * i + 1]);
  if (vectors && count == W) {
    if constexpr (W == 8) {
      *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(pairs);
    } else {
      *reinterpret_cast<unsigned*>(to) = *reinterpret_cast<const unsigned*>(pairs);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < W; ++i) {
    if (i < count) to[i * stride] = static_cast<char>(pairs[i / 2] >> i % 2 * 8);
  }
}

// Zeros in place of `count` elements of the cache.
template <int W>
__device__ __forceinline__ void ClearChunk(const AppendParams& p, char* to, int count, int bytes) {
  if (p.cache_vectors && count == W) {
    if (bytes * W == 16) {
      *reinterpret_cast<uint4*>(to) = uint4{0, 0, 0, 0};
    } else if (bytes * W == 8) {
      *reinterpret_cast<uint2*>(to) = uint2{0, 0};
    } else {
      *reinterpret_cast<unsigned*>(to) = 0;
    }
    return;
  }
  for (int i = 0; i < count; ++i) {
    for (int byte = 0; byte < bytes; ++byte) to[i * p.dim_stride + byte] = 0;
  }
}

__device__ __forceinline__ float AddOverGroup(float x, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}
__device__ __forceinline__ float MaxOverGroup(float x, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
  }
  return x;
}

template <int W>
__device__ __forceinline__ void Turn(const AppendUnit& u, bool interleaved, const float2* angles,
                                     float (&a)[W], float (&b)[W]) {
  const auto turn = [](float& x, float& y, float2 angle) {
    const float turned = x * angle.x - y * angle.y;
    y = y * angle.x + x * angle.y;
    x = turned;
  };
  if (!interleaved) {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      if (i < u.a_count) turn(a[i], b[i], angles[u.angle + i]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < W / 2; ++i) {
    if (2 * i < u.a_count) turn(a[2 * i], a[2 * i + 1], angles[u.angle + i]);
    if (2 * i < u.b_count) turn(b[2 * i], b[2 * i + 1], angles[u.angle + W / 2 + i]);
  }
}

// The token's cosines and sines.
__device__ __forceinline__ void ComputeAngles(const AppendParams& p, int token, float2* angles) {
  const int half = p.rotary_dim / 2;
  const int position = p.positions ? p.positions[token] : token;
  for (int i = static_cast<int>(threadIdx.x); i < half; i += kAppendThreads) {
    if (p.cos_sin == nullptr) {
      angles[i] = CosSin(position, p.inv_freq[i]);
    } else {
      const int64_t last = p.cos_sin_rows - 1;
      const int64_t row = position < 0 ? 0 : position < last ? position : last;
      const float* const table = p.cos_sin + row * p.rotary_dim;
      angles[i] = float2{table[i], table[i + half]};
    }
  }
}

// Bit n of `written`: some token of the call goes to slot `from` + n, n below `count`.
__device__ __forceinline__ void FindWritten(const AppendParams& p, int from, int count,
                                            unsigned* written) {
  __syncthreads();  // the others have read what was here
  for (int i = static_cast<int>(threadIdx.x); i < kAppendWindow / 32; i += kAppendThreads) {
    written[i] = 0;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < p.tokens; i += kAppendThreads) {
    const unsigned n = static_cast<unsigned>(p.slots[i]) - static_cast<unsigned>(from);
    if (n < static_cast<unsigned>(count)) atomicOr(written + n / 32, 1u << n % 32);
  }
  __syncthreads();
}

template <typename T, int kUnits>
__global__ void __launch_bounds__(kAppendThreads) Append(const __grid_constant__ AppendParams p) {
  constexpr int W = kAppendWidth<T>;
  __shared__ float2 angles[kAppendAngles];
  __shared__ unsigned written[kAppendWindow / 32];
  const int lane = static_cast<int>(threadIdx.x) % p.lanes;
  const int groups = kAppendThreads / p.lanes, first_row = static_cast<int>(blockIdx.y) * groups;
  const int row = first_row + static_cast<int>(threadIdx.x) / p.lanes;
  const int token = static_cast<int>(blockIdx.x) % p.tokens;
  const int plane = static_cast<int>(blockIdx.x) / p.tokens;  // of the layers in k and v

  // The row, and where it goes.
  const int slot = p.slots[token], layer = p.layer_at ? *p.layer_at : p.layer + plane;
  const bool placed = slot >= 0 && slot < p.num_slots && layer >= 0 && layer < p.num_layers;
  const bool is_q = row < p.num_heads, there = is_q || (row < p.num_rows && placed);
  const int kv_row = row - p.num_heads;
  const bool is_v = kv_row >= p.num_kv_heads;
  const int head = is_q ? row : is_v ? kv_row - p.num_kv_heads : kv_row;
  const int64_t given =
      (int64_t{plane} * p.tokens + token) * (is_q ? p.q_token_stride : p.kv_token_stride);
  const void* const all = is_q ? p.q : is_v ? p.v : p.k;
  const T* const from = static_cast<const T*>(all) + given + head * p.head_dim;
  T* const q_out = static_cast<T*>(p.q_out) + (int64_t{token} * p.num_heads + head) * p.head_dim;
  char* to = nullptr;
  float* scales = nullptr;  // where the row's own scale is stored
  if (there && !is_q) {
    const int block = slot / p.block_size, offset = slot % p.block_size;
    to = p.buffers[layer * p.layer_table_stride] + layer * p.layer_stride + block * p.block_stride +
         offset * p.token_stride + head * p.head_stride + (is_v ? p.outer_stride : 0);
    float* const kept = is_v ? p.v_scales : p.k_scales;
    if (kept != nullptr) {
      scales = kept + layer * p.scale_layer_stride + int64_t{slot} * p.num_kv_heads + head;
    }
  }
  const void* const norm = is_q ? p.q_norm : is_v ? nullptr : p.k_norm;
  const bool norm_wide = is_q ? p.q_norm_wide : p.k_norm_wide;
  const bool turns = !is_v && p.rotary_dim > 0;
  const bool as_it_is = norm == nullptr && !turns && (is_q || !p.quantizes);

  AppendUnit unit[kUnits];
  float a[kUnits][W], b[kUnits][W];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    unit[i] = UnitOf<W>(p, lane + i * p.lanes);
    if (!there) unit[i].a_count = unit[i].b_count = 0;
    LoadChunk<W>(from + unit[i].a, as_it_is ? 0 : unit[i].a_count, p.whole_vectors, a[i]);
    LoadChunk<W>(from + unit[i].b, as_it_is ? 0 : unit[i].b_count, p.whole_vectors, b[i]);
  }

  if (p.rotary_dim > 0 && first_row < p.num_heads + p.num_kv_heads) {
    ComputeAngles(p, token, angles);
    __syncthreads();
  }

  if (p.q_norm != nullptr || p.k_norm != nullptr) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
#pragma unroll
      for (int j = 0; j < W; ++j) sum += a[i][j] * a[i][j] + b[i][j] * b[i][j];
    }
    sum = AddOverGroup(sum, p.lanes);
    if (norm != nullptr) {
      const float factor = 1.0f / sqrtf(sum / static_cast<float>(p.head_dim) + p.norm_eps);
      const auto weigh = [&](int begin, int count, float (&x)[W]) {
        float weights[W];
        if (norm_wide) {
          LoadChunk<W>(static_cast<const float*>(norm) + begin, count, p.whole_vectors, weights);
        } else {
          LoadChunk<W>(static_cast<const T*>(norm) + begin, count, p.whole_vectors, weights);
        }
#pragma unroll
        for (int j = 0; j < W; ++j) x[j] = x[j] * factor * weights[j];
      };
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        weigh(unit[i].a, unit[i].a_count, a[i]);
        weigh(unit[i].b, unit[i].b_count, b[i]);
      }
    }
  }

  if (turns) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (unit[i].turns) Turn<W>(unit[i], p.interleaved, angles, a[i], b[i]);
    }
  }

  if (p.quantizes) {
    float scale = 1.0f;
    if (p.k_scales != nullptr) {
      float largest = 0.0f;  // fmaxf takes no NaN
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
#pragma unroll
        for (int j = 0; j < W; ++j) {
          largest = fmaxf(largest, fmaxf(fabsf(a[i][j]), fabsf(b[i][j])));
        }
      }
      largest = fminf(MaxOverGroup(largest, p.lanes), 3.402823466e38f);
      scale = fmaxf(largest / p.largest, 1.175494351e-38f);
      if (scales != nullptr && lane == 0) *scales = scale;
    } else if (there && !is_q) {
      scale = is_v ? p.v_scale[head * p.v_scale_stride] : p.k_scale[head * p.k_scale_stride];
    }
    if (!is_q) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
#pragma unroll
        for (int j = 0; j < W; ++j) {
          a[i][j] /= scale;
          b[i][j] /= scale;
        }
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const AppendUnit& u = unit[i];
    const auto store = [&](int begin, int count, const float (&y)[W]) {
      const int64_t cached = begin * p.dim_stride;
      if (count == 0) return;
      if (as_it_is) {
        char* const place = is_q ? reinterpret_cast<char*>(q_out + begin) : to + cached;
        CopyChunk<W>(from + begin, count, p.whole_vectors, place,
                     is_q ? int64_t{sizeof(T)} : p.dim_stride,
                     is_q ? p.whole_vectors : p.cache_vectors);
      } else if (is_q) {
        StoreChunk<W>(q_out + begin, count, p.whole_vectors, y);
      } else if (p.quantizes) {
        StoreBytes<W>(to + cached, count, p.dim_stride, p.cache_vectors, p.cache_dtype, y);
      } else if (p.cache_vectors && count == W) {
        StoreChunk<W>(reinterpret_cast<T*>(to + cached), count, true, y);
      } else {
#pragma unroll
        for (int j = 0; j < W; ++j) {
          if (j < count) {
            *reinterpret_cast<T*>(to + cached + j * p.dim_stride) = static_cast<T>(y[j]);
          }
        }
      }
    };
    store(u.a, u.a_count, a[i]);
    store(u.b, u.b_count, b[i]);
  }

  // Zeros behind. The whole CTA has one token.
  const bool starts = p.zero_tail && placed && slot % p.block_size == 0;
  if (!starts || first_row + groups <= p.num_heads) return;
  const int bytes = p.quantizes ? 1 : static_cast<int>(sizeof(T));
  for (int begin = 0; begin < p.block_size; begin += kAppendWindow) {
    const int count = min(kAppendWindow, p.block_size - begin);
    FindWritten(p, slot + begin, count, written);
    if (to == nullptr) continue;
    for (int n = 0; n < count; ++n) {
      if (written[n / 32] >> n % 32 & 1) continue;
      char* const behind = to + int64_t{begin + n} * p.token_stride;
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const AppendUnit& u = unit[i];
        ClearChunk<W>(p, behind + u.a * p.dim_stride, u.a_count, bytes);
        ClearChunk<W>(p, behind + u.b * p.dim_stride, u.b_count, bytes);
      }
      if (scales != nullptr && lane == 0) scales[int64_t{begin + n} * p.num_kv_heads] = 0.0f;
    }
  }
}

}  // namespace kvblock
