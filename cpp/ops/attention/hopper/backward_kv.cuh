#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/fast_math.cuh"
#include "device/mbarrier.cuh"
#include "device/mma.cuh"
#include "device/opaque.cuh"
#include "device/reduce_add.cuh"
#include "device/stmatrix.cuh"
#include "device/tensor_copy.cuh"
#include "device/warpgroup.cuh"
#include "device/wgmma.cuh"
#include "ops/attention/generic/mask.cuh"
#include "ops/attention/generic/product.cuh"
#include "ops/attention/generic/scores.cuh"
#include "ops/attention/generic/tile.cuh"
#include "ops/attention/hopper/backward_tiles.h"
#include "ops/attention/hopper/dq_tile.cuh"

namespace kvblock::hopper {

constexpr float kLog2E = 1.4426950408889634f;

struct BackwardMaps {
  CUtensorMap q, k, v, d_o;
};

// A tile of 16-bit elements as bulk copies write it (wgmma.cuh).
template <int kRows_, int kDim_>
struct SwizzledTile {
  static constexpr int kRows = kRows_, kDim = kDim_;
  static constexpr int kChunks = (kDim + kChunkColumns - 1) / kChunkColumns;
  static constexpr int kChunkBytes = kRows * kChunkRowBytes, kBytes = kChunks * kChunkBytes;

  __device__ static __forceinline__ uint32_t Offset(int row, int column) {
    return SwizzledOffset(kRows, row, column);
  }
};

template <int kDim_>
struct BackwardShape : BackwardTiles<kDim_> {
  using Tiles = BackwardTiles<kDim_>;
  using Tiles::kKeys, Tiles::kQueries, Tiles::kStages;
  static constexpr int kDim = kDim_, kWorkers = 2 * kWarpgroup, kThreads = kWarpgroup + kWorkers;
  static_assert(kKeys == 128, "64 keys to a warpgroup");

  using KeyTile = SwizzledTile<kKeys, kDim>;
  using QueryTile = SwizzledTile<kQueries, kDim>;
  using ScoreTile = SwizzledTile<kKeys, kQueries>;

  struct Step {  // what the loader says of a tile of queries
    int first, head;
    int flags;
    int unused;
  };
  static constexpr int kMasked = 1, kPartial = 2, kEnd = 4;

  // Offsets in shared memory.
  static constexpr int kK = 0, kV = kK + KeyTile::kBytes, kQ = kV + KeyTile::kBytes;
  static constexpr int kDo = kQ + kStages * QueryTile::kBytes;
  static constexpr int kDs = kDo + kStages * QueryTile::kBytes;
  static constexpr int kLse = kDs + 2 * ScoreTile::kBytes, kDelta = kLse + kStages * kQueries * 4;
  static constexpr int kSteps = kDelta + kStages * kQueries * 4;
  static constexpr int kBarriers = kSteps + kStages * sizeof(Step);
  static constexpr int kKFull = kBarriers, kVFull = kKFull + 8, kDsReady = kVFull + 8;
  static constexpr int kQFull = kDsReady + 8, kQFree = kQFull + 8 * kStages;
  static constexpr int kDoFull = kQFree + 8 * kStages, kDoFree = kDoFull + 8 * kStages;
  static constexpr int kSequence = (kDoFree + 8 * kStages + 15) / 16 * 16;
  static constexpr int kBytes = kSequence + (sizeof(Sequence) + 15) / 16 * 16;
  static_assert(kBytes <= 227 * 1024);

  // Part of dQ that a warpgroup computes: all columns of its half of the queries, or its half of
  // the columns.
  static constexpr bool kSplitQueries = kQueries == 128;
  static constexpr int kDqColumns = kSplitQueries ? kDim : 64;
  static_assert(kSplitQueries || kDim == 128 || kDim == 96);
};

// The warp that loads.
template <typename T, int kDim, bool kPlain>
struct Loader {
  using Shape = BackwardShape<kDim>;
  const AttentionParams& p;
  const BackwardMaps& maps;
  const Sequence& s;
  char* const shared;
  const uint32_t base;
  const int first_key, kv_head, lane;

