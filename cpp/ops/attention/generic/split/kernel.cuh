// Attention forward for few queries on mma.sync: any GPU from sm_80 on. What takes time here is to
// read K and V, so all multiprocessors read all the time, and every row of K and V is read once for
// all the queries and heads that share it.
//
// A CTA computes the pieces that are its share (schedule/shares.cuh): a tile of packed rows
// (schedule/packed_rows.cuh) against some of the KV tiles that they see. Its warps share out a
// tile's rows, 16 each, and where there are fewer rows its keys; those who have the same rows put
// their results together when the piece ends.
//
// CTAs come in two widths. Two narrow ones on a multiprocessor hide each other's ends of pieces;
// wide ones, of which it has one, are half as many, so that there may be one for each unit, and no
// pieces to put together (plan.h).
//
// K and V arrive by asynchronous copies, kStages - 1 tiles ahead, also across pieces.
//
//   find the share's first tile, start loading kStages - 1 tiles
//   for each tile:
//     wait for it; all meet; start loading another; near the end, let combine.cuh's launch begin
//     a piece begins: its rows of Q to registers, no maxima and sums
//     S = Q K^T; scale, softcap; mask; new maxima; O += P V      as in forward/kernel.cuh
//     a piece ends: join the warps' results, and write O and lse, or leave them to be combined
//
// Over pages some more warps of a CTA, its first ones, only load (loader.cuh): to look up where
// rows lie takes as long as to compute. The others wait for a tile and leave it, and meet where a
// piece ends. Where registers do not suffice for that, all do both.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/dependent.cuh"
#include "device/fast_math.cuh"
#include "device/mma.cuh"
#include "device/publish.cuh"
#include "device/shared.cuh"
#include "ops/attention/combine/result.cuh"
#include "ops/attention/generic/forward/kernel.cuh"
#include "ops/attention/generic/keys.cuh"
#include "ops/attention/generic/narrow_tile.cuh"
#include "ops/attention/generic/paged_keys.cuh"
#include "ops/attention/generic/split/loader.cuh"
#include "ops/attention/generic/split/traits.cuh"
#include "ops/attention/generic/tile.cuh"
#include "ops/attention/mask/forward_scores.cuh"
#include "ops/attention/schedule/beside.cuh"
#include "ops/attention/schedule/packed_rows.cuh"
#include "ops/attention/schedule/shares.cuh"

namespace kvblock::generic {

template <typename Traits_>
class SplitForward {
 public:
  using Traits = Traits_;
  using T = typename Traits::T;
  static constexpr int kDim = Traits::kDim, kTileBlocks = Traits::kTileBlocks;
  using KvTile = typename Traits::KvTile;
  using Params = typename Traits::Params;
  using Keys = typename Traits::Keys;
  using Own = OwnThread<Traits>;
  using OwnLine = Line<Traits::kTileKeys, Traits::kThreads, Params, Traits::kLoaders != 0>;

  __device__ __forceinline__ explicit SplitForward(const Params& p)
      : p_(p),
        keys_(p),
        line_(p, static_cast<int>(blockIdx.x - p.by_lines(blockIdx.x) * p.lines)),
        shared_(static_cast<uint32_t>(__cvta_generic_to_shared(DynamicShared()))),
        rules_(MakeScoreRules(p)) {
    if constexpr (!Params::kSameRows) {
      if (p.sharing != nullptr) {
        line_.SetCtas(CtasBeside<Traits::kTileKeys, Traits::kThreads>(p, line_.total()));
      }
    }
  }

  __device__ __forceinline__ void Run() {
    if constexpr (Params::kSameRows) {
      RunShare(static_cast<int>(blockIdx.x), true);
    } else {
      RunShares();
    }
  }

 private:
  // The launch that combines begins so many tiles before the end: it takes some microseconds to be
  // there, and looks for its pieces from then on.
  static constexpr int kTilesToBegin = 6;
  static constexpr int kStages = Traits::kStages, kPlaces = kStages < 4 ? 4 : 8;
  static constexpr int kLoaders = Traits::kLoaders, kComputingMeet = 1;  // a hardware barrier
  static_assert(kPlaces > kStages && OwnLine::kSequences > kStages + 2);
  static constexpr bool kScarce = kDim > 192 && !Keys::kLooksUp;

