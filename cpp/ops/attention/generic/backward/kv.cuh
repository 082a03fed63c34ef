// Gradients of keys and values, and by the way of queries, on tensor cores of sm_80 and newer.
//
// One CTA owns kKeys keys of one KV head: K, V and the float32 sums dK and dV stay with it while it
// walks over the query heads of its group and, for each, over the tiles of kQueries queries that
// see it. So dK and dV are written once, in a fixed order. For one query tile:
//
//   S  = Q K^T             [kQueries, kKeys]     P  = exp(scale S - lse)
//   dP = dO V^T            [kQueries, kKeys]     dS = P (dP - delta)
//   dV += P^T dO           [kKeys, kDim]
//   dK += dS^T Q           [kKeys, kDim]         times scale at the end
//   dQ  = dS K             [kQueries, kDim]      added to dq_accum in global memory, unscaled
//
// L1 takes a cycle for each row of memory that an addition of a warp touches. In dq_accum 8 rows of
// 8 columns lie together, so the warp adds to 256 bytes in a row, or to two pieces where a sequence
// begins within such a block, instead of to 8 pieces of 32.
//
// Eight warps, numbered (pair, half), pair = warp / 2. In S and dP a warp has its pair's quarter of
// the keys and one half of the queries; in dV and dK the same keys and one half of the columns:
// there a warp needs P and dS of its own pair only. dQ sums over all keys and needs everyone's dS.
// Even and odd warps run on different schedulers, pairs 0 and 2 and pairs 1 and 3 on the same, so a
// scheduler may run one pair's exponentials under another pair's products.
//
// Nobody waits for everybody at one place. Three kinds of barriers in shared memory are arrived at
// early and waited for late:
//
//   landed[stage]  the copies of Q, dO, lse and delta: waited for at the top
//   ds_ready       a warp has written P and dS: waited for after dV and dK, before dQ
//   done           a warp has read all it needs of a query tile: waited for by the next query tile
//                  before it writes P and dS and refills the stage that the tile had
//
// Shared memory: K and V; P and dS as [kQueries, kKeys]; lse and delta; Q and dO in one stage or
// two. ldmatrix reads each operand as it lies or transposed; of float32 that lies down ordinary
// loads do, and keys of a tile of scores have an order of their own (kv_results.cuh). At the end dK
// and dV pass through the places of K and V, to be written in whole rows.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/mbarrier.cuh"
#include "device/opaque.cuh"
#include "device/reduce_add.cuh"
#include "device/shared.cuh"
#include "ops/attention/generic/backward/dq_rows.h"
#include "ops/attention/generic/backward/kv_results.cuh"
#include "ops/attention/generic/backward/kv_shape.cuh"
#include "ops/attention/generic/product.cuh"
#include "ops/attention/generic/tile.cuh"
#include "ops/attention/mask/backward_scores.cuh"
#include "ops/attention/mask/dropout.cuh"
#include "ops/attention/mask/tile_walk.cuh"
#include "ops/attention/schedule/grid_order.cuh"