  template <typename Tile>
  __device__ __forceinline__ void LoadTile(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                           int head, int64_t sequence_row, int first) const {
    const bool packed = p.cu_q != nullptr;
    const int row = packed ? static_cast<int>(sequence_row) + first : first;
#pragma unroll
    for (int c = 0; c < Tile::kChunks; ++c) {
      LoadBox(to + c * Tile::kChunkBytes, map, barrier, c * kChunkColumns, head, row,
              packed ? 0 : s.batch);
    }
  }

  __device__ __forceinline__ void LoadKeys() const {
    using KeyTile = typename Shape::KeyTile;
    BarrierExpect(base + Shape::kKFull, KeyTile::kBytes);
    LoadTile<KeyTile>(base + Shape::kK, maps.k, base + Shape::kKFull, kv_head, s.kv_row, first_key);
    BarrierExpect(base + Shape::kVFull, KeyTile::kBytes);
    LoadTile<KeyTile>(base + Shape::kV, maps.v, base + Shape::kVFull, kv_head, s.kv_row, first_key);
  }

  __device__ __forceinline__ void Run() const {
    using QueryTile = typename Shape::QueryTile;
    constexpr int kQueries = Shape::kQueries, kStages = Shape::kStages, kRows = kQueries / 32;
    int stage = 0, phase = 0;
    bool keys_loaded = false;
    const auto publish = [&](typename Shape::Step step) {
      if (lane == 0) {
        reinterpret_cast<typename Shape::Step*>(shared + Shape::kSteps)[stage] = step;
      }
      __syncwarp();
      if (lane == 0) BarrierArrive(base + Shape::kQFull + stage * 8);
    };
    for (int head = kv_head * p.group; head < (kv_head + 1) * p.group; ++head) {
      TileWalk<Along::kQueries, kQueries> walk(p, s, head, first_key, first_key + Shape::kKeys);
      const int64_t lse_row = s.LseRow(p, head);
      while (walk.Next()) {
        const int first = walk.first();
        float lse[kRows], delta[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const int row = first + i * 32 + lane;
          lse[i] = row < s.q_len ? __ldg(p.lse + lse_row + row) : -INFINITY;
          delta[i] = row < s.q_len ? __ldg(p.delta + lse_row + row) : 0.0f;
        }
        const uint32_t q_full = base + Shape::kQFull + stage * 8;
        BarrierWait(base + Shape::kQFree + stage * 8, phase ^ 1);
        if (lane == 0) {
          if (!keys_loaded) LoadKeys();
          BarrierExpect(q_full, QueryTile::kBytes);
          LoadTile<QueryTile>(base + Shape::kQ + stage * QueryTile::kBytes, maps.q, q_full, head,
                              s.q_row, first);
        }
        keys_loaded = true;
        float* const lse_to = reinterpret_cast<float*>(shared + Shape::kLse) + stage * kQueries;
        float* const delta_to = reinterpret_cast<float*>(shared + Shape::kDelta) + stage * kQueries;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          lse_to[i * 32 + lane] = RowLse(lse[i]) * (kPlain ? kLog2E : 1.0f);
          delta_to[i * 32 + lane] = RowDelta(lse[i], delta[i]);
        }
        const bool masked =
            !walk.all_visible() || (!kPlain && (p.softcap > 0.0f || p.bias != nullptr));
        const bool strangers = p.cu_q != nullptr || s.q_len < s.q_rows;
        publish({first, head,
                 (masked ? Shape::kMasked : 0) |
                     (strangers && first + kQueries > s.q_len ? Shape::kPartial : 0),
                 0});
        const uint32_t do_full = base + Shape::kDoFull + stage * 8;
        BarrierWait(base + Shape::kDoFree + stage * 8, phase ^ 1);
        if (lane == 0) {
          BarrierExpect(do_full, QueryTile::kBytes);
          LoadTile<QueryTile>(base + Shape::kDo + stage * QueryTile::kBytes, maps.d_o, do_full,
                              head, s.q_row, first);
        }
        if (++stage == kStages) stage = 0, phase ^= 1;
      }
    }
    BarrierWait(base + Shape::kQFree + stage * 8, phase ^ 1);
    if (lane == 0) BarrierArrive(base + Shape::kQFull + stage * 8);
    publish({0, 0, Shape::kEnd, 0});
  }
};

