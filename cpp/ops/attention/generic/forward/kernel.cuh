// Attention forward on mma.sync: any GPU from sm_80 on, any mask.
//
//   S = Q K^T,  P = exp(scale S - max),  O = P V / rowsum(P),  lse = max + log(rowsum(P))
//
// One CTA computes one query tile of one head: kQueries rows of Q against all the KV tiles that
// they can see, one after the other, with the running maximum and sum of each row (online softmax).
// A warp owns kRowBlocks blocks of 16 rows from start to end, so rows never meet another warp: S, P
// and O stay in its registers, and every fragment of K and V that it reads from shared memory feeds
// kRowBlocks products. Shared memory's bandwidth is the next limit after the tensor cores; that is
// why four warps of 32 rows beat eight of 16 wherever O and S fit in 255 registers.
//
// Shared memory: Q | K, V | K, V: two stages of KV tiles. While tile j is multiplied, tile j + 1
// arrives by cp.async; one barrier a tile separates the stages. Where the fragments of Q are held
// in registers, the second stage takes Q's place. Wide rows of float32 leave room for one stage: V
// arrives while K is multiplied, and the next K while V is, with a barrier for each. At the end O
// goes through the rows of Q, a warp's own, to be written in 16-byte pieces.
//
//   locate the tile, start loading Q and the first K, V
//   for each KV tile of the walk:
//     wait for it, start loading the next
//     S = Q K^T                                  Multiply
//     scale, softcap, bias, mask where needed    FinishScores
//     new maxima; rescale O and sums             Rescale
//     P = exp2(S - max), dropout, O += P V       Accumulate
//   join the sinks, write O and lse              Write
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "device/fast_math.cuh"
#include "device/opaque.cuh"
#include "device/shared.cuh"
#include "ops/attention/contract/params.cuh"
#include "ops/attention/generic/forward/shape.cuh"
#include "ops/attention/generic/fragments.cuh"
#include "ops/attention/generic/product.cuh"
#include "ops/attention/generic/tile.cuh"
#include "ops/attention/mask/dropout.cuh"
#include "ops/attention/mask/forward_scores.cuh"
#include "ops/attention/mask/tile_walk.cuh"
#include "ops/attention/schedule/grid_order.cuh"

namespace kvblock::generic {

// Q of this warp's rows as the A operand, where it is held.
template <typename Traits>
struct QueryFragments {
  static constexpr int kSteps = Traits::kDim / kStep<typename Traits::T>;
  uint32_t held[Traits::kShape.hold_queries ? kSteps : 1][Traits::kRowBlocks][4];
};

template <typename Traits>
__device__ __forceinline__ void LoadQueries(
    uint32_t (&a)[Traits::kRowBlocks][4], uint32_t q_tile, int row, int step,
    const LaneBlock<Traits::QTile::kRowBytes / 2, BlockOrder::kRowsFirst>& at) {
#pragma unroll
  for (int rb = 0; rb < Traits::kRowBlocks; ++rb) {
    LoadMatrices(a[rb], at.Address(q_tile + row * Traits::QTile::kRowBytes, rb * 16, step * 16));
  }
}

// S = Q K^T of this warp's rows.
template <typename Traits>
__device__ __forceinline__ void Multiply(ForwardRows<Traits>& rows,
                                         const QueryFragments<Traits>& queries, uint32_t q_tile,
                                         uint32_t k_tile, int row, int lane) {
  using T = typename Traits::T;
  const LaneBlock<Traits::QTile::kRowBytes / 2, BlockOrder::kRowsFirst> at_q(lane);
  const LaneBlock<Traits::KvTile::kRowBytes / 2, BlockOrder::kColumnsFirst> at_k(lane);
#pragma unroll
  for (int rb = 0; rb < Traits::kRowBlocks; ++rb) {
#pragma unroll
    for (int n = 0; n < Traits::kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) rows.s[rb][n][e] = 0.0f;
    }
  }
  const auto add = [&](auto terms) {
#pragma unroll
    for (int step = 0; step < Traits::kDim / kStep<T>; ++step) {
      uint32_t loaded[Traits::kRowBlocks][4];
      if (!Traits::kShape.hold_queries) LoadQueries<Traits>(loaded, q_tile, row, step, at_q);
      const auto& words = Traits::kShape.hold_queries
                              ? queries.held[Traits::kShape.hold_queries ? step : 0]
                              : loaded;
      Fragment<T, 4> a[Traits::kRowBlocks];
#pragma unroll
      for (int rb = 0; rb < Traits::kRowBlocks; ++rb) a[rb] = Prepare<T>(words[rb]);
#pragma unroll
      for (int n = 0; n < Traits::kKeys / 8; n += 2) {
        uint32_t b[4];
        LoadMatrices(b, at_k.Address(k_tile, n * 8, step * 16));
        MultiplyBlocks<T, decltype(terms)::value, Traits::kRowBlocks>(
            a, Prepare<T>(b), [&](int rb, int j) -> float (&)[4] { return rows.s[rb][n + j]; });
      }
    }
  };
  if constexpr (kSumsApart<T>) {
    add(std::integral_constant<Terms, Terms::kSmall>());
    __syncwarp();  // or ptxas keeps what it has loaded, and spills it
    add(std::integral_constant<Terms, Terms::kLarge>());
  } else {
    add(std::integral_constant<Terms, Terms::kAll>());
  }
}