namespace kvblock::generic {

template <typename T, int kDim>
__global__ void __launch_bounds__(BackwardKvShape<T, kDim>::kThreads, 1)
    AttentionBackwardKv(const __grid_constant__ DroppingParams p,
                        const __grid_constant__ BackwardKvPlan plan) {
  using Shape = BackwardKvShape<T, kDim>;
  using KeyTile = typename Shape::KeyTile;
  using QueryTile = typename Shape::QueryTile;
  using ScoreTile = typename Shape::ScoreTile;
  constexpr int kQueries = Shape::kQueries, kKeys = Shape::kKeys;
  constexpr int kThreads = Shape::kThreads;
  constexpr int kM = Shape::kScoreM, kN = Shape::kScoreN;

  char* const shared = DynamicShared();
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t landed = base + Shape::kLanded, ds_ready = base + Shape::kDsReady;
  const uint32_t done = base + Shape::kDone;
  const int thread = threadIdx.x, lane = thread % 32;
  // The lane's number, read again: no register holds it for long.
  const auto lane_now = [] { return Opaque(static_cast<int>(threadIdx.x)) % 32; };
  const int warp = __shfl_sync(~0u, thread / 32, 0);  // the compiler keeps it in a uniform register

  // Whose keys these are.
  const GridPlace place = FirstTilesFirst(p, blockIdx.x);
  const int kv_head = place.pair % p.num_kv_heads;
  Sequence found;
  int found_first;
  if (!FindTile<Along::kKeys, kKeys>(p, place.pair / p.num_kv_heads, place.tile, &found,
                                     &found_first))
    return;
  BackwardKeys& keys = *reinterpret_cast<BackwardKeys*>(shared + Shape::kKeysOf);
  BackwardWalk& parked = reinterpret_cast<BackwardWalk*>(shared + Shape::kWalk)[warp];
  const Sequence& s = keys.sequence;
  if (thread == 0) {
    const int64_t at = found.q_row * p.num_heads, lse_row = found.LseRow(p, 0);
    keys = {found,
            found_first,
            kv_head,
            static_cast<const char*>(p.q) + at * p.head_dim * sizeof(T),
            static_cast<const char*>(p.d_o) + at * p.value_dim * sizeof(T),
            p.lse + lse_row,
            p.delta + lse_row,
            p.dq_accum + found.q_row / 8 * 8 * p.head_dim,
            static_cast<int>(found.q_row % 8),
            DqRows(p) * p.head_dim};
    BarrierInit(landed, kThreads);
    BarrierInit(landed + 8, kThreads);
    BarrierInit(ds_ready, kThreads);
    BarrierInit(done, kThreads);
  }
  __syncthreads();

  // The walk: heads of the group, tiles of queries of each. Step `step` finds its tile in
  // parked.tiles[step % 2].
  using Walk = TileWalk<Along::kQueries, kQueries>;
  using Tile = BackwardWalk::Tile;
  const auto walk_on = [&](Walk walk, int step, int head) {
    const bool more = walk.Next();
    __syncwarp();
    if (lane == 0) {
      parked.state = walk.state();
      parked.tiles[step % 2] = {head, walk.first(), walk.all_visible()};
    }
    __syncwarp();
    return more;
  };
  const auto start_head = [&](int step, int head) {
    return walk_on(Walk(p, s, head, keys.first, keys.first + kKeys), step, head);
  };
  const auto next = [&](int step) {
    const int end_head = (keys.head + 1) * p.group;
    if (step == 0) {
      int head = keys.head * p.group;
      while (!start_head(0, head)) {
        if (++head == end_head) return false;
      }
      return true;
    }
    const Tile before = parked.tiles[(step - 1) % 2];
    const unsigned pending = parked.state.pending;
    if (pending != 0) {  // what Walk::Next does nearly always, without loading all its state
      const int bit = __ffs(pending) - 1;
      const Tile tile{before.head, parked.state.window + bit * kQueries,
                      (parked.state.whole >> bit & 1) != 0};
      __syncwarp();
      if (lane == 0) {
        parked.state.pending = pending & (pending - 1);
        parked.tiles[step % 2] = tile;
      }
      __syncwarp();
      return true;
    }
    bool more = walk_on(Walk(p, s, parked.state), step, before.head);
    for (int head = before.head + 1; !more && head < end_head; ++head) {
      more = start_head(step, head);
    }
    return more;
  };
  const auto load = [&](int step) {
    const int stage = plan.stages == 2 ? step % 2 : 0;
    const int head = parked.tiles[step % 2].head, first = parked.tiles[step % 2].first;
    const int at_thread = Opaque(thread);
    const uint32_t to = base + Shape::kStage + stage * Shape::kStageBytes;
    LoadTileAsync<QueryTile, kThreads>(to, RowsOfHead<T>(keys.q, 0, p.num_heads, head, p.head_dim),
                                       first, s.q_len, at_thread);
    LoadTileAsync<QueryTile, kThreads>(to + QueryTile::kBytes,
                                       RowsOfHead<T>(keys.d_o, 0, p.num_heads, head, p.value_dim),
                                       first, s.q_len, at_thread);
    if (at_thread < 2 * kQueries) {
      const float* from = (at_thread < kQueries ? keys.lse : keys.delta) + head * p.q_len;
      const int row = first + at_thread % kQueries;
      const int to = at_thread < kQueries ? Shape::kLse : Shape::kDelta - kQueries * 4;
      CopyAsync<4>(shared + to + (stage * kQueries + at_thread) * 4,
                   row < s.q_len ? from + row : nullptr);
    }
    BarrierArriveAfterCopies(landed + stage * 8);
  };

  float dk[Shape::kKvM][Shape::kKvN][4], dv[Shape::kKvM][Shape::kKvN][4];
  Clear(dk);
  Clear(dv);

  bool more = next(0);
  if (more) {
    LoadTileAsync<KeyTile, kThreads>(
        base + Shape::kK, RowsOfHead<T>(p.k, s.kv_row, p.num_kv_heads, kv_head, p.head_dim),
        keys.first, s.kv_len, thread);
    LoadTileAsync<KeyTile, kThreads>(
        base + Shape::kV, RowsOfHead<T>(p.v, s.kv_row, p.num_kv_heads, kv_head, p.value_dim),
        keys.first, s.kv_len, thread);
    load(0);
  }

  const int pair = warp / 2, half = warp % 2;
  const int score_row = half * (kQueries / 2), key_row = pair * Shape::kPairKeys;
  int step = 0;
  for (; more; ++step) {
    const int stage = plan.stages == 2 ? step % 2 : 0;
    const BackwardWalk::Tile& at = parked.tiles[step % 2];
    const uint32_t q = base + Shape::kStage + stage * Shape::kStageBytes;
    const uint32_t d_o = base + Shape::kStage + stage * Shape::kStageBytes + QueryTile::kBytes;
    BarrierWait(landed + stage * 8, (plan.stages == 2 ? step / 2 : step) % 2);

    // S = Q K^T.
    float prob[kM][kN][4];
    Clear(prob);
    Product<T, kDim / kStep<T>>(prob, OperandA<QueryTile, Lies::kAcross>{q, score_row},
                                OperandB<KeyTile, Lies::kAcross>{base + Shape::kK, key_row}, lane);

    // dP - delta = dO V^T - delta, and P = exp(scale S - lse) under it. With dropout the first, and
    // all that is summed up, is 1 - rate times that.
    float ds[kM][kN][4];
    const int first_row = score_row + lane_now() / 4;
    const auto row_of = [&](int m, int h) { return first_row + m * 16 + h * 8; };
    const float* const lse_rows =
        reinterpret_cast<const float*>(shared + Shape::kLse) + stage * kQueries;
    const float* const delta_rows =
        reinterpret_cast<const float*>(shared + Shape::kDelta) + stage * kQueries;
    // Four rows' lse stay in registers (3 % faster at head dim 128); for eight there is no room.
    constexpr bool kHoldLse = kM <= 2 && kDim < 256;
    float lse[kHoldLse ? kM : 1][2];
    if constexpr (kHoldLse) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) lse[m][h] = lse_rows[row_of(m, h)];
      }
    }
    const auto lse_of = [&](int m, int h) {
      if constexpr (kHoldLse) {
        return lse[m][h];
      } else {
        return lse_rows[row_of(m, h)];
      }
    };
    bool blind = false;  // whether a row of this lane sees nothing
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      blind = blind || lse_of(m, 0) == -INFINITY || lse_of(m, 1) == -INFINITY;
    }
    const bool plain = (at.visible || (p.q_segments == nullptr && p.tile_masks == nullptr)) &&
                       p.softcap == 0.0f && p.bias == nullptr && p.dropout.keys == nullptr &&
                       !__any_sync(~0u, blind);
    const auto start_with_delta = [&](float kept) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float delta = delta_rows[row_of(m, h)] * kept;
