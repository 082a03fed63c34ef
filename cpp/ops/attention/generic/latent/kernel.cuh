// Attention over a latent cache on mma.sync: any GPU from sm_80 on whose CTAs can have the shared
// memory. There is one key head, and a value is the first kValue columns of its key (multi-head
// latent attention in its absorbed form): a tile of keys is loaded once, and V is the same shared
// memory, read down instead of across.
//
// Pieces, shares and lines are those of few queries (split/kernel.cuh, schedule/shares.cuh); so is
// what is done with a piece when it ends. Packed rows are queries of all heads, 16, 32 or 64 to a
// tile. O of 64 rows is half of a multiprocessor's registers, so a CTA is all that it has, and its
// eight warps share out a tile of keys twice:
//
//   S = Q K^T     a warp has some rows and some keys, and all of D
//   O += P V      a warp has all rows and an eighth of the columns
//
// Between the two they show each other maxima, then probabilities: those lie where the tile of keys
// has its last 64 columns, which nobody reads any more. A row's maximum is the same in all warps.
//
//   for each tile:
//     wait for it; all meet; start loading another
//     a piece begins: its rows of Q to registers (16 rows) or shared memory; no maxima and sums
//     S = Q K^T; scale, softcap; mask; own maxima                 all meet
//     new maxima; rescale O and sums; P = exp2(S - max)           all meet
//     O += P V
//     a piece ends: join the sums, and write O and lse, or leave them to be combined
//
// What fits. In KiB of shared memory at D 576 and 64 keys: 72 for a stage. 16 rows have their Q in
// 144 registers a thread beside 32 of O, so there is room for three stages, 216 of 227: two tiles
// are on their way, 144 KiB, where 30 would cover the way to memory. Q of 32 rows is 36, of 64 rows
// 72, which leaves two stages: 180 and 216; O of 64 rows takes 128 registers of 255. Compact shapes
// are for CTAs that can have 163: 32 keys, 36 to a stage, four, three or two of them: 144 each. D
// 192 fits into 72 everywhere.
//
// What takes time, in clocks of a multiprocessor for 64 keys at D 576. Memory: 72 KiB by 18 bytes,
// 4100. 16 rows: shared memory gives and takes 1700, by 128 bytes, and tensor cores compute 900, so
// the cache is read at the speed of memory. 64 rows: shared memory 5100, most of it fragments of Q
// and K for S, and tensor cores 3500. 128 heads are two tiles of rows, which read the cache one
// after the other: they are bound by computing. Of Hopper's warpgroups there is a kernel for them
// over the same lines (hopper/latent/), which leaves to this one what its launcher says.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/dependent.cuh"
#include "device/fast_math.cuh"
#include "device/mma.cuh"
#include "device/opaque.cuh"
#include "device/publish.cuh"
#include "device/shared.cuh"
#include "ops/attention/combine/result.cuh"
#include "ops/attention/generic/paged_keys.cuh"
#include "ops/attention/generic/product.cuh"
#include "ops/attention/generic/split/kernel.cuh"
#include "ops/attention/generic/tile.cuh"
#include "ops/attention/mask/forward_scores.cuh"
#include "ops/attention/schedule/packed_rows.cuh"
#include "ops/attention/schedule/shares.cuh"