// Rows [from, kRows) of a tile become zeros.
template <typename Tile>
__device__ __forceinline__ void ZeroRows(char* tile, int from, int thread, int threads) {
  constexpr int kPieces = Tile::kChunks * 8;
  for (int i = thread + from * kPieces; i < Tile::kRows * kPieces; i += threads) {
    const int row = i / kPieces, column = i % kPieces * 8;
    *reinterpret_cast<int4*>(tile + Tile::Offset(row, column)) = make_int4(0, 0, 0, 0);
  }
}

// A warpgroup's 64 rows by 8 kN columns of accumulators, rounded, into a swizzled tile.
template <typename T, typename Tile, int kCount>
__device__ __forceinline__ void StoreAccumulators(uint32_t tile, int row, const float (&c)[kCount],
                                                  float scale, int thread) {
  const int lane = thread % 32, lane_row = row + thread / 32 * 16 + lane % 16;
#pragma unroll
  for (int n = 0; n < kCount / 8; ++n) {
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      r[i] = Pack<T>(c[n * 8 + i * 2] * scale, c[n * 8 + i * 2 + 1] * scale);
    StoreMatrices(tile + Tile::Offset(lane_row, n * 16 + lane / 16 * 8), r);
  }
}

// A warpgroup that computes.
template <typename T, int kDim, bool kPlain>
struct Worker {
  using Shape = BackwardShape<kDim>;
  using KeyTile = typename Shape::KeyTile;
  using QueryTile = typename Shape::QueryTile;
  using ScoreTile = typename Shape::ScoreTile;
  using Step = typename Shape::Step;
  static constexpr int kQueries = Shape::kQueries, kScores = kQueries / 2, kSums = kDim / 2;
  static constexpr int kDqSums = Shape::kDqColumns / 2;

  const AttentionParams& p;
  const Sequence& s;
  char* const shared;
  const uint32_t base;
  const int first_key, kv_head;
  const int group, thread;  // which warpgroup of the two, and its thread