#pragma unroll
          for (int n = 0; n < kN; ++n) ds[m][n][2 * h] = ds[m][n][2 * h + 1] = -delta;
        }
      }
    };
    const OperandA<QueryTile, Lies::kAcross> do_rows{d_o, score_row};
    const OperandB<KeyTile, Lies::kAcross> v_rows{base + Shape::kV, key_row};
    const auto store = [&](uint32_t to, int at_lane, int m, int n, float (&c)[4]) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = score_row + m * 16 + h * 8 + at_lane / 4;
        const uint32_t at = ScoreTile::Offset(row, key_row + n * 8) + at_lane % 4 * 4;
        if constexpr (kIsFloat32<T>) {
          *reinterpret_cast<float*>(shared + to + at) = c[2 * h];
          *reinterpret_cast<float*>(shared + to + (at ^ 16)) = c[2 * h + 1];
        } else {
          *reinterpret_cast<uint32_t*>(shared + to + at) = Pack<T>(c[2 * h], c[2 * h + 1]);
        }
      }
    };
    const auto previous_done = [&] {
      if (step > 0) BarrierWait(done, (step - 1) % 2);
    };
    if (plain) {
      start_with_delta(1.0f);
      Product<T, kDim / kStep<T>>(ds, do_rows, v_rows, lane, [&](int k) {
        constexpr int kBlocks = kM * kN, kSteps = kDim / kStep<T>;
#pragma unroll
        for (int i = k * kBlocks / kSteps; i < (k + 1) * kBlocks / kSteps; ++i) {
          float (&c)[4] = prob[i / kN][i % kN];
#pragma unroll
          for (int e = 0; e < 4; ++e) c[e] = Probability(c[e], p.scale, lse_of(i / kN, e / 2));
        }
      });
      previous_done();
      const int at_lane = lane_now();
      if (!at.visible) {  // a masked score takes nothing, not even a NaN
        const int key = keys.first + key_row + at_lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int query = at.first + score_row + m * 16 + h * 8 + at_lane / 4;
            const int low = s.FirstKey(query) - key;
            const int high = query < s.q_len ? s.EndKey(query) - key : 0;
#pragma unroll
            for (int j = 0; j < 2 * kN; ++j) {
              const int column = j / 2 * 8 + j % 2, e = 2 * h + j % 2;
              if (column < low || column >= high) prob[m][j / 2][e] = ds[m][j / 2][e] = 0.0f;
            }
          }
        }
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          store(Shape::kP, at_lane, m, n, prob[m][n]);
#pragma unroll
          for (int e = 0; e < 4; ++e) ds[m][n][e] *= prob[m][n][e];
        }
      }
    } else {
      const Scores<T> scores(p, s, at.head, at.first, keys.first);
      const auto dropout_of = [&](int at_lane) {
        return PairDropout(p, s, at.head, at.first + score_row, keys.first + key_row, at_lane);
      };
      previous_done();
      const auto finish = [&](auto softcap) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            float (&c)[4] = prob[m][n];
            float slope[4];
            const int at_lane = lane_now();
            scores.template Probabilities<decltype(softcap)::value>(
                c, at.first + score_row + m * 16 + at_lane / 4,
                keys.first + key_row + n * 8 + at_lane % 4 * 2,
                {RowLse(lse_of(m, 0)), RowLse(lse_of(m, 1))}, slope);
            if (p.dropout.keys != nullptr) {
              float kept[4];
              const int again = Opaque(at_lane);  // or what comes of it is kept
#pragma unroll
              for (int e = 0; e < 4; ++e) kept[e] = c[e];
              dropout_of(again).Drop(kept, m, n);
              store(Shape::kP, again, m, n, kept);
            } else {
              store(Shape::kP, at_lane, m, n, c);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) c[e] = c[e] * slope[e];
          }
        }
      };
      if (p.softcap > 0.0f) {
        finish(std::true_type());
      } else {
        finish(std::false_type());
      }
      start_with_delta(p.dropout.kept);
      Product<T, kDim / kStep<T>>(ds, do_rows, v_rows, lane);
      if (p.dropout.keys != nullptr) {
        const int at_lane = lane_now();
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          const float none[2] = {-delta_rows[row_of(m, 0)] * p.dropout.kept,
                                 -delta_rows[row_of(m, 1)] * p.dropout.kept};
#pragma unroll
          for (int n = 0; n < kN; ++n) dropout_of(at_lane).Replace(ds[m][n], m, n, none);
        }
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {  // a masked score takes nothing, not even a NaN
            ds[m][n][e] = prob[m][n][e] == 0.0f ? 0.0f : ds[m][n][e] * prob[m][n][e];
          }
        }
      }
    }
    const int at_lane = lane_now();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) store(Shape::kDs, at_lane, m, n, ds[m][n]);
    }
    BarrierArrive(ds_ready);

    // The tile before this one is done, so its stage is free.
    more = next(step + 1);
    if (plan.stages == 2 && more) load(step + 1);

    // dV += P^T dO and dK += dS^T Q.
    BarrierMeet(1 + pair, 64);
    constexpr int kColumns = kDim / 2;
    AddProduct<T, kQueries / kStep<T>>(
        dv, OperandA<ScoreTile, Lies::kDown>{base + Shape::kP, key_row},
        OperandB<QueryTile, Lies::kDown>{d_o, half * kColumns}, lane);
    AddProduct<T, kQueries / kStep<T>>(dk,
                                       OperandA<ScoreTile, Lies::kDown>{base + Shape::kDs, key_row},
                                       OperandB<QueryTile, Lies::kDown>{q, half * kColumns}, lane);

    // dQ = dS K.
    if (p.dq_accum != nullptr) {
      constexpr int kDqM = Shape::kDqM, kDqN = Shape::kDqN;
      constexpr int kWide = 2;  // of float32: four neighbours of a row (AddDq)
      const int dq_row = warp % Shape::kDqWarpsDown * Shape::kDqRows;
      const int dq_column = warp / Shape::kDqWarpsDown * (kDqN * 8);
      float dq[kDqM][kDqN][4];
      Clear(dq);
      BarrierWait(ds_ready, step % 2);
      Product<T, kKeys / kStep<T>, kWide>(
          dq, OperandA<ScoreTile, Lies::kAcross>{base + Shape::kDs, dq_row},
          OperandB<KeyTile, Lies::kDown>{base + Shape::kK, dq_column}, lane);
      BarrierArrive(done);
      if (p.dropout.keys != nullptr) {
#pragma unroll
        for (int m = 0; m < kDqM; ++m) {
#pragma unroll
          for (int n = 0; n < kDqN; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) dq[m][n][e] *= p.dropout.scale;
          }
        }
      }
      AddDq<T, Shape>(p, s, keys, dq, at, dq_row, dq_column, lane_now());
    } else {
      BarrierArrive(done);
    }
    if (plan.stages == 1 && more) {
      BarrierWait(done, step % 2);
      load(step + 1);
    }
  }

  // Out: dK where K was, dV where V was.
  if (step > 0) BarrierWait(done, (step - 1) % 2);
  PlaceKv<T, Shape>(dk, dv, shared, p.scale * p.dropout.scale, p.dropout.scale, key_row,
                    half * (kDim / 2), lane_now());
  __syncthreads();
  StoreTile<KeyTile, kThreads, sizeof(T)>(
      shared + Shape::kK, RowsOfHead<T>(p.dk, s.kv_row, p.num_kv_heads, keys.head, p.head_dim),
      keys.first, s.kv_rows, thread);
  StoreTile<KeyTile, kThreads, sizeof(T)>(
      shared + Shape::kV, RowsOfHead<T>(p.dv, s.kv_row, p.num_kv_heads, keys.head, p.value_dim),
      keys.first, s.kv_rows, thread);
}

}  // namespace kvblock::generic