  // Those that this CTA takes. Who has none still does what every CTA does.
  __device__ __forceinline__ void RunShares() {
    int share = static_cast<int>(blockIdx.x);
    const bool leaves_room = LeavesRoom();
    if (leaves_room) {
      bool stays = true;
      if (threadIdx.x == 0) {
        PrepareLaunches();
        LetNextLaunchBegin();
        stays = Stays(p_, (Shares() + Traits::kSplit.ctas - 1) / Traits::kSplit.ctas);
      }
      share = TakeShare(p_, stays);
    }
    bool first = true;
#pragma unroll 1
    do {
      if (leaves_room) line_.SetNumber(share - static_cast<int>(p_.by_lines(share)) * p_.lines);
      RunShare(share, first);
      if (!leaves_room || share >= Shares()) break;
      share = TakeShare(p_, true);
      first = false;
    } while (share < Shares());
  }

  // What this CTA has of its line: tiles, counted from 0. A piece begins at tile `piece`, and its Q
  // comes with tile `fetches`: the first one's beside its keys.
  struct Share {
    int number, begin, tiles;
    bool first;  // of this CTA
    int piece, fetches;
  };

  __device__ __forceinline__ void RunShare(int number, bool first) {
    int begin, end;
    Place ahead;
    line_.FindShare(static_cast<int>(p_.by_lines(number)), &begin, &end, &ahead);
    Share share = {number, begin, end - begin, first, 0, -1};
    if (Params::kSameRows && share.tiles <= 0) return;
    // At i % kPlaces, where tile i is that is to be computed.
    __shared__ Place places[kPlaces];
    own_ = FindOwn<Traits>();
    if constexpr (kLoaders == 0) {
      LoadAndCompute(share, ahead, places);
    } else if (threadIdx.x < kLoaders * 32) {
      LoadShare<Traits>(line_, keys_, ahead, share.tiles, shared_, places, walk_);
    } else {
      if (IsFirst() && share.tiles > 0) places[0] = ahead;
      Meet();
#pragma unroll 1
      for (int tile = -1; tile < max(share.tiles, 0); ++tile) {
        if (tile >= 0) walk_.AwaitFull();
        const Place& at = places[max(tile, 0) % kPlaces];
        BeginTile(share, tile, at);
        if (tile < 0) continue;
        EndTile(share, tile, at, Stage(walk_.stage()));
        walk_.Leave();
      }
    }
  }

  // `ahead`: the next tile to load, or to look up. Where registers are scarce it is found among
  // `places`, too, by thread 0 for all.
  __device__ __forceinline__ void LoadAndCompute(Share& share, Place& ahead,
                                                 Place (&places)[kPlaces]) {
    const int tiles = share.tiles;
    if (!Keys::kLooksUp && threadIdx.x == 0) places[0] = ahead;
    typename Keys::Found found{};
    // Code is as far away as keys when a launch begins: there is one copy of all that a tile takes,
    // and the first rounds only look up and load.
#pragma unroll 1
    for (int tile = (Keys::kLooksUp ? 0 : 1) - kStages; tile < max(tiles, 0); ++tile) {
      const int next = tile + kStages - 1;
      const bool loads = next < tiles && (!Keys::kLooksUp || next >= 0), more = next + 1 < tiles;
      if constexpr (Keys::kLooksUp) {
        if (loads) keys_.Settle(found, next);
        // Before the wait: behind the loads of a tile it would take as long as they do.
        if (more) found = keys_.LookUp(ahead);
      }
      CopyAsyncWait<kStages - 2>();
      __syncthreads();  // this tile has arrived for all, and all are done with the one before
      if (loads) {
        const Place& to_load = Keys::kLooksUp || kScarce ? places[next % kPlaces] : ahead;
        const uint32_t k_tile = Stage(next % kStages), v_tile = k_tile + KvTile::kBytes;
        if constexpr (Keys::kLooksUp) {
          keys_.Load(to_load.rows.member, to_load.kv_head, next, k_tile, v_tile);
        } else {
          keys_.Load(to_load, next, k_tile, v_tile);
        }
      }
      CopyAsyncCommit();
      if constexpr (Keys::kLooksUp) {
        if (more && threadIdx.x == 0) places[(next + 1) % kPlaces] = ahead;
        if (next + 2 < tiles) line_.Next(&ahead);
      } else if (more) {
        if (!kScarce) {
          line_.Next(&ahead);
          if (threadIdx.x == 0) places[(next + 1) % kPlaces] = ahead;
        } else if (threadIdx.x == 0) {
          Place after_it = places[next % kPlaces];
          line_.Next(&after_it);
          places[(next + 1) % kPlaces] = after_it;
        }
      }
      const Place& at = places[max(tile, 0) % kPlaces];
      BeginTile(share, tile, at);
      if (tile >= 0) EndTile(share, tile, at, Stage(tile % kStages));
    }
    CopyAsyncWait<0>();
  }

