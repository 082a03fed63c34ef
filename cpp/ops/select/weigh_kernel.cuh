// Each tile's share of the attention of its row of tiles, by pieces, as a CUDA kernel
// (kvblock/select.h).
//
//   S = scale Q K^T + bias,  P = exp(S - max) / rowsum,  shares = P summed over a tile's pieces of
//   keys, and averaged over its pieces of queries
//
// The query heads of a key head have the same keys. So a row of theirs is a line of units, one for
// each row of tiles and head, a unit's pieces of queries one after the other, and a CTA has 128
// pieces of that line. It walks twice over the pieces of keys that any of them sees: first for the
// largest score and the sum of each row, then for the shares, which need both. Products are small
// beside what it would take to keep scores or their exponentials in memory.
//
// Shared memory: Q | K | K. While a tile of keys is multiplied, the next one arrives by cp.async. A
// warp owns 32 rows, so rows never meet another warp, and neither do units: theirs are a power of
// two of rows, at most 32, that lie together.
//
// Rows and keys lie in shared memory in such an order that a thread's accumulators are of pieces
// side by side, 4 of queries and a quarter of a tile of keys. So most sums over the pieces of a
// tile are a thread's own, and where it has more of them, a few lanes' that are next to each other.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "device/cp_async.cuh"
#include "device/fast_math.cuh"
#include "device/shared.cuh"
#include "device/special.cuh"
#include "kvblock/select.h"
#include "ops/attention/contract/head_rows.cuh"
#include "ops/attention/generic/product.cuh"
#include "ops/attention/generic/tile.cuh"

namespace kvblock {

struct WeighTilesParams {
  const void *queries, *keys;
  const float* factors;
  const int32_t *bounds, *q_ranges, *kv_ranges, *places;
  const float *distance, *first;
  float* shares;
  int32_t heads, kv_heads, group, pairs;  // pairs: of a member and a key head
  int32_t dim, rows, columns;
  int32_t down, across;  // pieces of a tile, of queries and of keys, as powers of two
  float scale;           // of scores as exponents of 2
};

// kRowBytes: of a piece in shared memory. kNear: whether something is added by distance.
template <typename T_, int kRowBytes, bool kNear_>
struct WeighTraits {
  using T = T_;
  static constexpr bool kNear = kNear_;
  static constexpr int kThreads = 128, kRowBlocks = 2, kRows = kThreads;
  static constexpr int kKeys = kRowBytes > 256 ? 32 : 64, kBlocks = kKeys / 8;
  static constexpr int kOwnRows = 4, kOwnKeys = kKeys / 4;  // of a thread
  static constexpr int kDim = kRowBytes / 2, kSteps = kRowBytes / 32;
  using QTile = generic::TileOf<T, kRows, kDim>;
  using KTile = generic::TileOf<T, kKeys, kDim>;
  static constexpr int kCtas = kRowBytes > 256 ? 2 : 3;  // of a multiprocessor, by registers
  static constexpr int kSharedBytes = QTile::kBytes + 2 * KTile::kBytes;
  static_assert(kKeys >= KVBLOCK_MOST_PIECES && kRowBlocks * 16 >= KVBLOCK_MOST_PIECES);

  // Which row of a CTA, and which key of a tile, lies in a row of shared memory.
  __device__ static __forceinline__ int RowIn(int place) {
    return place / 32 * 32 + place % 8 * kOwnRows + place % 32 / 8;
  }
  __device__ static __forceinline__ int KeyIn(int place) {
    return place % 8 / 2 * kOwnKeys + place / 8 * 2 + place % 2;
  }
};

// Where a row of a CTA is: which piece of queries it has, of which head.
struct WeighPlace {
  bool exists;
  int head;       // of the key head's
  int64_t piece;  // of all members
  int unit;       // of all members and heads