  // D = K Q^T or V dO^T: this warpgroup's 64 keys by kQueries.
  __device__ __forceinline__ void KeysByQueries(float (&d)[kScores], uint32_t keys,
                                                uint32_t queries) const {
    const uint64_t a = SharedOperand(keys + group * 64 * kChunkRowBytes);
    const uint64_t b = SharedOperand(queries);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      Wgmma<kQueries>::template Shared<T>(d, Advance(a, k / 4 * KeyTile::kChunkBytes + k % 4 * 32),
                                          Advance(b, k / 4 * QueryTile::kChunkBytes + k % 4 * 32),
                                          k > 0);
    }
  }

  // D += A B, A [64 keys, kQueries] in registers, B [kQueries, kDim].
  __device__ __forceinline__ void SumOverQueries(float (&d)[kSums],
                                                 const uint32_t (&a)[kQueries / 16][4],
                                                 uint32_t queries) const {
    const uint64_t b = SharedOperand(queries, QueryTile::kChunkBytes);
#pragma unroll
    for (int k = 0; k < kQueries / 16; ++k) {
      Wgmma<kDim>::template Registers<T, OperandLies::kDown>(d, a[k],
                                                             Advance(b, k * 16 * kChunkRowBytes));
    }
  }

  // This warpgroup's part of dQ = dS K.
  template <int kColumns>
  __device__ __forceinline__ void SumOverKeys(float (&d)[kColumns / 2], uint32_t ds) const {
    constexpr bool kSplit = Shape::kSplitQueries;
    const uint64_t a = SharedOperand(ds + (kSplit ? group * ScoreTile::kChunkBytes : 0));
    const uint64_t b = SharedOperand(base + Shape::kK + (kSplit ? 0 : group * KeyTile::kChunkBytes),
                                     KeyTile::kChunkBytes);
#pragma unroll
    for (int k = 0; k < Shape::kKeys / 16; ++k) {
      Wgmma<kColumns>::template Shared<T, OperandLies::kDown, OperandLies::kDown>(
          d, Advance(a, k * 16 * kChunkRowBytes), Advance(b, k * 16 * kChunkRowBytes), k > 0);
    }
  }

  __device__ __forceinline__ void AddDq(const float (&dq)[kDqSums], const Step& at) const {
    constexpr bool kSplit = Shape::kSplitQueries;
    const int first = at.first + (kSplit ? group * 64 : 0);
    if (kSplit && first >= s.q_len) return;
    const int first_block = kSplit ? 0 : group * 8;
    float* const to = DqTile(p, s, at.head, first) + first_block * (kDqRows * 8) + thread * 4;
#pragma unroll
    for (int n = 0; n < kDqSums / 4; ++n) {
      if ((first_block + n) * 8 < p.head_dim) {
        ReduceAdd(to + n * (kDqRows * 8), dq[n * 4], dq[n * 4 + 1], dq[n * 4 + 2], dq[n * 4 + 3]);
      }
    }
  }

  // Scores become probabilities, 0 where masked.
  __device__ __forceinline__ void Softmax(float (&c)[kScores], const float* lse) const {
    const float scale = p.scale * kLog2E;
    const float2* const pairs = reinterpret_cast<const float2*>(lse) + thread % 4;
#pragma unroll
    for (int n = 0; n < kScores / 4; ++n) {
      const float2 l = pairs[n * 4];
      if constexpr (kPlain) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          c[n * 4 + e] = Exp2(fmaf(c[n * 4 + e], scale, e % 2 ? -l.y : -l.x));
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          c[n * 4 + e] = Probability(c[n * 4 + e], p.scale, e % 2 ? l.y : l.x);
      }
    }
  }
  __device__ __forceinline__ void MaskBand(float (&c)[kScores], int first_query) const {
    const int key = first_key + group * 64 + thread / 32 * 16 + thread % 32 / 4;
    const int query = first_query + thread % 4 * 2, apart = key - query;
    const int low = s.left - apart, queries = s.q_len - query;
    int high[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) high[h] = key + h * 8 < s.kv_len ? s.right - apart : INT32_MIN;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int column = i / 4 * 8 + i % 2, at = i / 2 % 2 * 8 - column;
      const bool attends = at >= low && at < high[i / 2 % 2] && column < queries;
      c[i] = attends ? c[i] : 0.0f;
    }
  }

  // With every option: `prob` is P, and c becomes P times the slope of the softcap.
  __device__ __forceinline__ void AnyProbabilities(uint32_t (&prob)[kQueries / 16][4],
                                                   float (&c)[kScores], const float* lse,
                                                   const Step& at) const {
    const Scores<T> scores(p, s, at.head);
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const int worker = Opaque(thread), n = i / 4, h = i / 2 % 2;
      const int key = first_key + group * 64 + worker / 32 * 16 + worker % 32 / 4 + h * 8;
      const int column = n * 8 + worker % 4 * 2;
      float slope[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        c[i + e] =
            scores.Probability(c[i + e], at.first + column + e, key, lse[column + e], &slope[e]);
      }
      prob[n / 2][n % 2 * 2 + h] = Pack<T>(c[i], c[i + 1]);
#pragma unroll
      for (int e = 0; e < 2; ++e) c[i + e] *= slope[e];
    }
  }

  __device__ __forceinline__ static void PackAll(uint32_t (&to)[kQueries / 16][4],
                                                 const float (&c)[kScores]) {
#pragma unroll
    for (int k = 0; k < kQueries / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[k][i] = Pack<T>(c[k * 8 + i * 2], c[k * 8 + i * 2 + 1]);
    }
  }

  // dS [64 keys, kQueries] of this warpgroup, where the tile at `to` has it.
  __device__ __forceinline__ void StoreDs(uint32_t to,
                                          const uint32_t (&ds)[kQueries / 16][4]) const {
    const int lane = thread % 32, row = group * 64 + thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < kQueries / 16; ++k) {
      StoreMatrices(to + ScoreTile::Offset(row, k * 16 + lane / 16 * 8), ds[k]);
    }
    FenceAsync();
  }

  __device__ __forceinline__ void Arrive(uint32_t barrier) const {
    __syncwarp();
    if (thread % 32 == 0) BarrierArrive(barrier);
  }

  __device__ __forceinline__ void Run() const;
};