namespace kvblock::generic {

struct LatentShape {
  int keys, stages, ctas;  // of a tile; tiles in shared memory; CTAs on a multiprocessor
};
constexpr LatentShape LatentShapeOf(int dim, int row_blocks, bool compact) {
  return dim <= 192        ? LatentShape{64, row_blocks == 1 ? 3 : 2, 2}
         : !compact        ? LatentShape{64, row_blocks == 1 ? 3 : 2, 1}
         : row_blocks == 4 ? LatentShape{32, 2, 1}
                           : LatentShape{32, row_blocks == 1 ? 4 : 3, 1};
}

// kRowBlocks: of 16 packed rows in a tile; 1, 2 or 4. kCompact: for CTAs that can have 163 KiB of
// shared memory and not 227.
template <typename T_, int kDim_, int kValue_, int kRowBlocks_, bool kCompact_>
struct LatentTraits {
  using T = T_;
  static constexpr int kDim = kDim_, kValue = kValue_, kRowBlocks = kRowBlocks_;
  static constexpr int kRows = kRowBlocks * 16, kWarps = 8, kThreads = kWarps * 32;
  static constexpr int kLoaders = 0;
  static constexpr LatentShape kSplit = LatentShapeOf(kDim, kRowBlocks, kCompact_);
  static constexpr int kTileKeys = kSplit.keys, kStages = kSplit.stages;
  static constexpr bool kWide = false, kCombines = true, kNarrow = false;
  // Of S, for a warp: keys, and blocks of rows. There are so many groups of each.
  static constexpr int kKeys = kRowBlocks == 4 || (kRowBlocks == 2 && kTileKeys == 64) ? 16 : 8;
  static constexpr int kKeyGroups = kTileKeys / kKeys, kMostRowGroups = kWarps / kKeyGroups;
  static constexpr int kRowGroups = kRowBlocks < kMostRowGroups ? kRowBlocks : kMostRowGroups;
  static constexpr int kOwnBlocks = kRowBlocks / kRowGroups;
  static constexpr int kColumns = kValue / kWarps;  // of O, for a warp
  static constexpr bool kHoldsQueries = kRowBlocks == 1;
  using KvTile = SharedTile<kTileKeys, kDim>;
  using QTile = SharedTile<kRows, kDim>;
  using Keys = PagedKeys<LatentTraits>;
  using Params = typename Keys::Params;
  static constexpr int kQBytes = kHoldsQueries ? 0 : QTile::kBytes;
  static constexpr int kSharedBytes = kStages * KvTile::kBytes + kQBytes;
  // Probabilities have the columns from kValue on: the rows that a tile of keys has no place for
  // lie beside the first ones.
  static_assert((kRows + kTileKeys - 1) / kTileKeys * kTileKeys <= kDim - kValue);
  static_assert(kValue % 64 == 0 && kColumns % 16 == 0 && kDim % 64 == 0);
};

template <typename Traits_>
class LatentForward {
 public:
  using Traits = Traits_;
  using T = typename Traits::T;
  using KvTile = typename Traits::KvTile;
  using QTile = typename Traits::QTile;
  using Params = typename Traits::Params;
  using Keys = typename Traits::Keys;
  using OwnLine = Line<Traits::kTileKeys, Traits::kThreads, Params>;

  __device__ __forceinline__ explicit LatentForward(const Params& p)
      : p_(p),
        line_(p, 0),
        keys_(p),
        shared_(static_cast<uint32_t>(__cvta_generic_to_shared(DynamicShared()))),
        rules_(MakeScoreRules(p)) {}