  __device__ __forceinline__ WeighPlace(const WeighTilesParams& p, int first_unit, int pair,
                                        int row) {
    const int own = first_unit + (row >> p.down), tile = own / p.group;
    exists = own < p.rows * p.group;
    head = own % p.group;
    piece = ((int64_t{pair / p.kv_heads} * p.rows + tile) << p.down) + (row & ((1 << p.down) - 1));
    unit = (pair * p.group + head) * p.rows + tile;
  }
};

// What is known of a row, in shared memory.
struct WeighKnown {
  int unit, head;  // of all members and heads; of all members
  int place;       // among pieces of keys
  float scale;     // of its scores, as exponents of 2
};

// What a row sees, and what it has found: in registers, of as many rows as a thread has a part of.
struct WeighRow {
  int first, end;  // pieces of keys
  float scale;     // that its scores are still to be multiplied by, above 0
  // The largest exponent of 2, and the sum of the powers, over it; later `top` is what makes
  // shares.
  float top, sum;
};

template <int kRows>
struct WeighShared {
  WeighKnown known[kRows];
  int first[kRows], end[kRows];
};

// Fills in what is known of row `row`.
template <int kRows>
__device__ __forceinline__ void LookUp(const WeighTilesParams& p, int first_unit, int pair, int row,
                                       WeighShared<kRows>& shared) {
  const WeighPlace at(p, first_unit, pair, row);
  WeighKnown known{-1, 0, 0, p.scale};
  int2 seen = make_int2(0, 0);
  if (at.exists) {
    known.unit = at.unit;
    known.head = pair * p.group + at.head;
    if (p.factors != nullptr) known.scale *= p.factors[known.head];
    seen = reinterpret_cast<const int2*>(p.bounds)[at.piece];
    if (p.places != nullptr) known.place = p.places[at.piece];
  }
  shared.known[row] = known;
  const bool sees = seen.x < seen.y;
  shared.first[row] = sees ? max(seen.x, 0) : INT_MAX;
  shared.end[row] = sees ? min(seen.y, p.columns << p.across) : 0;
}

// The class of a distance, two for each power of two: 4-5 and 6-7, 8-11 and 12-15, and so on.
__device__ __forceinline__ int ClassOf(int apart) {
  apart = abs(apart);
  const int octave = 31 - __clz(max(apart, 1)), half = apart >> max(octave - 1, 0) & 1;
  return min(apart < 2 ? apart : 2 * octave + half, KVBLOCK_DISTANCES - 1);
}

// What multiprocessors of capability 8.6 and 8.9 have for a CTA, to the last byte at 512 bytes.
template <typename Traits>
constexpr bool kFits = Traits::kSharedBytes + sizeof(WeighShared<Traits::kRows>) <= 99 * 1024;

template <typename Traits>
using WeighRows = WeighRow[Traits::kOwnRows];
template <typename Traits>
using WeighScores = float[Traits::kRowBlocks][Traits::kBlocks][4];

// A thread's score of its row i and key j.
template <typename Scores>
__device__ __forceinline__ auto& ScoreAt(Scores& s, int i, int j) {
  return s[i / 2][j / 2][i % 2 * 2 + j % 2];
}

// The pieces of queries of a CTA, unit by unit.
template <typename Traits>
__device__ __forceinline__ void LoadWeighQueries(const WeighTilesParams& p, uint32_t to,
                                                 int first_unit, int pair, int thread) {
  using Tile = typename Traits::QTile;
  constexpr int kChunks = Traits::kDim / Tile::kColumnsOfChunk;
  const auto* const queries = static_cast<const typename Traits::T*>(p.queries);
  for (int i = thread; i < Traits::kRows * kChunks; i += Traits::kThreads) {
    const int place = i / kChunks, chunk = i % kChunks, column = chunk * Tile::kColumnsOfChunk;
    const WeighPlace at(p, first_unit, pair, Traits::RowIn(place));
    const bool valid = at.exists && column < p.dim;
    const int64_t head = (at.piece * p.kv_heads + pair % p.kv_heads) * p.group + at.head;
    CopyAsync16(to + Tile::ChunkOffset(place, chunk), queries + (valid ? head * p.dim + column : 0),
                valid);
  }
}

// A tile of pieces of keys, from `first` on.
template <typename Traits>
__device__ __forceinline__ void LoadWeighKeys(const HeadRows& keys, uint32_t to, int first, int end,
                                              int thread) {
  using Tile = typename Traits::KTile;
  constexpr int kColumns = Tile::kColumnsOfChunk, kChunks = Traits::kDim / kColumns;
  constexpr int kStep = Traits::kThreads / kChunks;  // places between a thread's own
  static_assert(kStep % 8 == 0 || kStep == 4);       // so that what KeyIn gives of two adds up
  const int place = thread / kChunks, chunk = thread % kChunks;
  first += Traits::KeyIn(place);
  const char* const from = keys.first + first * keys.stride + chunk * 16;
  const bool inside = chunk * kColumns < keys.dim;
#pragma unroll
  for (int i = 0; i < Traits::kKeys; i += kStep) {
    const bool valid = inside && first + Traits::KeyIn(i) < end;
    CopyAsync16(to + Tile::ChunkOffset(place + i, chunk), from + Traits::KeyIn(i) * keys.stride,
                valid);
  }
}

// Scores of a thread, whose first row is `row` and whose first key is first_key, as exponents of 2
// but for the scale that the row keeps; and nothing where a row does not see a piece. `known` is
// that of the first row.
template <typename Traits>
__device__ __forceinline__ void FinishWeighScores(const WeighTilesParams& p,
                                                  const WeighRows<Traits>& rows,
                                                  const WeighKnown* known, int row, int first_key,
                                                  WeighScores<Traits>& s) {
  constexpr int kRows = Traits::kOwnRows, kKeys = Traits::kOwnKeys;
  const auto sees = [&](int i, int key) { return key >= rows[i].first && key < rows[i].end; };
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float scale = known[i].scale;
    if constexpr (!Traits::kNear) {
      if (scale > 0.0f) continue;
#pragma unroll
      for (int j = 0; j < kKeys; ++j) ScoreAt(s, i, j) *= scale;
    } else {
      const int apart = first_key - known[i].place;
      const float* const distance = p.distance + int64_t{known[i].head} * KVBLOCK_DISTANCES;
      // Far away neighbours are of one class. On both sides of a place the ends are not: nowhere do
      // two numbers that add up to 7 or 15 share one.
      const int of = ClassOf(apart);
      const bool alike = of == ClassOf(apart + kKeys - 1);
      if (__all_sync(~0u, alike)) {
        const float bias = distance[of] * kLog2E;
#pragma unroll
        for (int j = 0; j < kKeys; ++j) ScoreAt(s, i, j) = fmaf(ScoreAt(s, i, j), scale, bias);
      } else {
#pragma unroll
        for (int j = 0; j < kKeys; ++j) {
          const float bias = distance[ClassOf(apart + j)] * kLog2E;
          ScoreAt(s, i, j) = fmaf(ScoreAt(s, i, j), scale, bias);
        }
      }
      const int own = rows[i].first - first_key;
      if (own >= 0 && own < kKeys) {
        const float bias = p.first[known[i].head] * kLog2E;
#pragma unroll
        for (int j = 0; j < kKeys; ++j) ScoreAt(s, i, j) += j == own ? bias : 0.0f;
      }
    }
  }
  bool whole = true;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    whole = whole && sees(i, first_key) && sees(i, first_key + kKeys - 1);
  }
  if (!__all_sync(~0u, whole)) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        if (!sees(i, first_key + j)) ScoreAt(s, i, j) = -INFINITY;
      }
    }
  }
  if (p.kv_ranges == nullptr) return;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (known[i].unit < 0) continue;
    // Of all members and heads, as units are.
    const int tile = known[i].unit % p.rows, member = known[i].unit / p.rows / p.heads;
    const int64_t piece =
        ((int64_t{member} * p.rows + tile) << p.down) + (row + i & ((1 << p.down) - 1));
    const int2 own = reinterpret_cast<const int2*>(p.q_ranges)[piece];
    const int2* const ranges =
        reinterpret_cast<const int2*>(p.kv_ranges) + (int64_t{member} * p.columns << p.across);
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      if (!sees(i, first_key + j)) continue;
      const int2 other = ranges[first_key + j];
      if (own.y < other.x || own.x > other.y) ScoreAt(s, i, j) = -INFINITY;
    }
  }
}