// Takes the tile's scores into the running maxima; scales O and the sums to the new ones. After the
// first few tiles maxima rarely move, and then there is nothing to scale. With bases, which are the
// maxima, scores become relative to them.
template <typename Traits>
__device__ __forceinline__ void Rescale(const AttentionParams& p, ForwardRows<Traits>& rows,
                                        float to_log2) {
  float correction[Traits::kRowBlocks][2];
  bool moved = false;
#pragma unroll
  for (int rb = 0; rb < Traits::kRowBlocks; ++rb) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float tile_max = rows.s[rb][0][half * 2];
#pragma unroll
      for (int n = 0; n < Traits::kKeys / 8; ++n) {
        tile_max = fmaxf(tile_max, fmaxf(rows.s[rb][n][half * 2], rows.s[rb][n][half * 2 + 1]));
      }
      const float before = rows.max[rb][half];
      rows.max[rb][half] = fmaxf(before, RowMax(tile_max));
      moved |= rows.max[rb][half] != before;
      const float now = Reference(rows.max[rb][half], 1.0f);
      correction[rb][half] = Exp2((before - now) * to_log2);
      if (HasBases(p)) {
#pragma unroll
        for (int n = 0; n < Traits::kKeys / 8; ++n) {
          rows.s[rb][n][half * 2] -= now;
          rows.s[rb][n][half * 2 + 1] -= now;
        }
      }
    }
  }
  if (!__any_sync(~0u, moved)) return;
#pragma unroll
  for (int rb = 0; rb < Traits::kRowBlocks; ++rb) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.sum[rb][half] *= correction[rb][half];
#pragma unroll
      for (int n = 0; n < Traits::kDim / 8; ++n) {
        rows.o[rb][n][half * 2] *= correction[rb][half];
        rows.o[rb][n][half * 2 + 1] *= correction[rb][half];
      }
    }
  }
}

// In place of PairDropout.
struct DropsNothing {
  __device__ __forceinline__ void Drop(float (&)[4], int, int) const {}
};

// A step of P = exp2(S - max) as the A operand, and its sums, which are of what is dropped, too.
template <typename Traits, typename Drops>
__device__ __forceinline__ void Exponentials(
    ForwardRows<Traits>& rows, int step, float to_log2,
    const float (&reference)[Traits::kRowBlocks][2], const Drops& drops,
    Fragment<typename Traits::T, 4> (&a)[Traits::kRowBlocks]) {
  using T = typename Traits::T;
  constexpr int kBlocks = kStep<T> / 8;
#pragma unroll
  for (int rb = 0; rb < Traits::kRowBlocks; ++rb) {
    uint32_t words[4];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      float (&x)[4] = rows.s[rb][kBlocks * step + n];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = Exp2(fmaf(x[e], to_log2, -reference[rb][e / 2]));
        rows.sum[rb][e / 2] += x[e];
      }
      drops.Drop(x, rb, kBlocks * step + n);
      TakeAccumulators<T>(words, n, x);
    }
    a[rb] = Prepare<T>(words);
  }
}