template <typename T, int kDim, bool kPlain>
__device__ __forceinline__ void Worker<T, kDim, kPlain>::Run() const {
  constexpr int kStages = Shape::kStages;
  constexpr int kMeet = 1;  // hardware barrier of the workers
  const bool has_dq = p.dq_accum != nullptr;
  float dk[kSums], dv[kSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) dk[i] = dv[i] = 0.0f;

  int step = 0, stage = 0, phase = 0;
  Step before{};  // the tile before this one
  for (;; ++step) {
    const uint32_t q = base + Shape::kQ + stage * QueryTile::kBytes;
    const uint32_t d_o = base + Shape::kDo + stage * QueryTile::kBytes;
    BarrierWait(base + Shape::kQFull + stage * 8, phase);
    const Step at = reinterpret_cast<const Step*>(shared + Shape::kSteps)[stage];
    if (at.flags & Shape::kEnd) break;
    if (step == 0) {
      BarrierWait(base + Shape::kKFull, 0);
      BarrierWait(base + Shape::kVFull, 0);
      if (first_key + Shape::kKeys > s.kv_len && (p.cu_q != nullptr || s.kv_len < s.kv_rows)) {
        ZeroRows<KeyTile>(shared + Shape::kK, s.kv_len - first_key, group * kWarpgroup + thread,
                          Shape::kWorkers);
        FenceAsync();
        BarrierMeet(kMeet, Shape::kWorkers);
      }
    }
    if (at.flags & Shape::kPartial) {
      BarrierWait(base + Shape::kDoFull + stage * 8, phase);
      const int from = s.q_len - at.first, worker = group * kWarpgroup + thread;
      ZeroRows<QueryTile>(shared + (q - base), from, worker, Shape::kWorkers);
      ZeroRows<QueryTile>(shared + (d_o - base), from, worker, Shape::kWorkers);
      FenceAsync();
      BarrierMeet(kMeet, Shape::kWorkers);
    }

    // S = K Q^T, dP = V dO^T.
    float c[kScores], dp[kScores];
    WgmmaFence();
    KeysByQueries(c, base + Shape::kK, q);
    WgmmaCommit();
    BarrierWait(base + Shape::kDoFull + stage * 8, phase);
    KeysByQueries(dp, base + Shape::kV, d_o);
    WgmmaCommit();

    // P.
    WgmmaWait<1>();
    KeepAfter(c);
    if (step > 0) {
      const int last = stage == 0 ? kStages - 1 : stage - 1;
      Arrive(base + Shape::kQFree + last * 8);
    }
    const float* const lse =
        reinterpret_cast<const float*>(shared + Shape::kLse) + stage * kQueries;
    const float* const delta =
        reinterpret_cast<const float*>(shared + Shape::kDelta) + stage * kQueries;
    uint32_t prob[kQueries / 16][4];
    if (!kPlain && (at.flags & Shape::kMasked)) {
      AnyProbabilities(prob, c, lse, at);
    } else {
      Softmax(c, lse);
      if (at.flags & Shape::kMasked) MaskBand(c, at.first);
      PackAll(prob, c);
    }
    WgmmaFence();
    SumOverQueries(dv, prob, d_o);
    WgmmaCommit();

    // dS = P (dP - delta).
    WgmmaWait<1>();
    KeepAfter(dp);
    if (at.flags & Shape::kMasked) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) dp[i] = c[i] == 0.0f ? 0.0f : dp[i];
    }
    {
      const float2* const pairs = reinterpret_cast<const float2*>(delta) + thread % 4;
#pragma unroll
      for (int n = 0; n < kScores / 4; ++n) {
        const float2 d = pairs[n * 4];
#pragma unroll
        for (int e = 0; e < 4; ++e) c[n * 4 + e] *= dp[n * 4 + e] - (e % 2 ? d.y : d.x);
      }
    }
    uint32_t ds[kQueries / 16][4];
    PackAll(ds, c);

    // dQ of the tile before.
    if (has_dq) {
      if (step > 0) BarrierWait(base + Shape::kDsReady, (step - 1) % 2);
      StoreDs(base + Shape::kDs + step % 2 * ScoreTile::kBytes, ds);
    }
    float dq[kDqSums];
    WgmmaFence();
    SumOverKeys<Shape::kDqColumns>(dq, base + Shape::kDs + (step + 1) % 2 * ScoreTile::kBytes);
    WgmmaCommit();
    SumOverQueries(dk, ds, q);
    WgmmaCommit();
    WgmmaWait<1>();
    KeepAfter(dq);
    Arrive(base + Shape::kDoFree + stage * 8);
    if (has_dq) {
      Arrive(base + Shape::kDsReady);
      if (step > 0) AddDq(dq, before);
    }
    before = at;
    if (++stage == kStages) stage = 0, phase ^= 1;
  }

  WgmmaWait<0>();
  KeepAfter(dk);
  KeepAfter(dv);
  if (has_dq && step > 0) {
    float dq[kDqSums];
    BarrierWait(base + Shape::kDsReady, (step - 1) % 2);
    WgmmaFence();
    SumOverKeys<Shape::kDqColumns>(dq, base + Shape::kDs + (step - 1) % 2 * ScoreTile::kBytes);
    WgmmaCommit();
    WgmmaWait<0>();
    KeepAfter(dq);
    AddDq(dq, before);
  }

  // Out: dK where K was, dV where V was.
  BarrierMeet(kMeet, Shape::kWorkers);
  StoreAccumulators<T, KeyTile>(base + Shape::kK, group * 64, dk, p.scale, thread);
  StoreAccumulators<T, KeyTile>(base + Shape::kV, group * 64, dv, 1.0f, thread);
  BarrierMeet(kMeet, Shape::kWorkers);
  const int worker = group * kWarpgroup + thread;
  StoreTile<KeyTile, Shape::kWorkers>(
      shared + Shape::kK, RowsOfHead<T>(p.dk, s.kv_row, p.num_kv_heads, kv_head, p.head_dim),
      first_key, s.kv_rows, worker);
  StoreTile<KeyTile, Shape::kWorkers>(
      shared + Shape::kV, RowsOfHead<T>(p.dv, s.kv_row, p.num_kv_heads, kv_head, p.value_dim),
      first_key, s.kv_rows, worker);
}

