// The append as a CUDA kernel: q, k and v of new tokens normed, rotated, quantized and written.
//
// A row is the D elements of one head of one token. A CTA has some tokens (of one layer each) with
// all of their rows; where tokens are few it has one, or some of its rows: the grid's y says how
// many CTAs share them. A group of lanes has one token and takes a row of it at a time, first those
// of q, then of k, then of v:
//
//   each lane loads its units of the row               16 bytes at a time, where they are aligned,
//                                                      while it works on the row before
//   the CTA computes its tokens' cosines and sines     once, in shared memory
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
#include <cstring>
#include <type_traits>

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
  int32_t lanes;        // of a group, a power of 2
  int32_t tokens_each;  // of a CTA, a power of 2, at most as many as it has groups
  int32_t all_tokens;   // of all layers in k and v
  float norm_eps, largest;
  bool interleaved, zero_tail;
  bool q_norm_wide, k_norm_wide;  // weights are float32
  char* buffers[KVBLOCK_APPEND_MAX_BUFFERS];
};

template <typename T>
constexpr int kAppendWidth = 16 / sizeof(T);

// Where a unit lies in its row.
struct AppendUnit {
  int a, b, a_count, b_count;
  bool turns;
};

template <int W>
__device__ __forceinline__ AppendUnit UnitOf(const AppendParams& p, int unit) {
  const int half = p.rotary_dim / 2, turning = (half + W - 1) / W;
  AppendUnit u{};
  u.turns = unit < turning;
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

// A chunk as it is in memory. Elements that are split up would take a register each.
struct AppendChunk {
  uint32_t words[4];

  template <typename T>
  __device__ __forceinline__ void Get(float (&x)[kAppendWidth<T>]) const {
    constexpr int kEach = 4 / sizeof(T);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        x[2 * i] = __int_as_float(static_cast<int>(words[i] << 16));
        x[2 * i + 1] = __int_as_float(static_cast<int>(words[i] & 0xffff0000u));
        continue;
      }
      T elements[kEach];
      memcpy(elements, &words[i], 4);
#pragma unroll
      for (int j = 0; j < kEach; ++j) x[i * kEach + j] = static_cast<float>(elements[j]);
    }
  }
  template <typename T>
  __device__ __forceinline__ void Set(const float (&x)[kAppendWidth<T>]) {
    constexpr int kEach = 4 / sizeof(T);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      T elements[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) elements[j] = static_cast<T>(x[i * kEach + j]);
      memcpy(&words[i], elements, 4);
    }
  }
};

// `count` elements, zeros behind them; with kVectors a whole chunk, or none.
template <bool kVectors, typename T>
__device__ __forceinline__ AppendChunk LoadChunk(const T* from, int count) {
  constexpr int W = kAppendWidth<T>;
  AppendChunk made{};
  if constexpr (kVectors) {
    if (count == 0) return made;
    const uint4 loaded = __ldg(reinterpret_cast<const uint4*>(from));
    return {{loaded.x, loaded.y, loaded.z, loaded.w}};
  } else {
    T elements[W];
#pragma unroll
    for (int i = 0; i < W; ++i) elements[i] = i < count ? from[i] : static_cast<T>(0.0f);
    memcpy(made.words, elements, 16);
    return made;
  }
}

// `stride` is in bytes, from an element to the next.
template <bool kVectors, typename T>
__device__ __forceinline__ void StoreChunk(char* to, int count, int64_t stride,
                                           const AppendChunk& chunk) {
  constexpr int W = kAppendWidth<T>;
  if constexpr (kVectors) {
    const uint32_t (&x)[4] = chunk.words;
    if (count > 0) __stwb(reinterpret_cast<uint4*>(to), uint4{x[0], x[1], x[2], x[3]});
  } else {
    T elements[W];
    memcpy(elements, chunk.words, 16);
#pragma unroll
    for (int i = 0; i < W; ++i) {
      if (i < count) *reinterpret_cast<T*>(to + i * stride) = elements[i];
    }
  }
}

__device__ __forceinline__ uint16_t PairOf(int cache_dtype, float x, float y) {
  if (cache_dtype == KVBLOCK_APPEND_E4M3) return PairToE4m3(x, y);
  if (cache_dtype == KVBLOCK_APPEND_E5M2) return PairToE5m2(x, y);
  return PairToInt8(x, y);
}