  // There is one line: CTA blockIdx.x has its share of that number. As SplitForward::Run.
  __device__ __forceinline__ void Run() {
    int begin, end;
    Place ahead;
    line_.FindShare(blockIdx.x, &begin, &end, &ahead);
    const int tiles = end - begin;  // counted from 0 from here on
    __shared__ Place places[kPlaces];
    typename Keys::Found found{};
    int piece = 0;  // where it begins; the first one's Q comes beside its keys
#pragma unroll 1
    for (int tile = -kStages; tile < max(tiles, 0); ++tile) {
      const int next = tile + kStages - 1;
      const bool loads = next < tiles && next >= 0, more = next + 1 < tiles;
      typename Keys::Found after{};
      if (more) after = keys_.LookUp(ahead);
      CopyAsyncWait<kStages - 2>();
      if (loads) keys_.Settle(found, next);
      found = after;
      __syncthreads();  // this tile has arrived for all, and all are done with the one before
      if (loads) {
        // ptxas 13.0 adds a uniform register to a copy's place by no instruction that there is.
        const int stage = Opaque(static_cast<int>(Stage(next % kStages)));
        const Place& to_load = places[next % kPlaces];
        keys_.template Load<false>(to_load.rows.member, to_load.kv_head, next, stage, 0);
      }
      CopyAsyncCommit();
      if (more && threadIdx.x == 0) places[(next + 1) % kPlaces] = ahead;
      if (next + 2 < tiles) line_.Next(&ahead);
      const Place& at = places[max(tile, 0) % kPlaces];
      if (tile == (piece == 0 ? -1 : piece) && tiles > 0) Begin(at);
      if (tile == -1) {
        if (threadIdx.x == 0) WithdrawPieces();
        WriteRowsOfNobody();
      }
      if (tile < 0) continue;
      if (threadIdx.x == 0 && tile == max(tiles - kTilesToBegin, 0)) LetNextLaunchBegin();
      Compute(at, tile, Stage(tile % kStages));
      const bool last = at.tile + 1 == at.rows.tiles;
      if (last || tile + 1 == tiles || tile + 1 - piece == p_.split) {
        const bool first = tile - piece == at.tile;  // of its unit
        const unsigned slot =
            HasSplit() ? line_.SplitSlot(begin + piece, first) : PieceSlot(blockIdx.x, piece == 0);
        End(at, last && first, slot);
        piece = tile + 1;
      }
    }
    CopyAsyncWait<0>();
  }

 private:
  static constexpr int kTilesToBegin = 6;  // as SplitForward
  static constexpr int kStages = Traits::kStages, kPlaces = kStages < 4 ? 4 : 8;
  static_assert(kPlaces > kStages && OwnLine::kSequences > kStages + 2);
  static constexpr int kRowBlocks = Traits::kRowBlocks, kOwnBlocks = Traits::kOwnBlocks;
  static constexpr int kKeyGroups = Traits::kKeyGroups, kSteps = Traits::kDim / 16;

  // What mask/forward_scores.cuh knows of a warp's part of S.
  struct Scores {
    static constexpr int kRowBlocks = kOwnBlocks, kKeys = Traits::kKeys, kDim = 8;
  };
  // A value for each row of the tile and each warp that has some of its keys.
  using OfRows = float[Traits::kRows][kKeyGroups];

  // Whether units are cut at multiples of p_.split.
  __device__ __forceinline__ bool HasSplit() const { return p_.split != kNoSplit; }

  // The next launch sees this before it can begin.
  __device__ __forceinline__ void WithdrawPieces() const {
    if (HasSplit()) return;  // it waits for all of this one
    Withdraw(p_.piece_there + PieceSlot(blockIdx.x, true));
    Withdraw(p_.piece_there + PieceSlot(blockIdx.x, false));
    __threadfence();
  }

  // Zeros and -inf.
  __device__ __forceinline__ void WriteRowsOfNobody() const {
    ForRowsOfNobody(p_, line_.fallen(), Warp(), Traits::kWarps, [&](int64_t row) {
      constexpr int kVectors = Traits::kValue / 8;
      uint4* const o = static_cast<uint4*>(p_.o) + row * p_.num_heads * kVectors;
      for (int i = Lane(); i < p_.num_heads * kVectors; i += 32) o[i] = uint4{0, 0, 0, 0};
      if (p_.lse == nullptr) return;
      for (int h = Lane(); h < p_.num_heads; h += 32) p_.lse[row * p_.num_heads + h] = -INFINITY;
    });
  }

  __device__ __forceinline__ uint32_t Stage(int stage) const {
    return shared_ + stage * KvTile::kBytes;
  }
  __device__ __forceinline__ uint32_t QueryTile() const {
    return shared_ + kStages * KvTile::kBytes;
  }

  // Where a row of Q lies; NULL: it does not exist or take part, and is zeros.
  __device__ __forceinline__ const T* QueryRow(const Place& at, const Sequence& s,
                                               const PackedRows& packed, int row) const {
    row += at.rows.first_row;
    const bool read = row < packed.count() && packed.Query(row) < s.q_len;
    if (!read) return nullptr;
    return static_cast<const T*>(p_.q) + packed.Index(s, row) * Traits::kDim;
  }