// Takes a tile's scores into a lane's own maxima, as scores are, and sums of powers.
template <typename Traits>
__device__ __forceinline__ void TakeWeighScores(WeighRows<Traits>& rows,
                                                const WeighScores<Traits>& s) {
#pragma unroll
  for (int i = 0; i < Traits::kOwnRows; ++i) {
    const float scale = rows[i].scale;
    float top = rows[i].top;
#pragma unroll
    for (int j = 0; j < Traits::kOwnKeys; ++j) top = fmaxf(top, ScoreAt(s, i, j));
    const float reference = top == -INFINITY ? 0.0f : top * scale;
    float sums[2] = {rows[i].sum * Exp2(fmaf(rows[i].top, scale, -reference)), 0.0f};
#pragma unroll
    for (int j = 0; j < Traits::kOwnKeys; ++j) {
      sums[j % 2] += Exp2(fmaf(ScoreAt(s, i, j), scale, -reference));
    }
    rows[i].top = top;
    rows[i].sum = sums[0] + sums[1];
  }
}

// The four lanes of a row put together what they have. A row that sees nothing has no shares.
__device__ __forceinline__ void JoinWeighRow(WeighRow& row, int down) {
  row.top *= row.scale;
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const float other_top = __shfl_xor_sync(~0u, row.top, step);
    const float other_sum = __shfl_xor_sync(~0u, row.sum, step);
    const float top = fmaxf(row.top, other_top), reference = top == -INFINITY ? 0.0f : top;
    row.sum = row.sum * Exp2(row.top - reference) + other_sum * Exp2(other_top - reference);
    row.top = top;
  }
  row.top = row.sum == 0.0f ? INFINITY : row.top + Log2(row.sum) + down;
}