// P = exp2(S - max) and O += P V, a step of keys at a time: the exponentials of the next keys can
// run while the tensor cores work on these. Where sums are to be apart, some steps at a time.
template <typename Traits, typename Drops = DropsNothing>
__device__ __forceinline__ void Accumulate(const AttentionParams& p, ForwardRows<Traits>& rows,
                                           float to_log2, uint32_t v_tile, int lane,
                                           const Drops& drops = {}) {
  using T = typename Traits::T;
  constexpr int kRowBlocks = Traits::kRowBlocks, kBlocks = kColumnBlocks<T, Traits::kDim>;
  constexpr int kTogether = kStepsTogether<T, Traits::kDim>;
  const OperandB<typename Traits::KvTile, Lies::kDown> v{v_tile, 0};
  float reference[kRowBlocks][2];
#pragma unroll
  for (int rb = 0; rb < kRowBlocks; ++rb) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reference[rb][half] = HasBases(p) ? 0.0f : Reference(rows.max[rb][half], to_log2);
    }
  }
#pragma unroll
  for (int first = 0; first < Traits::kKeys / kStep<T>; first += kTogether) {
    Fragment<T, 4> a[kTogether][kRowBlocks];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      Exponentials<Traits>(rows, first + i, to_log2, reference, drops, a[i]);
    }
#pragma unroll
    for (int n = 0; n < Traits::kDim / 8; n += kBlocks) {
      float apart[kRowBlocks][kBlocks][4];
      Clear(apart);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        uint32_t b[kBlocks * 2];
        v.template LoadColumns<kBlocks>(b, lane, n, first + i);
        MultiplyBlocks<T, Terms::kAll, kRowBlocks>(
            a[i], Prepare<T>(b), [&](int rb, int j) -> float (&)[4] {
              return kSumsApart<T> ? apart[rb][j] : rows.o[rb][n + j];
            });
      }
      if constexpr (kSumsApart<T>) {
#pragma unroll
        for (int rb = 0; rb < kRowBlocks; ++rb) {
#pragma unroll
          for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) rows.o[rb][n + j][e] += apart[rb][j][e];
          }
        }
      }
    }
  }
}

// Joins the sink, divides by the sums, and writes O (through this warp's rows of the Q tile), lse
// and the base for the rows that exist.
template <typename Traits>
__device__ __forceinline__ void Write(const DroppingParams& p, const Sequence& s, int head,
                                      ForwardRows<Traits>& rows, float to_log2, uint32_t q_tile,
                                      char* shared_q, int first, int row, int lane) {
  using T = typename Traits::T;
  const bool sinks = p.sinks != nullptr;
  // Maxima and the sink are exponents of 2 here, but based ones scores: their differences are.
  const float unit = HasBases(p) ? kLog2E : 1.0f;
  const float sink =
      sinks ? __ldg(p.sinks +
                    static_cast<int64_t>(BatchRow(p, p.sink_batch, s.batch)) * p.num_heads + head) *
                  (kLog2E / unit)
            : -INFINITY;
  __syncwarp();  // other lanes have read the rows of Q that this one writes
#pragma unroll
  for (int rb = 0; rb < Traits::kRowBlocks; ++rb) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int in_tile = row + rb * 16 + half * 8 + lane / 4, query = first + in_tile;
      float sum = RowSum(rows.sum[rb][half]);
      float max = rows.max[rb][half] * (HasBases(p) ? 1.0f : to_log2);
      float factor = 1.0f;
      if (sinks) {  // one more score, with no value
        const float joint = fmaxf(max, sink), reference = Reference(joint, 1.0f);
        factor = Exp2((max - reference) * unit);
        sum = sum * factor + (sink == joint ? 1.0f : Exp2((sink - reference) * unit));
        if (joint == -INFINITY) sum = 0.0f;
        max = joint;
      }
      const bool nothing = sum == 0.0f || query >= s.q_len;
      if (p.lse != nullptr && lane % 4 == 0 && query < s.q_rows) {
        StoreLse(p, s.LseRow(p, head) + query, nothing, max * (unit * kLn2), logf(sum));
      }
      factor = factor / sum * p.dropout.scale;
#pragma unroll
      for (int n = 0; n < Traits::kDim / 8; ++n) {
        const float low = nothing ? 0.0f : rows.o[rb][n][half * 2] * factor;
        const float high = nothing ? 0.0f : rows.o[rb][n][half * 2 + 1] * factor;
        if constexpr (kIsFloat32<T>) {
          *reinterpret_cast<float*>(
              shared_q + Traits::QTile::Offset(in_tile, ColumnDown<kColumnBlocks<T, Traits::kDim>>(
                                                            lane, n, 0))) = low;
          *reinterpret_cast<float*>(
              shared_q + Traits::QTile::Offset(in_tile, ColumnDown<kColumnBlocks<T, Traits::kDim>>(
                                                            lane, n, 1))) = high;
        } else {
          *reinterpret_cast<uint32_t*>(
              shared_q + Traits::QTile::Offset(in_tile, n * 8 + lane % 4 * 2)) = Pack<T>(low, high);
        }
      }
    }
  }
  __syncwarp();
  const HeadRows o = RowsOfHead<T>(p.o, s.q_row, p.num_heads, head, p.value_dim);
  char* const to = const_cast<char*>(o.first);
