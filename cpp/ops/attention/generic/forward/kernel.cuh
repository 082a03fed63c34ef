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
// in registers, the second stage takes Q's place. At the end O goes through the rows of Q, a warp's
// own, to be written in 16-byte pieces.
//
//   locate the tile, start loading Q and the first K, V
//   for each KV tile of the walk:
//     wait for it, start loading the next
//     S = Q K^T                                  Multiply
//     scale, softcap, bias, mask where needed    FinishScores
//     new maxima; rescale O and sums             Rescale
//     P = exp2(S - max), O += P V                Accumulate
//   join the sinks, write O and lse              Write
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/fast_math.cuh"
#include "device/mma.cuh"
#include "device/opaque.cuh"
#include "device/shared.cuh"
#include "ops/attention/contract/params.cuh"
#include "ops/attention/generic/tile.cuh"
#include "ops/attention/mask/forward_scores.cuh"
#include "ops/attention/mask/tile_walk.cuh"
#include "ops/attention/schedule/grid_order.cuh"

namespace kvblock::generic {

// The tile sizes of each padded head dim. At most 96 KiB of shared memory, so that consumer GPUs
// (99 KiB) run the same instances. docs/attention_log.md has what else was measured.
struct ForwardShape {
  int queries, keys, warps;
  int ctas;           // on one multiprocessor; fixes the registers a thread may have
  bool hold_queries;  // Q's fragments stay in registers, and a KV stage takes Q's place
};
constexpr ForwardShape ForwardShapeOf(int dim) {
  return dim == 64    ? ForwardShape{128, 128, 4, 2, false}
         : dim == 128 ? ForwardShape{128, 64, 4, 2, false}
         : dim == 192 ? ForwardShape{128, 64, 8, 1, true}
                      : ForwardShape{64, 32, 4, 2, true};
}

template <typename T_, int kDim_>
struct ForwardTraits {
  using T = T_;
  static constexpr int kDim = kDim_;
  static constexpr ForwardShape kShape = ForwardShapeOf(kDim);
  static constexpr int kQueries = kShape.queries, kKeys = kShape.keys;
  static constexpr int kThreads = kShape.warps * 32;
  static constexpr int kRowBlocks = kQueries / kShape.warps / 16;
  using QTile = SharedTile<kQueries, kDim>;
  using KvTile = SharedTile<kKeys, kDim>;
  // Where the two stages of K and V begin; Q begins at 0.
  static constexpr int kStageBytes = 2 * KvTile::kBytes;
  static constexpr int kHeldBytes = QTile::kBytes > kStageBytes ? QTile::kBytes : kStageBytes;
  static constexpr int kStage0 = kShape.hold_queries ? kHeldBytes : QTile::kBytes;
  static constexpr int kStage1 = kShape.hold_queries ? 0 : kStage0 + kStageBytes;
  static constexpr int kSharedBytes = kStageBytes + (kStage1 == 0 ? kStage0 : kStage1);
};

// Q of this warp's rows as the A operand, where it is held.
template <typename Traits>
struct QueryFragments {
  static constexpr int kSteps = Traits::kDim / 16;
  uint32_t held[Traits::kShape.hold_queries ? kSteps : 1][Traits::kRowBlocks][4];
};

template <typename Traits>
__device__ __forceinline__ void LoadQueries(
    uint32_t (&a)[Traits::kRowBlocks][4], uint32_t q_tile, int row, int step,
    const LaneBlock<Traits::kDim, BlockOrder::kRowsFirst>& at) {
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
  const LaneBlock<Traits::kDim, BlockOrder::kRowsFirst> at_q(lane);
  const LaneBlock<Traits::kDim, BlockOrder::kColumnsFirst> at_k(lane);
#pragma unroll
  for (int rb = 0; rb < Traits::kRowBlocks; ++rb) {
#pragma unroll
    for (int n = 0; n < Traits::kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) rows.s[rb][n][e] = 0.0f;
    }
  }
#pragma unroll
  for (int step = 0; step < Traits::kDim / 16; ++step) {
    uint32_t loaded[Traits::kRowBlocks][4];
    if (!Traits::kShape.hold_queries) LoadQueries<Traits>(loaded, q_tile, row, step, at_q);
    const auto& a =
        Traits::kShape.hold_queries ? queries.held[Traits::kShape.hold_queries ? step : 0] : loaded;
#pragma unroll
    for (int n = 0; n < Traits::kKeys / 16; ++n) {
      uint32_t b[4];
      LoadMatrices(b, at_k.Address(k_tile, n * 16, step * 16));
#pragma unroll
      for (int rb = 0; rb < Traits::kRowBlocks; ++rb) {
        Mma16x8x16<typename Traits::T>(rows.s[rb][2 * n], a[rb], b[0], b[1]);
        Mma16x8x16<typename Traits::T>(rows.s[rb][2 * n + 1], a[rb], b[2], b[3]);
      }
    }
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

// P = exp2(S - max) and O += P V, 16 keys at a time: the exponentials of the next 16 keys can run
// while the tensor cores work on these.
template <typename Traits>
__device__ __forceinline__ void Accumulate(const AttentionParams& p, ForwardRows<Traits>& rows,
                                           float to_log2, uint32_t v_tile, int lane) {
  using T = typename Traits::T;
  const LaneBlock<Traits::kDim, BlockOrder::kRowsFirst> at_v(lane);
  float reference[Traits::kRowBlocks][2];
#pragma unroll
  for (int rb = 0; rb < Traits::kRowBlocks; ++rb) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reference[rb][half] = HasBases(p) ? 0.0f : Reference(rows.max[rb][half], to_log2);
    }
  }
#pragma unroll
  for (int step = 0; step < Traits::kKeys / 16; ++step) {
    uint32_t a[Traits::kRowBlocks][4];
#pragma unroll
    for (int rb = 0; rb < Traits::kRowBlocks; ++rb) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float (&x)[4] = rows.s[rb][2 * step + n];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x[e] = Exp2(fmaf(x[e], to_log2, -reference[rb][e / 2]));
          rows.sum[rb][e / 2] += x[e];
        }
        a[rb][2 * n] = Pack<T>(x[0], x[1]);
        a[rb][2 * n + 1] = Pack<T>(x[2], x[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < Traits::kDim / 16; ++n) {
      uint32_t b[4];
      LoadMatricesTransposed(b, at_v.Address(v_tile, step * 16, n * 16));
#pragma unroll
      for (int rb = 0; rb < Traits::kRowBlocks; ++rb) {
        Mma16x8x16<T>(rows.o[rb][2 * n], a[rb], b[0], b[1]);
        Mma16x8x16<T>(rows.o[rb][2 * n + 1], a[rb], b[2], b[3]);
      }
    }
  }
}