  // What comes before a tile is computed, also before the first one is there.
  __device__ __forceinline__ void BeginTile(const Share& share, int tile, const Place& at) {
    if (tile == share.fetches && share.tiles > 0) Begin(at);
    if (tile == -1 && share.first) {
      if (IsFirst() && !LeavesRoom()) PrepareLaunches();
      WriteRowsOfNobody();
    }
  }

  // A tile that has arrived, and the end of its piece.
  __device__ __forceinline__ void EndTile(Share& share, int tile, const Place& at, uint32_t stage) {
    if (IsFirst() && tile == max(share.tiles - kTilesToBegin, 0)) LetNextLaunchBegin();
    Compute(at, tile, stage);
    const bool last = at.tile + 1 == at.rows.tiles;
    const bool full = !Params::kSameRows && tile + 1 - share.piece == p_.split;
    if (last || tile + 1 == share.tiles || full) {
      const bool whole = tile - share.piece == at.tile;  // so far
      const unsigned slot = HasSplit() ? line_.SplitSlot(share.begin + share.piece, whole)
                                       : PieceSlot(share.number, share.piece == 0);
      End(at, last && whole, slot, DynamicShared() + (stage - shared_));
      share.piece = share.fetches = tile + 1;
    }
  }

  // Whether units are cut at multiples of p_.split.
  __device__ __forceinline__ bool HasSplit() const {
    return !Params::kSameRows && p_.split != kNoSplit;
  }

  // Whether some multiprocessors are left to the launch beside this one.
  __device__ __forceinline__ bool LeavesRoom() const {
    if constexpr (!Params::kSameRows) return line_.ctas() < p_.ctas;
    return false;
  }
  __device__ __forceinline__ int Shares() const { return line_.ctas() * p_.lines; }

  // What the next launches see before they can begin: that there are no pieces yet, unless they
  // wait for all of this one, or it is known already; and how many CTAs of a line have shares.
  __device__ __forceinline__ void PrepareLaunches() const {
    if constexpr (!Params::kSameRows) {
      if (p_.sharing != nullptr) {
        if (blockIdx.x == 0) {
          p_.sharing[kCtas] = line_.ctas();
          __threadfence();
        }
        return;
      }
    }
    if (HasSplit()) return;
    Withdraw(p_.piece_there + PieceSlot(blockIdx.x, true));
    Withdraw(p_.piece_there + PieceSlot(blockIdx.x, false));
    __threadfence();
  }

  __device__ __forceinline__ uint32_t Stage(int stage) const {
    return shared_ + stage * Traits::kStageBytes;
  }

  // Zeros and -inf.
  __device__ __forceinline__ void WriteRowsOfNobody() const {
    if constexpr (!Params::kSameRows) {
      const auto write = [&](int64_t row) {
        uint4* const o = static_cast<uint4*>(p_.o) + row * p_.num_heads * (p_.value_dim / 8);
        for (int i = Lane(); i < p_.num_heads * (p_.value_dim / 8); i += 32) {
          o[i] = uint4{0, 0, 0, 0};
        }
        if (p_.lse == nullptr) return;
        for (int h = Lane(); h < p_.num_heads; h += 32) p_.lse[row * p_.num_heads + h] = -INFINITY;
      };
      ForRowsOfNobody(p_, line_.fallen(), own_.Warp(), Traits::kWarps, write);
    }
  }