template <typename T, int kDim, bool kPlain>
__global__ void __launch_bounds__(BackwardShape<kDim>::kThreads, 1)
    AttentionBackwardKv(const __grid_constant__ AttentionParams p,
                        const __grid_constant__ BackwardMaps maps) {
  using Shape = BackwardShape<kDim>;
  extern __shared__ __align__(1024) char shared[];
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread / 32, 0);

  // Whose keys these are. The first tiles come first, which a causal mask makes the longest; a few
  // heads take turns, or the last head's longest tiles would end alone.
  const int turn = p.tiles * p.heads_apart, first_owner = blockIdx.x / turn * p.heads_apart;
  const int apart = min(p.heads_apart, p.num_pairs - first_owner);
  const int tile = blockIdx.x % turn / apart, owner = first_owner + blockIdx.x % turn % apart;
  const int kv_head = owner % p.num_kv_heads;
  Sequence found;
  int first_key;
  if (!FindTile<Along::kKeys, Shape::kKeys>(p, owner / p.num_kv_heads, tile, &found, &first_key)) {
    return;
  }
  Sequence& s = *reinterpret_cast<Sequence*>(shared + Shape::kSequence);
  if (thread == 0) {
    s = found;
    constexpr int kWarps = Shape::kWorkers / 32;
    BarrierInit(base + Shape::kKFull, 1);
    BarrierInit(base + Shape::kVFull, 1);
    BarrierInit(base + Shape::kDsReady, kWarps);
    for (int i = 0; i < Shape::kStages; ++i) {
      BarrierInit(base + Shape::kQFull + i * 8, 2);
      BarrierInit(base + Shape::kQFree + i * 8, kWarps);
      BarrierInit(base + Shape::kDoFull + i * 8, 1);
      BarrierInit(base + Shape::kDoFree + i * 8, kWarps);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  if (warp < kWarpgroup / 32) {
    GiveRegisters<kLoaderRegisters>();
    if (warp == 0) {
      Loader<T, kDim, kPlain>{p, maps, s, shared, base, first_key, kv_head, thread}.Run();
    }
  } else {
    TakeRegisters<kWorkerRegisters>();
    const int group = warp / (kWarpgroup / 32) - 1;
    Worker<T, kDim, kPlain>{p, s, shared, base, first_key, kv_head, group, thread % kWarpgroup}
        .Run();
  }
}

}  // namespace kvblock::hopper