  // The keys that a row sees. One that does not exist sees every key there is; nobody reads its
  // result.
  __device__ __forceinline__ KeyRange KeysOf(const Place& at, const Sequence& s,
                                             const PackedRows& packed, int row) const {
    row += at.rows.first_row;
    if (row >= packed.count()) return {0, INT32_MAX};
    const int query = packed.Query(row);
    KeyRange seen = {s.FirstKey(query), query < s.q_len ? s.EndKey(query) : 0};
    if (p_.ranges != nullptr) {
      const KeyRange range = RangeOf(p_, s, query);
      seen = {max(seen.first, range.first), min(seen.end, range.end)};
    }
    return seen;
  }

  __device__ __forceinline__ void Begin(const Place& at) {
    const Sequence& s = line_.SequenceOf(at);
    const PackedRows packed(p_, 0, s.q_rows);
    all_from_ = 0;
    all_to_ = INT32_MAX;
    ForOwnRows([&](int m, int half) {
      const KeyRange seen = KeysOf(at, s, packed, OwnRow(m, half));
      all_from_ = max(all_from_, seen.first);
      all_to_ = min(all_to_, seen.end);
      sum_[m][half] = 0.0f;
    });
#pragma unroll
    for (int rb = 0; rb < kRowBlocks; ++rb) max_[rb][0] = max_[rb][1] = -INFINITY;
    Clear(o_);
    if constexpr (Traits::kHoldsQueries) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const T* const q = QueryRow(at, s, packed, OwnRow(0, half));
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            const int column = step * 16 + side * 8 + Lane() % 4 * 2;
            held_[step][side * 2 + half] =
                q != nullptr ? *reinterpret_cast<const uint32_t*>(q + column) : 0;
          }
        }
      }
    } else {
      constexpr int kChunks = Traits::kDim / 8;
      char* const tile = DynamicShared() + kStages * KvTile::kBytes;
#pragma unroll 3
      for (int i = threadIdx.x; i < Traits::kRows * kChunks; i += Traits::kThreads) {
        const int row = i / kChunks, column = i % kChunks * 8;
        const T* const q = QueryRow(at, s, packed, row);
        *reinterpret_cast<uint4*>(tile + QTile::Offset(row, column)) =
            q != nullptr ? *reinterpret_cast<const uint4*>(q + column) : uint4{0, 0, 0, 0};
      }
      __syncthreads();
    }
  }

  __device__ __forceinline__ void Compute(const Place& at, int tile, uint32_t stage) {
    __shared__ OfRows maxima;
    const int own = KeyGroup() * Traits::kKeys;  // this warp's first key in the tile
    const int key = FirstKeyOf<Traits::kTileKeys, Params>(at) + own;
    if (HasScores()) {
      MultiplyKeys(stage, own);
      if (rules_.finish) ScaleScores<Scores>(p_, scores_);
      const bool whole = all_from_ <= key && all_to_ >= key + Traits::kKeys;
      if (!__all_sync(~0u, whole) || !keys_.AllThere(tile, own)) MaskKeys(at, key, tile, own);
      if (p_.tree_mask != nullptr) MaskDraft(at, key);
      ForOwnRows([&](int m, int half) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < Traits::kKeys / 8; ++n) {
          const float (&x)[4] = scores_.s[m][n];
          top = fmaxf(top, fmaxf(x[half * 2], x[half * 2 + 1]));
        }
        top = RowMax(top);
        if (Lane() % 4 == 0) maxima[OwnRow(m, half)][KeyGroup()] = top;
      });
    }
    __syncthreads();  // all have shown their maxima, and are done with columns from kValue on
    Rescale(maxima);
    if (HasScores()) ShowProbabilities(stage, own);
    __syncthreads();  // P is there
    AddValues(stage);
  }

  // S of this warp's rows and keys.
  __device__ __forceinline__ void MultiplyKeys(uint32_t stage, int own) {
    Clear(scores_.s);
    if constexpr (Traits::kKeys == 16) {
      Product<T, kSteps>(scores_.s, OperandA<QTile, Lies::kAcross>{QueryTile(), OwnRow()},
                         OperandB<KvTile, Lies::kAcross>{stage, own}, Lane());
    } else {
      // Eight rows at a time, over 32 columns: two steps, each with sums of its own, so that
      // products wait for each other half as long.
      static_assert(kOwnBlocks == 1 && kSteps % 2 == 0);
      const LaneBlock<Traits::kDim, BlockOrder::kRowsFirst> at_q(Lane());
      const int matrix = Lane() / 8, row = Lane() % 8;
      const uint32_t rows = stage + (own + row) * KvTile::kRowBytes;
      const uint32_t swizzle = (matrix ^ row) * 16;
      float odd[4] = {};
#pragma unroll
      for (int pair = 0; pair < kSteps / 2; ++pair) {
        uint32_t b[4];
        LoadMatrices(b, rows + (swizzle ^ (pair * 64 & 127)) + (pair * 64 & ~127));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t loaded[4];
          if constexpr (!Traits::kHoldsQueries) {
            LoadMatrices(loaded, at_q.Address(QueryTile(), OwnRow(), (pair * 2 + i) * 16));
          }
          const auto& a = Traits::kHoldsQueries ? held_[pair * 2 + i] : loaded;
          Mma16x8x16<T>(i == 0 ? scores_.s[0][0] : odd, a, b[i * 2], b[i * 2 + 1]);
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) scores_.s[0][0][e] += odd[e];
    }
  }

  __device__ __forceinline__ void MaskKeys(const Place& at, int key, int tile, int own) {
    const Sequence& s = line_.SequenceOf(at);
    const PackedRows packed(p_, 0, s.q_rows);
    ForOwnRows([&](int m, int half) {
      const KeyRange seen = KeysOf(at, s, packed, OwnRow(m, half));
#pragma unroll
      for (int n = 0; n < Traits::kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int in_part = n * 8 + Lane() % 4 * 2 + e, j = key + in_part;
          if (j < seen.first || j >= seen.end || !keys_.There(tile, own + in_part)) {
            scores_.s[m][n][half * 2 + e] = -INFINITY;
          }
        }
      }
    });
  }

  // What the bits of a row leave out, of the keys that are its sequence's queries.
  __device__ __forceinline__ void MaskDraft(const Place& at, int key) {
    const Sequence& s = line_.SequenceOf(at);
    const int draft = key - (s.kv_len - s.q_len);  // of the first key, its query
    if (draft + Traits::kKeys <= 0) return;
    const PackedRows packed(p_, 0, s.q_rows);
    ForOwnRows([&](int m, int half) {
      const int row = min(at.rows.first_row + OwnRow(m, half), packed.count() - 1);
      const uint32_t bits = TreeBits(p_, s, packed.Query(row), draft);
#pragma unroll
      for (int n = 0; n < Traits::kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int in_part = n * 8 + Lane() % 4 * 2 + e;
          if ((bits >> in_part & 1) == 0) scores_.s[m][n][half * 2 + e] = -INFINITY;
        }
      }
    });
  }

  // Of something that there is for all rows, that of a row of this warp's S.
  __device__ __forceinline__ static float OfOwn(const float (&all)[kRowBlocks][2], int m,
                                                int half) {
    float own = all[m][half];
#pragma unroll
    for (int i = 1; i < Traits::kRowGroups; ++i) {
      if (OwnRow() == i * kOwnBlocks * 16) own = all[i * kOwnBlocks + m][half];
    }
    return own;
  }

  // New maxima; O and the sums follow them. After some tiles they rarely move.
  __device__ __forceinline__ void Rescale(const OfRows& maxima) {
    float correction[kRowBlocks][2];
    bool moved = false;
#pragma unroll
    for (int rb = 0; rb < kRowBlocks; ++rb) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = max_[rb][half];
        float now = before;
#pragma unroll
        for (int i = 0; i < kKeyGroups; ++i) now = fmaxf(now, maxima[Row(rb, half)][i]);
        max_[rb][half] = now;
        moved |= now != before;
        correction[rb][half] = Exp2((before - Reference(now, 1.0f)) * rules_.to_log2);
      }
    }
    if (!__any_sync(~0u, moved)) return;
    ForOwnRows([&](int m, int half) { sum_[m][half] *= OfOwn(correction, m, half); });