  // The A operand of this warp's rows of Q, straight from memory: a load of 4 bytes fills a
  // register. Rows past q_lens are zeros, too. Those that do not exist see every key there is;
  // nobody reads theirs.
  __device__ __forceinline__ void Begin(const Place& at) {
    const Sequence& s = line_.SequenceOf(at);
    const PackedRows packed(p_, at.kv_head, s.q_rows);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = at.rows.first_row + Row(half);
      const bool there = row < packed.count();
      const int query = packed.Query(row);
      const bool read = there && query < s.q_len;
      first_[half] = there ? s.FirstKey(query) : 0;
      end_[half] = !there ? INT32_MAX : query < s.q_len ? s.EndKey(query) : 0;
      if constexpr (!Params::kSameRows) {
        if (p_.ranges != nullptr && there) {
          const KeyRange range = RangeOf(p_, s, query);
          first_[half] = max(first_[half], range.first);
          end_[half] = min(end_[half], range.end);
        }
      }
      const T* const q =
          static_cast<const T*>(p_.q) + (read ? packed.Index(s, row) : 0) * p_.head_dim;
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const int column =
              step * 16 + (Traits::kNarrow ? Lane() % 4 * 4 + side * 2 : side * 8 + Lane() % 4 * 2);
          queries_.held[step][0][side * 2 + half] =
              read && column < p_.head_dim ? *reinterpret_cast<const uint32_t*>(q + column) : 0;
        }
      }
    }
    if constexpr (Traits::kNarrow) HoldAsHalf(at.kv_head);
    BeginRows(rows_);
  }

  __device__ __forceinline__ void Compute(const Place& at, int tile, uint32_t stage) {
    const int own = Part() * Traits::kKeys;  // this warp's first key in the tile
    const uint32_t k_tile = stage + own * KvTile::kRowBytes, v_tile = k_tile + KvTile::kBytes;
    const int key = FirstKeyOf<Traits::kTileKeys, Params>(at) + own;
    if constexpr (Traits::kNarrow) {
      MultiplyNarrow<Traits>(rows_, queries_.held, k_tile, Lane());
      ScaleProducts(tile, own);
    } else {
      Multiply<Traits>(rows_, queries_, 0, k_tile, 0, Lane());
    }
    if (rules_.finish) ScaleScores<Traits>(p_, rows_);
    const bool whole =
        max(first_[0], first_[1]) <= key && min(end_[0], end_[1]) >= key + Traits::kKeys;
    if (!__all_sync(~0u, whole) || !keys_.AllThere(tile, own)) MaskKeys(key, tile, own);
    if constexpr (!Params::kSameRows) {
      if (p_.tree_mask != nullptr) MaskDraft(at, key);
    }
    if (Params::kSameRows && p_.q_segments != nullptr && p_.kv_len > 0) MaskSegmentsOf(at, key);
    if constexpr (Traits::kNarrow) {
      const bool scaled = p_.v_scale.each;
      if (scaled) ScaleValues(tile, own);
      Rescale<Traits>(p_, rows_, rules_.to_log2);
      const float* const scales = keys_.ScalesOf(tile).v + own;
      AccumulateNarrow<Traits>(rows_, rules_.to_log2, v_tile, Lane(), [&](int key, float x) {
        return scaled ? x * Reciprocal(SomeScale(scales[key])) : x;
      });
    } else {
      Rescale<Traits>(p_, rows_, rules_.to_log2);
      Accumulate<Traits>(p_, rows_, rules_.to_log2, v_tile, Lane());
    }
  }

  // Q as float16. A row of bfloat16 may be larger than that: then it is smaller by a power of 2,
  // and its scores larger.
  __device__ __forceinline__ void HoldAsHalf(int kv_head) {
    const float k_scale = Keys::ScaleOfHead(p_.k_scale, kv_head);
    v_scale_ = Keys::ScaleOfHead(p_.v_scale, kv_head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      score_scale_[half] = k_scale;
      if constexpr (std::is_same_v<T, __half>) continue;
      float largest = 0.0f;
      const auto each = [&](auto visit) {
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            uint32_t& pair = queries_.held[step][0][side * 2 + half];
            // bfloat16 is the upper half of a float32.
            visit(pair, __int_as_float(static_cast<int>(pair << 16)),
                  __int_as_float(static_cast<int>(pair & 0xffff0000)));
          }
        }
      };
      each([&](uint32_t&, float low, float high) {
        largest = fmaxf(largest, fmaxf(fabsf(low), fabsf(high)));
      });
      const int exponent = __float_as_int(RowMax(largest)) >> 23;  // 127 more
      const int less = max(exponent - 127 - 14, 0);
      const float factor = __int_as_float((127 - less) << 23);
      score_scale_[half] *= __int_as_float((127 + less) << 23);
      each([&](uint32_t& pair, float low, float high) {
        pair = Pack<__half>(low * factor, high * factor);
      });
    }
  }

  // What quantized keys' scales make of products.
  __device__ __forceinline__ void ScaleProducts(int tile, int own) {
    const float* const scales = keys_.ScalesOf(tile).k + own;
#pragma unroll
    for (int n = 0; n < Traits::kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        rows_.s[0][n][e] *= score_scale_[e / 2];
        if (p_.k_scale.each) rows_.s[0][n][e] *= scales[n * 8 + Lane() % 4 * 2 + e % 2];
      }
    }
  }
  // Where values have scales of their own, a probability is larger by its key's from here on: none
  // of these products is larger than 1 then. The sum takes it back.
  __device__ __forceinline__ void ScaleValues(int tile, int own) {
    const float* const scales = keys_.ScalesOf(tile).v + own;
    const float from_log2 = Reciprocal(rules_.to_log2);
#pragma unroll
    for (int n = 0; n < Traits::kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float scale = SomeScale(scales[n * 8 + Lane() % 4 * 2 + e % 2]);
        rows_.s[0][n][e] = fmaf(Log2(scale), from_log2, rows_.s[0][n][e]);
      }
    }
  }
  // One that has a logarithm: a key whose values are all 0 counts in the sum all the same.
  __device__ __forceinline__ static float SomeScale(float scale) { return fmaxf(scale, 1e-30f); }

  __device__ __forceinline__ void MaskKeys(int key, int tile, int own) {
#pragma unroll
    for (int n = 0; n < Traits::kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int in_part = n * 8 + Lane() % 4 * 2 + e % 2, j = key + in_part;
        if (j < first_[e / 2] || j >= end_[e / 2] || !keys_.There(tile, own + in_part)) {
          rows_.s[0][n][e] = -INFINITY;
        }
      }
    }
  }
  // What the bits of a row leave out, of the keys that are its sequence's queries.
  __device__ __forceinline__ void MaskDraft(const Place& at, int key) {
    const Sequence& s = line_.SequenceOf(at);
    const int draft = key - (s.kv_len - s.q_len);  // of the first key, its query
    if (draft + Traits::kKeys <= 0) return;
    const PackedRows packed(p_, at.kv_head, s.q_rows);
#pragma unroll
    for (int n = 0; n < Traits::kKeys / 8; n += 4) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min(at.rows.first_row + Row(half), packed.count() - 1);
        const uint32_t bits = TreeBits(p_, s, packed.Query(row), draft + n * 8);
#pragma unroll
        for (int i = 0; i < 8 && n + i / 2 < Traits::kKeys / 8; ++i) {
          const int in_part = i / 2 * 8 + Lane() % 4 * 2 + i % 2;
          if ((bits >> in_part & 1) == 0) rows_.s[0][n + i / 2][half * 2 + i % 2] = -INFINITY;
        }
      }
    }
  }
  __device__ __forceinline__ void MaskSegmentsOf(const Place& at, int key) {
    const int member = at.rows.member;
    const int32_t* const of_queries = p_.q_segments + member * p_.q_len;
    const int32_t* const of_keys = p_.kv_segments + member * p_.kv_len;
    const PackedRows packed(p_, at.kv_head, static_cast<int>(p_.q_len));
    int segment[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(at.rows.first_row + Row(half), packed.count() - 1);
      segment[half] = __ldg(of_queries + packed.Query(row));
    }
#pragma unroll
    for (int n = 0; n < Traits::kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int j = min(key + n * 8 + Lane() % 4 * 2 + e % 2, static_cast<int>(p_.kv_len) - 1);
        if (__ldg(of_keys + j) != segment[e / 2]) rows_.s[0][n][e] = -INFINITY;
      }
    }
  }

  // Joins what the warps have of the same rows, and writes it. `place` is the stage of the piece's
  // last tile: each warp has its O there, columns of a row swapped in pieces of 8 against bank
  // conflicts.
  __device__ __forceinline__ void End(const Place& at, bool whole, unsigned slot, char* place) {
    __shared__ PartialSum sums[Traits::kParts][Traits::kRows];
    const Own own = FindOwn<Traits>();
    float own_max[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = RowSum(rows_.sum[0][half]);
      own_max[half] = rows_.max[0][half] * rules_.to_log2;  // -inf stays
      if (own.Lane() % 4 == 0) sums[own.Part()][own.Row(half)] = {own_max[half], sum};
    }
    Meet();  // all are done with the tile, too
    float* const o = reinterpret_cast<float*>(place);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float factor = Exp2(own_max[half] - Reference(Top(sums, own.Row(half)), 1.0f));
      float* const row = o + (own.Part() * Traits::kRows + own.Row(half)) * kDim;
      if constexpr (Traits::kNarrow) {
        factor *= v_scale_;
#pragma unroll
        for (int n = 0; n < kDim / 8; n += 2) {  // even columns, odd columns
          const float (&even)[4] = rows_.o[0][n], (&odd)[4] = rows_.o[0][n + 1];
          const int at_chunk =
              Swapped(n + own.Lane() % 4 / 2, own.Row(half)) * 8 + own.Lane() % 2 * 4;
          *reinterpret_cast<float4*>(row + at_chunk) =
              make_float4(even[half * 2] * factor, odd[half * 2] * factor,
                          even[half * 2 + 1] * factor, odd[half * 2 + 1] * factor);
        }
      } else {
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          *reinterpret_cast<float2*>(row + Swapped(n, own.Row(half)) * 8 + own.Lane() % 4 * 2) =
              make_float2(rows_.o[0][n][half * 2] * factor, rows_.o[0][n][half * 2 + 1] * factor);
        }
      }
    }
    Meet();
    // Four columns a thread, kDim / 4 threads a row.
    constexpr int kAcross = kDim / 4;
    const Sequence& s = line_.SequenceOf(at);
    const PackedRows packed(p_, at.kv_head, s.q_rows);
    const int rows = min(Traits::kRows, packed.count() - at.rows.first_row);