// Sums shares over the pieces of each tile, and writes them. row, first_key: a thread's first ones.
template <typename Traits>
__device__ __forceinline__ void WriteWeighShares(const WeighTilesParams& p,
                                                 const WeighRows<Traits>& rows,
                                                 const WeighKnown* known, int row, int first_key,
                                                 WeighScores<Traits>& s) {
  constexpr int kRows = Traits::kOwnRows, kKeys = Traits::kOwnKeys;
  constexpr int kOwnAcross = kKeys == 16 ? 4 : 3;
  static_assert(1 << kOwnAcross == kKeys && kRows == 4);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      ScoreAt(s, i, j) = Exp2(fmaf(ScoreAt(s, i, j), rows[i].scale, -rows[i].top));
    }
  }
#pragma unroll
  for (int step = 1; step < kRows; step *= 2) {
    if (1 << p.down <= step) break;
#pragma unroll
    for (int i = 0; i < kRows; i += 2 * step) {
#pragma unroll
      for (int j = 0; j < kKeys; ++j) ScoreAt(s, i, j) += ScoreAt(s, i + step, j);
    }
  }
#pragma unroll
  for (int step = 1; step < kKeys; step *= 2) {
    if (1 << p.across <= step) break;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kKeys; j += 2 * step) ScoreAt(s, i, j) += ScoreAt(s, i, j + step);
    }
  }
  // A tile that has more pieces than a thread has one of each thread's.
  const int row_mask = (1 << p.down) - 1, key_mask = (1 << p.across) - 1;
  const auto add_lanes = [&](float& share, int step) {
    share += __shfl_xor_sync(~0u, share, step);
  };
  if (p.down > 2) {
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      if ((j & key_mask) != 0) continue;
      add_lanes(ScoreAt(s, 0, j), 4);
      if (p.down > 3) add_lanes(ScoreAt(s, 0, j), 8);
      if (p.down > 4) add_lanes(ScoreAt(s, 0, j), 16);
    }
  }
  if (p.across > kOwnAcross) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if ((i & row_mask) != 0) continue;
      add_lanes(ScoreAt(s, i, 0), 1);
      if (p.across > kOwnAcross + 1) add_lanes(ScoreAt(s, i, 0), 2);
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int unit = ((row + i) & row_mask) == 0 ? known[i].unit : -1;
    if (unit < 0) continue;
    float* const shares = p.shares + int64_t{unit} * p.columns;
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      const int key = first_key + j, column = key >> p.across;
      if ((key & key_mask) == 0 && column < p.columns) shares[column] = ScoreAt(s, i, j);
    }
  }
}