#pragma unroll 4
  for (int r = lane / 8; r < Traits::kRowBlocks * 16; r += 4) {
    const int query = first + row + r;
#pragma unroll
    for (int c = 0; c < Traits::kDim; c += 8 * Traits::QTile::kColumnsOfChunk) {
      const int column = c + lane % 8 * Traits::QTile::kColumnsOfChunk;
      if (query < s.q_rows && column < p.value_dim) {
        *reinterpret_cast<uint4*>(to + query * o.stride + column * sizeof(T)) =
            *reinterpret_cast<const uint4*>(shared_q + Traits::QTile::Offset(row + r, column));
      }
    }
  }
}

template <typename T, int kDim>
__global__ void __launch_bounds__(ForwardTraits<T, kDim>::kThreads,
                                  ForwardTraits<T, kDim>::kShape.ctas)
    AttentionForward(const __grid_constant__ DroppingParams p) {
  using Traits = ForwardTraits<T, kDim>;
  using QTile = typename Traits::QTile;
  using KvTile = typename Traits::KvTile;
  constexpr int kThreads = Traits::kThreads, kStages = Traits::kShape.stages;
  char* const shared = DynamicShared();
  // What is needed once a tile lives in shared memory: registers are for O and S.
  __shared__ struct {
    Sequence sequence;
    int head, first;
    HeadRows k, v;
    WalkState walk[kThreads / 32];
  } parked;
  const uint32_t q_tile = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  // Computed afresh at every use: a register for each would be spilled.
  const auto thread = [] { return Opaque(static_cast<int>(threadIdx.x)); };
  const auto lane = [&] { return thread() % 32; };
  const auto row = [&] { return thread() / 32 * (Traits::kRowBlocks * 16); };  // the warp's first

  const GridPlace place = LastTilesFirst(p, blockIdx.x);
  const int pair = place.pair, tile = place.tile;
  int first;
  const int head = pair % p.num_heads;
  {
    Sequence found;
    if (!FindTile<Along::kQueries, Traits::kQueries>(p, pair / p.num_heads, tile, &found, &first)) {
      return;
    }
    TileWalk<Along::kKeys, Traits::kKeys> walk(p, found, head, first,
                                               min(first + Traits::kQueries, found.q_len));
    if (thread() == 0) {
      parked.sequence = found;
      parked.head = head;
      parked.first = first;
      parked.k = RowsOfHead<T>(p.k, found.kv_row, p.num_kv_heads, head / p.group, p.head_dim);
      parked.v = RowsOfHead<T>(p.v, found.kv_row, p.num_kv_heads, head / p.group, p.value_dim);
    }
    if (lane() == 0) parked.walk[thread() / 32] = walk.state();
    __syncthreads();
  }
  const Sequence& s = parked.sequence;
  const ScoreRules rules = MakeScoreRules(p);

  ForwardRows<Traits> rows;
  BeginRows(rows);

  int key = 0;
  bool all_visible = false;
  const auto next = [&] {
    WalkState& at = parked.walk[thread() / 32];
    TileWalk<Along::kKeys, Traits::kKeys> walk(p, s, at);
    const bool found = walk.Next();
    key = walk.first();
    all_visible = walk.all_visible();
    __syncwarp();  // all lanes have read it; before the next call there is a barrier
    if (lane() == 0) at = walk.state();
    return found;
  };
  const auto k_tile = [&](int stage) {
    return q_tile + (stage == 0 ? Traits::kStage0 : Traits::kStage1);
  };
  const auto v_tile = [&](int stage) { return k_tile(stage) + KvTile::kBytes; };
  const auto load_k = [&](int stage) {
    LoadTileAsync<KvTile, kThreads>(k_tile(stage), parked.k, key, s.kv_len, thread());
  };
  const auto load_v = [&](int stage, int key) {
    LoadTileAsync<KvTile, kThreads>(v_tile(stage), parked.v, key, s.kv_len, thread());
  };
  bool more = next();
  if (more) {
    const HeadRows q = RowsOfHead<T>(p.q, s.q_row, p.num_heads, head, p.head_dim);
    LoadTileAsync<QTile, kThreads>(q_tile, q, first, s.q_len, thread());
    load_k(0);
    if constexpr (kStages == 2) load_v(0, key);
  }
  CopyAsyncCommit();

  QueryFragments<Traits> queries;
  if (more && Traits::kShape.hold_queries) {
    CopyAsyncWait<0>();
    __syncthreads();
    const LaneBlock<QTile::kRowBytes / 2, BlockOrder::kRowsFirst> at_q(lane());
#pragma unroll
    for (int step = 0; step < QueryFragments<Traits>::kSteps; ++step) {
      LoadQueries<Traits>(queries.held[Traits::kShape.hold_queries ? step : 0], q_tile, row(), step,
                          at_q);
    }
  }

#pragma unroll 1
  for (int stage = 0; more; stage ^= kStages - 1) {
    CopyAsyncWait<0>();
    __syncthreads();  // this tile has arrived for all, and all are done with the other stage
    // Opaque: each takes one register, and nothing computed from it does.
    const int key_now = Opaque(key);
    const bool whole_now = Opaque(all_visible);
    if constexpr (kStages == 1) load_v(0, key_now);
    more = next();
    if (kStages == 2 && more) {
      load_k(stage ^ 1);
      load_v(stage ^ 1, key);
    }
    CopyAsyncCommit();

    Multiply<Traits>(rows, queries, q_tile, k_tile(stage), row(), lane());
    if (rules.finish || !whole_now) {
      FinishScores<Traits>(p, s, rules, !whole_now, p.q_segments != nullptr, parked.head, rows,
                           parked.first + row(), key_now, lane());
    }
    Rescale<Traits>(p, rows, rules.to_log2);
    if constexpr (kStages == 1) {
      CopyAsyncWait<0>();
      __syncthreads();  // V has arrived for all, and all are done with K
      if (more) load_k(0);
      CopyAsyncCommit();
    }
    if (p.dropout.keys == nullptr) {
      Accumulate<Traits>(p, rows, rules.to_log2, v_tile(stage), lane());
    } else {
      const PairDropout drops(p, s, parked.head, parked.first + row(), key_now, lane());
      Accumulate<Traits>(p, rows, rules.to_log2, v_tile(stage), lane(), drops);
    }
  }
  if (Traits::kShape.hold_queries) __syncthreads();  // O's way out is a stage that others may read
  Write<Traits>(p, s, parked.head, rows, rules.to_log2, q_tile, shared, parked.first, row(),
                lane());
}

}  // namespace kvblock::generic