// Joins the sink, divides by the sums, and writes O (through this warp's rows of the Q tile), lse
// and the base for the rows that exist.
template <typename Traits>
__device__ __forceinline__ void Write(const AttentionParams& p, const Sequence& s, int head,
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
      factor /= sum;
#pragma unroll
      for (int n = 0; n < Traits::kDim / 8; ++n) {
        const float low = nothing ? 0.0f : rows.o[rb][n][half * 2] * factor;
        const float high = nothing ? 0.0f : rows.o[rb][n][half * 2 + 1] * factor;
        *reinterpret_cast<uint32_t*>(
            shared_q + Traits::QTile::Offset(in_tile, n * 8 + lane % 4 * 2)) = Pack<T>(low, high);
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
    for (int c = 0; c < Traits::kDim; c += 64) {
      const int column = c + lane % 8 * 8;
      if (query < s.q_rows && column < p.value_dim) {
        *reinterpret_cast<uint4*>(to + query * o.stride + column * sizeof(T)) =
            *reinterpret_cast<const uint4*>(shared_q + Traits::QTile::Offset(row + r, column));
      }
    }
  }
}

template <typename T, int kDim>
__global__ void __launch_bounds__(ForwardTraits<T, kDim>::kThreads, ForwardShapeOf(kDim).ctas)
    AttentionForward(const __grid_constant__ AttentionParams p) {
  using Traits = ForwardTraits<T, kDim>;
  using QTile = typename Traits::QTile;
  using KvTile = typename Traits::KvTile;
  constexpr int kThreads = Traits::kThreads;
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
#pragma unroll
  for (int rb = 0; rb < Traits::kRowBlocks; ++rb) {
    rows.max[rb][0] = rows.max[rb][1] = -INFINITY;
    rows.sum[rb][0] = rows.sum[rb][1] = 0.0f;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) rows.o[rb][n][e] = 0.0f;
    }
  }

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
  const auto load = [&](int stage) {
    LoadTileAsync<KvTile, kThreads>(k_tile(stage), parked.k, key, s.kv_len, thread());
    LoadTileAsync<KvTile, kThreads>(v_tile(stage), parked.v, key, s.kv_len, thread());
  };
  bool more = next();
  if (more) {
    const HeadRows q = RowsOfHead<T>(p.q, s.q_row, p.num_heads, head, p.head_dim);
    LoadTileAsync<QTile, kThreads>(q_tile, q, first, s.q_len, thread());
    load(0);
  }
  CopyAsyncCommit();

  QueryFragments<Traits> queries;
  if (more && Traits::kShape.hold_queries) {
    CopyAsyncWait<0>();
    __syncthreads();
    const LaneBlock<kDim, BlockOrder::kRowsFirst> at_q(lane());
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      LoadQueries<Traits>(queries.held[Traits::kShape.hold_queries ? step : 0], q_tile, row(), step,
                          at_q);
    }
  }

#pragma unroll 1
  for (int stage = 0; more; stage ^= 1) {
    CopyAsyncWait<0>();
    __syncthreads();  // this tile has arrived for all, and all are done with the other stage
    // Opaque: each takes one register, and nothing computed from it does.
    const int key_now = Opaque(key);
    const bool whole_now = Opaque(all_visible);
    more = next();
    if (more) load(stage ^ 1);
    CopyAsyncCommit();

    Multiply<Traits>(rows, queries, q_tile, k_tile(stage), row(), lane());
    if (rules.finish || !whole_now) {
      FinishScores<Traits>(p, s, rules, !whole_now, p.q_segments != nullptr, parked.head, rows,
                           parked.first + row(), key_now, lane());
    }
    Rescale<Traits>(p, rows, rules.to_log2);
    Accumulate<Traits>(p, rows, rules.to_log2, v_tile(stage), lane());
  }
  if (Traits::kShape.hold_queries) __syncthreads();  // O's way out is a stage that others may read
  Write<Traits>(p, s, parked.head, rows, rules.to_log2, q_tile, shared, parked.first, row(),
                lane());
}

}  // namespace kvblock::generic