// The smallest first and the largest end of all rows of a CTA.
template <int kRows>
__device__ __forceinline__ int2 SpanOfCta(const WeighShared<kRows>& shared, int lane) {
  int2 span = make_int2(INT_MAX, 0);
#pragma unroll
  for (int row = lane; row < kRows; row += 32) {
    span = make_int2(min(span.x, shared.first[row]), max(span.y, shared.end[row]));
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    span.x = min(span.x, __shfl_xor_sync(~0u, span.x, step));
    span.y = max(span.y, __shfl_xor_sync(~0u, span.y, step));
  }
  return span;
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtas)
    WeighTiles(const __grid_constant__ WeighTilesParams p) {
  using T = typename Traits::T;
  using QTile = typename Traits::QTile;
  using KTile = typename Traits::KTile;
  constexpr int kThreads = Traits::kThreads, kKeys = Traits::kKeys;
  static_assert(kFits<Traits>);
  __shared__ WeighShared<Traits::kRows> shared;
  const int thread = threadIdx.x, lane = thread % 32, first_row = thread / 32 * 32;
  // Under a causal mask the last rows see most: they begin.
  const int block = (gridDim.x - 1 - blockIdx.x) / p.pairs, pair = blockIdx.x % p.pairs;
  const int member = pair / p.kv_heads, kv_head = pair % p.kv_heads;
  const int units = Traits::kRows >> p.down, first_unit = block * units;
  const uint32_t q_tile = static_cast<uint32_t>(__cvta_generic_to_shared(DynamicShared()));
  const uint32_t k_tiles = q_tile + QTile::kBytes;
  LoadWeighQueries<Traits>(p, q_tile, first_unit, pair, thread);
  LookUp(p, first_unit, pair, thread, shared);
  __syncthreads();
  const int2 span = SpanOfCta(shared, lane);
  const bool sees = span.x < span.y;
  const int first_tile = sees ? span.x / kKeys : 0;
  const int end_tile = sees ? (span.y + kKeys - 1) / kKeys : 0;
  const int own_row = first_row + lane / 4 * Traits::kOwnRows;
  const WeighKnown* const known = shared.known + own_row;
  WeighRows<Traits> rows;
#pragma unroll
  for (int i = 0; i < Traits::kOwnRows; ++i) {
    const bool left = !Traits::kNear && known[i].scale > 0.0f;  // for later
    rows[i] = {shared.first[own_row + i], shared.end[own_row + i], left ? known[i].scale : 1.0f,
               -INFINITY, 0.0f};
  }

  const int pieces = p.columns << p.across;
  const HeadRows keys = RowsOfHead<T>(p.keys, int64_t{member} * pieces, p.kv_heads, kv_head, p.dim);
  const auto load = [&](int tile, int stage) {
    LoadWeighKeys<Traits>(keys, k_tiles + stage * KTile::kBytes, tile * kKeys, pieces, thread);
  };
  if (sees) load(first_tile, 0);
  CopyAsyncCommit();
  int stage = 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (int tile = first_tile; tile < end_tile; ++tile) {
      CopyAsyncWait<0>();
      __syncthreads();
      const bool last = tile + 1 == end_tile;
      if (!last || pass == 0) load(last ? first_tile : tile + 1, stage ^ 1);
      CopyAsyncCommit();
      WeighScores<Traits> s;
      generic::Clear(s);
      const generic::OperandA<QTile, generic::Lies::kAcross> a{q_tile, first_row};
      const generic::OperandB<KTile, generic::Lies::kAcross> b{k_tiles + stage * KTile::kBytes, 0};
      generic::Product<T, Traits::kSteps>(s, a, b, lane);
      const int first_key = tile * kKeys + lane % 4 * Traits::kOwnKeys;
      FinishWeighScores<Traits>(p, rows, known, own_row, first_key, s);
      if (pass == 0) {
        TakeWeighScores<Traits>(rows, s);
      } else {
        WriteWeighShares<Traits>(p, rows, known, own_row, first_key, s);
      }
      stage ^= 1;
    }
#pragma unroll
    for (int i = 0; i < Traits::kOwnRows; ++i) {
      if (pass == 0) JoinWeighRow(rows[i], p.down);
    }
  }
  // Of what nobody sees there are no shares.
  const int first_column = first_tile * kKeys >> p.across,
            end_column = end_tile * kKeys >> p.across;
  for (int i = 0; i < units; ++i) {
    const WeighPlace at(p, first_unit, pair, i << p.down);
    for (int column = thread; at.exists && column < p.columns; column += kThreads) {
      if (column < first_column || column >= end_column) {
        p.shares[int64_t{at.unit} * p.columns + column] = 0.0f;
      }
    }
  }
}

}  // namespace kvblock