#pragma unroll
    for (int rb = 0; rb < kRowBlocks; ++rb) {
#pragma unroll
      for (int n = 0; n < Traits::kColumns / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o_[rb][n][e] *= correction[rb][e / 2];
      }
    }
  }

  // P = exp2(S - max), where the tile's last columns were.
  __device__ __forceinline__ void ShowProbabilities(uint32_t stage, int own) {
    char* const tile = DynamicShared() + (stage - shared_);
    ForOwnRows([&](int m, int half) {
      const int row = OwnRow(m, half);
      const float reference = Reference(OfOwn(max_, m, half), rules_.to_log2);
#pragma unroll
      for (int n = 0; n < Traits::kKeys / 8; ++n) {
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          x[e] = Exp2(fmaf(scores_.s[m][n][half * 2 + e], rules_.to_log2, -reference));
          sum_[m][half] += x[e];
        }
        const int column = ColumnOf(row) + own + n * 8 + Lane() % 4 * 2;
        const int place = KvTile::Offset(row % Traits::kTileKeys, column);
        *reinterpret_cast<uint32_t*>(tile + place) = Pack<T>(x[0], x[1]);
      }
    });
  }
  // The column where a row's probabilities begin.
  __device__ __forceinline__ static constexpr int ColumnOf(int row) {
    return Traits::kValue + row / Traits::kTileKeys * Traits::kTileKeys;
  }

  // O += P V, of all rows. The fragments of V come one ahead of their products; those of P, which
  // are many, do not: O leaves no registers for two of each.
  __device__ __forceinline__ void AddValues(uint32_t stage) {
    constexpr int kPairs = Traits::kColumns / 16, kKeySteps = Traits::kTileKeys / 16;
    const LaneBlock<Traits::kDim, BlockOrder::kRowsFirst> at(Lane());
    const OperandB<KvTile, Lies::kDown> values{stage, FirstColumn()};
    uint32_t p[kRowBlocks][4], v[2][4];
    values.Load(v[0], Lane(), 0, 0);
#pragma unroll
    for (int i = 0; i < kKeySteps * kPairs; ++i) {
      const int step = i / kPairs, pair = i % kPairs, next = i + 1;
      if (pair == 0) {
#pragma unroll
        for (int rb = 0; rb < kRowBlocks; ++rb) {
          const int row = rb * 16;
          LoadMatrices(p[rb],
                       at.Address(stage, row % Traits::kTileKeys, ColumnOf(row) + step * 16));
        }
      }
      if (next < kKeySteps * kPairs) {
        values.Load(v[next % 2], Lane(), next % kPairs, next / kPairs);
      }
      const uint32_t (&b)[4] = v[i % 2];
#pragma unroll
      for (int rb = 0; rb < kRowBlocks; ++rb) {
        Mma16x8x16<T>(o_[rb][pair * 2], p[rb], b[0], b[1]);
        Mma16x8x16<T>(o_[rb][pair * 2 + 1], p[rb], b[2], b[3]);
      }
    }
  }

  // Two lanes that are neighbours have four columns of two rows: each writes one of the rows.
  __device__ __forceinline__ void End(const Place& at, bool whole, unsigned slot) {
    __shared__ OfRows sums;
    if (HasScores()) {
      ForOwnRows([&](int m, int half) {
        const float sum = RowSum(sum_[m][half]);
        if (Lane() % 4 == 0) sums[OwnRow(m, half)][KeyGroup()] = sum;
      });
    }
    __syncthreads();
    const Sequence& s = line_.SequenceOf(at);
    const PackedRows packed(p_, 0, s.q_rows);
    const int rows = min(Traits::kRows, packed.count() - at.rows.first_row);
    const bool second = Lane() % 2 != 0;
#pragma unroll
    for (int rb = 0; rb < kRowBlocks; ++rb) {
      const int row = rb * 16 + Lane() / 4 + (second ? 8 : 0);
      PartialRow result = {{(second ? max_[rb][1] : max_[rb][0]) * rules_.to_log2, 0.0f}, {}};
#pragma unroll
      for (int i = 0; i < kKeyGroups; ++i) result.sums.sum += sums[row][i];
#pragma unroll
      for (int n = 0; n < Traits::kColumns / 8; ++n) {
        const float (&o)[4] = o_[rb][n];
        float other[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          other[i] = __shfl_xor_sync(~0u, second ? o[i] : o[2 + i], 1);
        }
        if (row >= rows) continue;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          result.o[i] = second ? other[i] : o[i];
          result.o[2 + i] = second ? o[2 + i] : other[i];
        }
        const int column = FirstColumn() + n * 8 + Lane() % 4 / 2 * 4;
        if (whole) {
          ResultRow<T>(p_, s, packed, at.rows.first_row + row, column).Write(result);
        } else {
          StorePiece(p_, slot, row, column, result);
        }
      }
    }
    if (whole || HasSplit()) return;
    __syncthreads();
    if (threadIdx.x == 0) Publish(p_.piece_there + slot);
  }

  template <typename Do>
  __device__ __forceinline__ static void ForOwnRows(Do each) {
#pragma unroll
    for (int m = 0; m < kOwnBlocks; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) each(m, half);
    }
  }

  __device__ __forceinline__ static int Lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static int Warp() { return threadIdx.x / 32; }
  // Of S, this warp's keys, whether it has any, and its rows.
  __device__ __forceinline__ static bool HasScores() {
    return Traits::kRowGroups * kKeyGroups == Traits::kWarps ||
           Warp() < Traits::kRowGroups * kKeyGroups;
  }
  __device__ __forceinline__ static int KeyGroup() { return Warp() % kKeyGroups; }
  __device__ __forceinline__ static int OwnRow() { return Warp() / kKeyGroups * kOwnBlocks * 16; }
  // Rows of this thread: of S, and of O.
  __device__ __forceinline__ static int OwnRow(int m, int half) { return OwnRow() + Row(m, half); }
  __device__ __forceinline__ static int Row(int rb, int half) {
    return rb * 16 + half * 8 + Lane() / 4;
  }
  __device__ __forceinline__ static int FirstColumn() { return Warp() * Traits::kColumns; }

  const Params& p_;
  OwnLine line_;
  Keys keys_;
  const uint32_t shared_;
  const ScoreRules rules_;
  uint32_t held_[Traits::kHoldsQueries ? kSteps : 1][4];
  float o_[kRowBlocks][Traits::kColumns / 8][4];
  float max_[kRowBlocks][2];  // of all rows, before to_log2
  // Of this warp's part of S: scores; sums of this lane's columns; the keys that all of this lane's
  // rows see.
  ForwardRows<Scores> scores_;
  float sum_[kOwnBlocks][2];
  int all_from_, all_to_;
};

// Who computes a CTA's share, for AttentionSplit.
template <typename T, int kDim, int kValue, int kRowBlocks, bool kCompact>
struct ComputesShare<LatentTraits<T, kDim, kValue, kRowBlocks, kCompact>> {
  using Type = LatentForward<LatentTraits<T, kDim, kValue, kRowBlocks, kCompact>>;
};

}  // namespace kvblock::generic