#pragma unroll 1
    for (int i = own.thread; i < rows * kAcross; i += Traits::kComputing) {
      const int row = i / kAcross, column = i % kAcross * 4;
      if (column >= p_.value_dim) continue;
      const float top = Top(sums, row), reference = Reference(top, 1.0f);
      PartialRow result = {{top, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
      for (int part = 0; part < Traits::kParts; ++part) {
        result.sums.sum += sums[part][row].sum * Exp2(sums[part][row].max - reference);
        const float4 x = *reinterpret_cast<const float4*>(
            o + (part * Traits::kRows + row) * kDim + Swapped(column / 8, row) * 8 + column % 8);
        result.Add(x, 1.0f);
      }
      if (whole) {
        const int of_all = at.rows.first_row + row;
        ResultRow<T>(p_, s, packed, of_all, column).Write(result);
      } else {
        StorePiece(p_, slot, row, column, result);
      }
    }
    const bool published = !whole && !HasSplit();
    // Nobody begins to end the next piece before; where all load, they meet there in any case.
    if (kLoaders == 0 && !published) return;
    Meet();
    if (IsFirst() && published) Publish(p_.piece_there + slot);
  }
  __device__ __forceinline__ static int Swapped(int n, int row) { return n ^ (row % 8); }
  __device__ __forceinline__ static float Top(
      const PartialSum (&sums)[Traits::kParts][Traits::kRows], int row) {
    float top = sums[0][row].max;
#pragma unroll
    for (int part = 1; part < Traits::kParts; ++part) top = fmaxf(top, sums[part][row].max);
    return top;
  }

  __device__ __forceinline__ int Lane() const { return own_.Lane(); }
  __device__ __forceinline__ int Part() const { return own_.Part(); }
  __device__ __forceinline__ int Row(int half) const { return own_.Row(half); }
  __device__ __forceinline__ bool IsFirst() const { return own_.thread == 0; }
  // All who compute.
  __device__ __forceinline__ static void Meet() {
    if constexpr (kLoaders > 0) {
      BarrierMeet(kComputingMeet, Traits::kComputing);
    } else {
      __syncthreads();
    }
  }

  const Params& p_;
  Keys keys_;  // first: what it reads comes beside what is counted
  OwnLine line_;
  const uint32_t shared_;
  const ScoreRules rules_;
  StageWalk<Traits> walk_;  // where some warps only load
  Own own_;
  QueryFragments<Traits> queries_;
  ForwardRows<Traits> rows_;
  int first_[2], end_[2];           // the keys that this thread's rows see
  float score_scale_[2], v_scale_;  // of a cache of 8 bits
};

// The class that computes a CTA's share; latent/kernel.cuh has another one for its own Traits.
template <typename Traits>
struct ComputesShare {
  using Type = SplitForward<Traits>;
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kSplit.ctas)
    AttentionSplit(const __grid_constant__ typename Traits::Params p) {
  Traits::Keys::Prefetch(p);
  if constexpr (Traits::kLoaders > 0) {
    // All meet when they count tiles. The last thread has few members to count, or none.
    if (threadIdx.x == Traits::kThreads - 1) StageWalk<Traits>::MakeBarriers();
  }
  typename ComputesShare<Traits>::Type(p).Run();
}

}  // namespace kvblock::generic