// Elements of 8 bits, W at a time.
template <bool kVectors, int W>
__device__ __forceinline__ void StoreBytes(char* to, int count, int64_t stride, int cache_dtype,
                                           const float (&y)[W]) {
  alignas(8) uint16_t pairs[W / 2];
#pragma unroll
  for (int i = 0; i < W / 2; ++i) pairs[i] = PairOf(cache_dtype, y[2 * i], y[2 * i + 1]);
  if constexpr (kVectors) {
    if (count == 0) return;
    if constexpr (W == 8) {
      *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(pairs);
    } else {
      *reinterpret_cast<unsigned*>(to) = *reinterpret_cast<const unsigned*>(pairs);
    }
  } else {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      if (i < count) to[i * stride] = static_cast<char>(pairs[i / 2] >> i % 2 * 8);
    }
  }
}

// Zeros in place of `count` elements of the cache.
template <bool kVectors, int W>
__device__ __forceinline__ void ClearChunk(char* to, int count, int64_t stride, int bytes) {
  if constexpr (kVectors) {
    if (count == 0) return;
    if (bytes * W == 16) {
      *reinterpret_cast<uint4*>(to) = uint4{0, 0, 0, 0};
    } else if (bytes * W == 8) {
      *reinterpret_cast<uint2*>(to) = uint2{0, 0};
    } else {
      *reinterpret_cast<unsigned*>(to) = 0;
    }
  } else {
    for (int i = 0; i < count; ++i) {
      for (int byte = 0; byte < bytes; ++byte) to[i * stride + byte] = 0;
    }
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

// The cosines and sines of a token lie in the order in which lanes read them, two pairs at a time:
// first two pairs of each unit, then the next two. Neighbours read neighbours.
template <int W>
__device__ __forceinline__ int AngleUnits(const AppendParams& p) {
  return (p.rotary_dim / 2 + W - 1) / W;
}

// `angles`: of the unit's first two pairs, in `units` units. kWhole: chunks are whole, or zeros
// that nobody stores.
template <bool kWhole, int W>
__device__ __forceinline__ void Turn(const AppendUnit& u, bool interleaved, const float4* angles,
                                     int units, float (&a)[W], float (&b)[W]) {
  const auto turn = [](float& x, float& y, float cos, float sin) {
    const float turned = x * cos - y * sin;
    y = y * cos + x * sin;
    x = turned;
  };
  if (!interleaved) {
#pragma unroll
    for (int i = 0; i < W; i += 2) {
      const float4 two = angles[i / 2 * units];
      if (kWhole || i < u.a_count) turn(a[i], b[i], two.x, two.y);
      if (kWhole || i + 1 < u.a_count) turn(a[i + 1], b[i + 1], two.z, two.w);
    }
    return;
  }
  const auto turn_two = [&](int i, int count, float (&x)[W], float4 two) {
    if (kWhole || i < count) turn(x[i], x[i + 1], two.x, two.y);
    if (kWhole || i + 2 < count) turn(x[i + 2], x[i + 3], two.z, two.w);
  };
#pragma unroll
  for (int i = 0; i < W; i += 4) {
    turn_two(i, u.a_count, a, angles[i / 4 * units]);
    turn_two(i, u.b_count, b, angles[(W + i) / 4 * units]);
  }
}

// The cosines and sines of the CTA's tokens, from number `first` on.
template <int W>
__device__ __forceinline__ void ComputeAngles(const AppendParams& p, int first, float4* angles) {
  const int half = p.rotary_dim / 2, count = min(p.tokens_each, p.all_tokens - first) * half;
  const int units = AngleUnits<W>(p);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kAppendThreads) {
    const int pair = i % half, own = i / half, token = (first + own) % p.tokens;
    const int position = p.positions ? p.positions[token] : token;
    float2 angle;
    if (p.cos_sin == nullptr) {
      angle = CosSin(position, p.inv_freq[pair]);
    } else {
      const int64_t last = p.cos_sin_rows - 1;
      const int64_t row = position < 0 ? 0 : position < last ? position : last;
      const float* const table = p.cos_sin + row * p.rotary_dim;
      angle = float2{table[pair], table[pair + half]};
    }
    const int at = own * (W / 2) * units + pair % W / 2 * units + pair / W;
    reinterpret_cast<float2*>(angles + at)[pair % 2] = angle;
  }
}

// Whether some of the slots `from` + n, n below `count`, get no token of this call. Bit n of
// `written` says that one does. `next` is the number of the token that comes behind those of the
// slots before: a prompt fills its blocks in order, and then nobody has to look through all slots.
__device__ __forceinline__ bool FindUnwritten(const AppendParams& p, int next, int from, int count,
                                              unsigned* written) {
  const auto mark = [&](int token) {
    const unsigned n = static_cast<unsigned>(p.slots[token]) - static_cast<unsigned>(from);
    if (n < static_cast<unsigned>(count)) atomicOr(written + n / 32, 1u << n % 32);
  };
  const int thread = static_cast<int>(threadIdx.x), words = (count + 31) / 32;
  __syncthreads();  // the others have read what was here
  for (int i = thread; i < words; i += kAppendThreads) written[i] = 0;
  __syncthreads();
  for (int i = thread; i < min(count, p.tokens - next); i += kAppendThreads) mark(next + i);
  __syncthreads();
  bool all = true;
  for (int i = 0; i < words; ++i) all = all && written[i] == ~0u >> (32 - min(32, count - 32 * i));
  if (all) return false;
  __syncthreads();
  for (int i = thread; i < p.tokens; i += kAppendThreads) mark(i);
  __syncthreads();
  return true;
}

// A row: where it comes from, and where it goes.
template <typename T>
struct AppendRow {
  const T* from;
  char* to;
  float* scale;  // where its own scale is stored, or nullptr
  int head;
  bool is_q, is_v;
  bool there;  // else nothing is read or written
};

// A token, by its number among those of all layers in k and v.
template <typename T>
struct AppendToken {
  __device__ __forceinline__ AppendToken(const AppendParams& p, int number)
      : p_(p), there_(number < p.all_tokens) {
    if (!there_) return;
    token = number % p.tokens;
    q_ = static_cast<const T*>(p.q) + number * p.q_token_stride;
    k_ = static_cast<const T*>(p.k) + number * p.kv_token_stride;
    v_ = static_cast<const T*>(p.v) + number * p.kv_token_stride;
    q_out_ = static_cast<T*>(p.q_out) + int64_t{token} * p.num_heads * p.head_dim;
    slot = p.slots[token];
    layer_ = p.layer_at ? *p.layer_at : p.layer + number / p.tokens;
    placed = slot >= 0 && slot < p.num_slots && layer_ >= 0 && layer_ < p.num_layers;
    if (!placed) return;
    const int block = slot / p.block_size, offset = slot % p.block_size;
    cache_ = p.buffers[layer_ * p.layer_table_stride] + layer_ * p.layer_stride +
             block * p.block_stride + offset * p.token_stride;
  }

  __device__ __forceinline__ AppendRow<T> Row(int row) const {
    AppendRow<T> r{};
    r.is_q = row < p_.num_heads;
    const int kv_row = row - p_.num_heads;
    r.is_v = kv_row >= p_.num_kv_heads;
    r.head = r.is_q ? row : r.is_v ? kv_row - p_.num_kv_heads : kv_row;
    r.there = r.is_q ? there_ : placed && row < p_.num_rows;
    r.from = (r.is_q ? q_ : r.is_v ? v_ : k_) + r.head * p_.head_dim;
    if (r.is_q) {
      r.to = reinterpret_cast<char*>(q_out_ + r.head * p_.head_dim);
      return r;
    }
    r.to = cache_ + r.head * p_.head_stride + (r.is_v ? p_.outer_stride : 0);
    float* const kept = r.is_v ? p_.v_scales : p_.k_scales;
    if (kept != nullptr && r.there) {
      r.scale = kept + layer_ * p_.scale_layer_stride + int64_t{slot} * p_.num_kv_heads + r.head;
    }
    return r;
  }

  int token = 0, slot = -1;
  bool placed = false;  // it has a slot in the pool

 private:
  const AppendParams& p_;
  const bool there_;
  int layer_ = 0;
  const T *q_ = nullptr, *k_ = nullptr, *v_ = nullptr;  // its own
  T* q_out_ = nullptr;
  char* cache_ = nullptr;
};

// What a lane has of a row, as it was loaded.
template <int kUnits>
struct AppendChunks {
  AppendChunk a[kUnits], b[kUnits];
};

// kVectors: chunks of q, k, v, norms and the cache are whole and aligned.
template <typename T, int kUnits, bool kVectors, bool kQuantizes>
class AppendLane {
 public:
  static constexpr int W = kAppendWidth<T>;
  using Row = AppendRow<T>;
  using Chunks = AppendChunks<kUnits>;

  // `angles`: of its token, when they are there.
  __device__ __forceinline__ AppendLane(const AppendParams& p, const float4* angles)
      : p_(p),
        lane_(static_cast<int>(threadIdx.x) % p.lanes),
        angles_(angles + lane_),
        angle_units_(AngleUnits<W>(p)) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) unit_[i] = UnitOf<W>(p, lane_ + i * p.lanes);
  }

  __device__ __forceinline__ void Load(const Row& row, Chunks* made) const {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const AppendUnit& u = unit_[i];
      made->a[i] = LoadChunk<kVectors>(row.from + u.a, row.there ? u.a_count : 0);
      made->b[i] = LoadChunk<kVectors>(row.from + u.b, row.there ? u.b_count : 0);
    }
  }

  // All lanes of a warp.
  __device__ __forceinline__ void Finish(const Row& row, const Chunks& loaded) const {
    const void* const norm = row.is_q ? p_.q_norm : row.is_v ? nullptr : p_.k_norm;
    const bool turns = !row.is_v && p_.rotary_dim > 0, narrow = kQuantizes && !row.is_q;
    float a[kUnits][W], b[kUnits][W];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      loaded.a[i].template Get<T>(a[i]);
      loaded.b[i].template Get<T>(b[i]);
    }
    if (p_.q_norm != nullptr || p_.k_norm != nullptr) {
      const float sum = AddOverGroup(Squares(a) + Squares(b), p_.lanes);
      if (norm != nullptr) {
        const float factor = 1.0f / sqrtf(sum / static_cast<float>(p_.head_dim) + p_.norm_eps);
        const bool wide = row.is_q ? p_.q_norm_wide : p_.k_norm_wide;
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
          Weigh(norm, wide, factor, unit_[i].a, unit_[i].a_count, a[i]);
          Weigh(norm, wide, factor, unit_[i].b, unit_[i].b_count, b[i]);
        }
      }
    }
    if (turns) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        if (!unit_[i].turns) continue;
        const float4* const angles = angles_ + i * p_.lanes;
        Turn<kVectors>(unit_[i], p_.interleaved, angles, angle_units_, a[i], b[i]);
      }
    }
    if constexpr (kQuantizes) {
      const float scale = ScaleOf(row, a, b);
      if (narrow) {
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
    if (!row.there) return;
    const bool as_it_is = norm == nullptr && !turns && !narrow;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      Store(row, as_it_is, unit_[i].a, unit_[i].a_count, loaded.a[i], a[i]);
      Store(row, as_it_is, unit_[i].b, unit_[i].b_count, loaded.b[i], b[i]);
    }
  }

  // Zeros in place of a row of the cache, `tokens` slots behind this one.
  __device__ __forceinline__ void Clear(const Row& row, int tokens) const {
    char* const behind = row.to + tokens * p_.token_stride;
    const int bytes = kQuantizes ? 1 : static_cast<int>(sizeof(T));
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const AppendUnit& u = unit_[i];
      ClearChunk<kVectors, W>(behind + u.a * p_.dim_stride, u.a_count, p_.dim_stride, bytes);
      ClearChunk<kVectors, W>(behind + u.b * p_.dim_stride, u.b_count, p_.dim_stride, bytes);
    }
    if (row.scale != nullptr && lane_ == 0) row.scale[int64_t{tokens} * p_.num_kv_heads] = 0.0f;
  }

 private:
  __device__ __forceinline__ static float Squares(const float (&x)[kUnits][W]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
#pragma unroll
      for (int j = 0; j < W; ++j) sum += x[i][j] * x[i][j];
    }
    return sum;
  }

  __device__ __forceinline__ void Weigh(const void* norm, bool wide, float factor, int begin,
                                        int count, float (&x)[W]) const {
    float weights[W];
    if (wide) {
      constexpr int kEach = kAppendWidth<float>;
#pragma unroll
      for (int i = 0; i < W; i += kEach) {
        float some[kEach];
        const int left = max(0, min(kEach, count - i));
        LoadChunk<kVectors>(static_cast<const float*>(norm) + begin + i, left)
            .template Get<float>(some);
#pragma unroll
        for (int j = 0; j < kEach; ++j) weights[i + j] = some[j];
      }
    } else {
      LoadChunk<kVectors>(static_cast<const T*>(norm) + begin, count).template Get<T>(weights);
    }
#pragma unroll
    for (int j = 0; j < W; ++j) x[j] = x[j] * factor * weights[j];
  }

  // The row's scale; one that is computed is stored, too.
  __device__ __forceinline__ float ScaleOf(const Row& row, const float (&a)[kUnits][W],
                                           const float (&b)[kUnits][W]) const {
    if (p_.k_scales == nullptr) {
      if (row.is_q || !row.there) return 1.0f;
      return row.is_v ? p_.v_scale[row.head * p_.v_scale_stride]
                      : p_.k_scale[row.head * p_.k_scale_stride];
    }
    float largest = 0.0f;  // fmaxf takes no NaN
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
#pragma unroll
      for (int j = 0; j < W; ++j) {
        largest = fmaxf(largest, fmaxf(fabsf(a[i][j]), fabsf(b[i][j])));
      }
    }
    largest = fminf(MaxOverGroup(largest, p_.lanes), 3.402823466e38f);
    const float scale = fmaxf(largest / p_.largest, 1.175494351e-38f);
    if (row.scale != nullptr && lane_ == 0) *row.scale = scale;
    return scale;
  }

  __device__ __forceinline__ void Store(const Row& row, bool as_it_is, int begin, int count,
                                        const AppendChunk& loaded, const float (&y)[W]) const {
    // Elements of aligned chunks follow each other.
    const int64_t spread = kVectors ? kQuantizes ? 1 : sizeof(T) : p_.dim_stride;
    if constexpr (kQuantizes) {
      if (!row.is_q) {
        StoreBytes<kVectors>(row.to + begin * spread, count, spread, p_.cache_dtype, y);
        return;
      }
    }
    const int64_t stride = kQuantizes || row.is_q ? sizeof(T) : spread;
    AppendChunk made = loaded;
    if (!as_it_is) made.template Set<T>(y);
    StoreChunk<kVectors, T>(row.to + begin * stride, count, stride, made);
  }

  const AppendParams& p_;
  const int lane_;
  AppendUnit unit_[kUnits];
  const float4* const angles_;
  const int angle_units_;
};

// CTAs of a multiprocessor: as many as leave a thread the registers that it needs.
template <int kUnits, bool kVectors, bool kQuantizes>
constexpr int kAppendCtasOfOne = kUnits > 1   ? 2
                                 : !kVectors  ? 5
                                 : kQuantizes ? 6
                                              : 7;

template <typename T, int kUnits, bool kVectors, bool kQuantizes>
__global__ void __launch_bounds__(kAppendThreads, kAppendCtasOfOne<kUnits, kVectors, kQuantizes>)
    Append(const __grid_constant__ AppendParams p) {
  __shared__ float4 angles[kAppendAngles / 2];
  __shared__ unsigned written[kAppendWindow / 32];
  const int groups = kAppendThreads / p.lanes, group = static_cast<int>(threadIdx.x) / p.lanes;
  const int share = groups / p.tokens_each;  // of a token
  const int number = static_cast<int>(blockIdx.x) * p.tokens_each, own = group / share;
  const int first = static_cast<int>(blockIdx.y) * share;
  const int step = static_cast<int>(gridDim.y) * share;
  const AppendToken<T> token(p, number + own);
  constexpr int W = kAppendWidth<T>;
  AppendLane<T, kUnits, kVectors, kQuantizes> lane(p, angles + own * (W / 2) * AngleUnits<W>(p));

  AppendChunks<kUnits> loaded, ahead{};
  lane.Load(token.Row(first + group % share), &loaded);
  if (p.rotary_dim > 0 && first < p.num_heads + p.num_kv_heads) {
    ComputeAngles<W>(p, number, angles);
    __syncthreads();
  }
#pragma unroll 1
  for (int begin = first; begin < p.num_rows; begin += step) {
    const int row = begin + group % share;
    if (begin + step < p.num_rows) lane.Load(token.Row(row + step), &ahead);
    lane.Finish(token.Row(row), loaded);
    loaded = ahead;
  }

  // Zeros behind, by all groups for one token after the other.
  const int rows_apart = static_cast<int>(gridDim.y) * groups;
  const int begin_row = static_cast<int>(blockIdx.y) * groups;
  if (!p.zero_tail) return;
  if (begin_row + rows_apart >= p.num_rows && begin_row + groups <= p.num_heads) return;  // q alone
  for (int i = 0; i < p.tokens_each; ++i) {
    const AppendToken<T> behind(p, number + i);
    if (!behind.placed || behind.slot % p.block_size != 0) continue;
    for (int begin = 0; begin < p.block_size; begin += kAppendWindow) {
      const int count = min(kAppendWindow, p.block_size - begin), slot = behind.slot + begin;
      if (!FindUnwritten(p, behind.token + begin, slot, count, written)) continue;
      for (int at = begin_row + group; at < p.num_rows; at += rows_apart) {
        const AppendRow<T> row = behind.Row(at);
        if (row.is_q) continue;
#pragma unroll 1
        for (int n = 0; n < count; ++n) {
          if ((written[n / 32] >> n % 32 & 1) == 0) lane.Clear(row, begin + n);
        }
      }
    }
  }
}

}  // namespace kvblock
