// What a warpgroup does with its rows in Hopper's forward kernel (kernel.cuh): products and
// softmax. (The way out is in result.cuh.)
#pragma once

#include <cfloat>
#include <cstdint>

#include "device/fast_math.cuh"
#include "device/mbarrier.cuh"
#include "device/mma.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "ops/attention/hopper/forward/shared.cuh"
#include "ops/attention/mask/forward_scores.cuh"

namespace kvblock::hopper {

// Of a thread's two rows, g and g + 8 of its warp's 16 (device/mma.cuh).
struct RowSums {
  float reference[2] = {-FLT_MAX, -FLT_MAX};  // log2 of what they are relative to
  float sum[2] = {0.0f, 0.0f};                // this thread's columns only
  float base[2] = {-FLT_MAX, -FLT_MAX};       // with a bias, of the scores; reference is 0 then
};

// Of 8 bits: the product of one tile's P and V, and the sums of P of all tiles that are in O, of
// both rows (narrow_rows.cuh).
template <int kCount, bool kNarrow>
struct TileProduct {};
template <int kCount>
struct TileProduct<kCount, true> {
  float product[kCount];
  float total[2];
};

// A thread's part of its warp's rows.
template <typename Traits>
struct Rows : TileProduct<(Traits::kValueDim + Traits::kOnes) / 2, Traits::kNarrow> {
  // kvblock::ForwardRows gives FinishScores its view: rows.s[0][column / 8][4].
  kvblock::ForwardRows<Traits> state;
  uint32_t p[Traits::kProductSteps][4];  // probabilities as T: the A operand
  RowSums sums;

  using ScoreArray = float[Traits::kKeys / 2];
  using OutputArray = float[Traits::kValueDim / 2];
  __device__ __forceinline__ ScoreArray& s() { return reinterpret_cast<ScoreArray&>(state.s); }
  __device__ __forceinline__ OutputArray& o() { return reinterpret_cast<OutputArray&>(state.o); }
  // What P V is added to.
  __device__ __forceinline__ auto& summed() {
    if constexpr (Traits::kNarrow) {
      return this->product;
    } else {
      return o();
    }
  }
};

// A float whose bits, plus a small whole number, are those of the float plus this number. Scores of
// integers begin with it, so that what tensor cores add up is a float that they belong to.
constexpr float kOfZero = 12582912.0f;  // 1.5 * 2^23; 128 products of int8 are at most 2^21

// What scores of integers are before their product is issued, so that nothing of the tile before
// stays. (Products of floats do not add to what is there.)
template <typename Traits>
__device__ __forceinline__ void BeginScores(Rows<Traits>& rows) {
  if constexpr (Traits::kIntegers) {
#pragma unroll
    for (float& x : rows.s()) x = kOfZero;
  }
}

// S = Q K^T for this warpgroup's rows.
template <typename Traits>
__device__ __forceinline__ void IssueScores(Rows<Traits>& rows, uint64_t q, uint64_t k) {
#pragma unroll
  for (int step = 0; step < Traits::kQueryDim * Traits::kElementBytes / 32; ++step) {
    const int chunk = step / 4, in_row = step % 4 * 32;
    Wgmma<Traits::kKeys>::template Shared<typename Traits::T>(
        rows.s(), Advance(q, chunk * Traits::kQueries * kChunkRowBytes + in_row),
        Advance(k, chunk * Traits::kKeys * kChunkRowBytes + in_row), step > 0 || Traits::kIntegers);
  }
}

// O += P V, or O = P V for an item's first tile; of 8 bits the same of the product.
template <typename Traits>
__device__ __forceinline__ void IssueValues(Rows<Traits>& rows, uint64_t v, bool first) {
  if constexpr (Traits::kNarrow) {
#pragma unroll
    for (int step = 0; step < Traits::kProductSteps; ++step) {
      Wgmma<Traits::kValueRows>::template Registers<E4m3>(
          rows.product, rows.p[step], Advance(v, step * 32), step > 0 || !first);
    }
  } else {
#pragma unroll
    for (int step = 0; step < Traits::kKeys / 16; ++step) {
      Wgmma<Traits::kValueDim>::template Registers<typename Traits::T, OperandLies::kDown>(
          rows.o(), rows.p[step], Advance(v, step * 16 * kChunkRowBytes), step > 0 || !first);
    }
  }
}

// From scores to exponents of 2, or these plus y. With a softcap SmallSoftCap does the same.
struct Scaled {
  float to_log2;
  __device__ __forceinline__ float operator()(float x) const { return x * to_log2; }
  __device__ __forceinline__ float operator()(float x, float y) const {
    return fmaf(x, to_log2, y);
  }
  // Whether that of a score, given by its bits and not negative, is larger than `limit`.
  __device__ __forceinline__ bool Exceeds(int score, float limit) const {
    return score > __float_as_int(limit * Reciprocal(to_log2));
  }
};

// Where somebody looks: a tile's scores may be larger than their row's reference by this many
// powers of 2.
constexpr float kOutgrown = 8.0f;

// Of a thread's two rows the largest score, or 0, as bits.
template <typename Traits>
__device__ __forceinline__ void LargestScores(const Rows<Traits>& rows, int (&largest)[2]) {
  const auto& s = rows.state.s[0];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int max[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < Traits::kKeys / 8; ++n) {
      max[n % 2] = MaxOfBits(max[n % 2], s[n][half * 2], s[n][half * 2 + 1]);
    }
    largest[half] = ::max(max[0], max[1]);
  }
}

// The largest of the scores' sizes.
template <typename Traits>
__device__ __forceinline__ void LargestSizes(const Rows<Traits>& rows, float (&largest)[2]) {
  const auto& s = rows.state.s[0];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int max[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < Traits::kKeys / 8; n += 2) {
      const auto size = [&](int n) {
        return fmaxf(fabsf(s[n][half * 2]), fabsf(s[n][half * 2 + 1]));
      };
      max[n / 2 % 2] = MaxOfBits(max[n / 2 % 2], size(n), size(n + 1));
    }
    largest[half] = __int_as_float(::max(max[0], max[1]));
  }
}

// Scores of any size become their exponents.
template <typename Traits>
__device__ __forceinline__ void CapScores(const AttentionParams& p, Rows<Traits>& rows) {
  const float factor = p.scale * Reciprocal(p.softcap) * kTwoLog2E, cap = p.softcap * kLog2E;
#pragma unroll
  for (float& x : rows.s()) x = x == -INFINITY ? x : SoftCap(x * factor, cap);  // not masked ones
}

// The larger one. Of 8 bits NaN, if there is one: codes of probabilities would lose it.
template <typename Traits>
__device__ __forceinline__ float LargerOf(float a, float b) {
  if constexpr (Traits::kNarrow) return MaxOrNan(a, b);
  return fmaxf(a, b);
}
// That of the lanes of a row.
template <typename Traits>
__device__ __forceinline__ float LargestOfRow(float x) {
  x = LargerOf<Traits>(x, __shfl_xor_sync(~0u, x, 1));
  return LargerOf<Traits>(x, __shfl_xor_sync(~0u, x, 2));
}

// The largest scores of both rows.
template <typename Traits>
__device__ __forceinline__ void RowMaxima(const Rows<Traits>& rows, float (&max)[2]) {
  const auto& s = rows.state.s[0];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float of[2] = {s[0][half * 2], s[0][half * 2 + 1]};
#pragma unroll
    for (int n = 1; n < Traits::kKeys / 8; ++n) {
      of[0] = LargerOf<Traits>(of[0], s[n][half * 2]);
      of[1] = LargerOf<Traits>(of[1], s[n][half * 2 + 1]);
    }
    max[half] = LargestOfRow<Traits>(LargerOf<Traits>(of[0], of[1]));
  }
}

// New references for rows that have outgrown theirs. What came before is to be scaled by `factor`.
template <typename Exponent>
__device__ __forceinline__ void MoveReferences(RowSums& sums, const float (&max)[2],
                                               const Exponent& exponent, float (&factor)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float& reference = sums.reference[half];
    const float tile = exponent(max[half]), before = reference;
    const bool outgrown = tile > before + kOutgrown;
    if (outgrown) reference = tile;
    factor[half] = outgrown ? Exp2(before - tile) : 1.0f;
  }
}

// With a bias: scores become relative to their row's base, and rows that have outgrown theirs get a
// new one. What came before is to be scaled by `factor`. True: some row of this warp has a new one.
template <typename Traits>
__device__ __forceinline__ bool MoveBases(Rows<Traits>& rows, float (&factor)[2]) {
  constexpr float kMost = 5.0f;  // that a score may be above its base: less than kOutgrown as log2
  auto& s = rows.state.s[0];
  float max[2] = {-INFINITY, -INFINITY};  // of this thread's columns
  bool outgrown = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < Traits::kKeys / 8; ++n) {
      max[half] = fmaxf(max[half], fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
    }
    outgrown |= max[half] > rows.sums.base[half] + kMost;
    factor[half] = 1.0f;
    rows.sums.reference[half] = 0.0f;
  }
  const bool moved = __any_sync(~0u, outgrown);
  if (moved) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& base = rows.sums.base[half];
      const float before = base, now = RowMax(max[half]);
      if (now > before + kMost) base = now;
      factor[half] = Exp2((before - base) * kLog2E);
    }
  }
#pragma unroll
  for (int n = 0; n < Traits::kKeys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] -= rows.sums.base[e / 2];
  }
  return moved;
}

// The same, where it hardly ever happens: while no thread's largest score, or 0, has outgrown the
// reference, no lane asks another for its maximum. True: some row of this warp may have a new one.
template <typename Traits, typename Exponent>
__device__ __forceinline__ bool FollowMaxima(Rows<Traits>& rows, const Exponent& exponent,
                                             float (&factor)[2]) {
  int largest[2];
  LargestScores(rows, largest);
  bool outgrown = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float limit = rows.sums.reference[half] + kOutgrown;
    outgrown |= exponent.Exceeds(largest[half], limit);
    factor[half] = 1.0f;
  }
  if (!__any_sync(~0u, outgrown)) return false;
  float max[2] = {LargestOfRow<Traits>(__int_as_float(largest[0])),
                  LargestOfRow<Traits>(__int_as_float(largest[1]))};
  // A largest of 0 may stand for anything below.
  if (__any_sync(~0u, max[0] == 0.0f || max[1] == 0.0f)) RowMaxima(rows, max);
  MoveReferences(rows.sums, max, exponent, factor);
  return __any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f);
}

// The scores of columns 8 kFrom to 8 kTo become probabilities, and join the sums.
template <int kFrom, int kTo, typename Traits, typename Exponent>
__device__ __forceinline__ void Exponentials(Rows<Traits>& rows, const Exponent& exponent,
                                             float (&sum)[2][2]) {
  auto& s = rows.state.s[0];
#pragma unroll
  for (int n = kFrom; n < kTo; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[n][e] = Exp2(exponent(s[n][e], -rows.sums.reference[e / 2]));
      sum[e / 2][e % 2] += s[n][e];
    }
  }
}

// Whether some row of this warp has no reference yet.
__device__ __forceinline__ bool AnyUnset(const RowSums& sums) {
  return __any_sync(~0u, sums.reference[0] == -FLT_MAX || sums.reference[1] == -FLT_MAX);
}

// What a thread's probabilities of a tile, computed without a look at the largest score, may sum
// to. Beyond the first limit the row's scores grow, and somebody looks from then on; nearly always
// before they come beyond the second. Up to that, sums and, while V is below 2^32, products with V
// stay far from the end of float32.
constexpr float kOutgrownByMuch = 1 << 24;
constexpr float kOutgrownByFar = 65536.0f * 65536.0f * 65536.0f * 65536.0f;  // 2^64
// Whether some row of this warp has passed it. Sums that are NaN do not count: their rows are NaN
// whatever is done.
__device__ __forceinline__ bool Outgrew(const float (&tile)[2], float limit) {
  return __any_sync(~0u, tile[0] > limit || tile[1] > limit);
}

template <typename Traits>
__device__ __forceinline__ void AddSums(Rows<Traits>& rows, const float (&factor)[2],
                                        const float (&sum)[2][2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float& total = rows.sums.sum[half];
    total = fmaf(total, factor[half], sum[half][0] + sum[half][1]);
  }
  KeepAfter(rows.sums.sum);  // summed here, not where the sums are needed
}

template <typename Traits>
__device__ __forceinline__ void PackProbabilities(Rows<Traits>& rows) {
  auto& s = rows.state.s[0];
#pragma unroll
  for (int n = 0; n < Traits::kKeys / 8; ++n) {
    rows.p[n / 2][n % 2 * 2] = Pack<typename Traits::T>(s[n][0], s[n][1]);
    rows.p[n / 2][n % 2 * 2 + 1] = Pack<typename Traits::T>(s[n][2], s[n][3]);
  }
}

// With dropout, what a thread knows of its rows and of a tile's keys: the parts of their words, and
// which pairs are kept. (Its keys are the first two of eight, beginning with an even one.)
template <int kKeys>
struct RowDropout {
  uint32_t query_part, key_part_of_first;
  KeptPairs kept[kKeys / kDropoutBlock];

  __device__ __forceinline__ void TakeRows(uint2 key, int first_row, int lane) {
    query_part = QueryPart(key.x, first_row, lane / 4);
    key_part_of_first = KeyPart(key.y, 0, lane % 4 * 2);
  }
  // Held here, so that the hash runs between the exponentials that come next.
  __device__ __forceinline__ void TakeKeys(int first, uint32_t least) {
    const uint32_t key_part = KeyPart(key_part_of_first, first, 0);
#pragma unroll
    for (int n = 0; n < kKeys / kDropoutBlock; ++n) {
      kept[n] = {WordsOfQuery(query_part, key_part + n * kKeyBlock), least};
      kept[n].first = Opaque(kept[n].first);
      kept[n].second = Opaque(kept[n].second);
    }
  }
};
struct NothingDropped {};
// The same as PackProbabilities; those that are dropped become 0. (Their sums are there already.)
template <typename Traits>
__device__ __forceinline__ void PackKept(Rows<Traits>& rows, const RowDropout<Traits::kKeys>& at) {
  auto& s = rows.state.s[0];
#pragma unroll
  for (int step = 0; step < Traits::kKeys / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const pair = s[step * 2 + i / 2] + i % 2 * 2;
      rows.p[step][i] =
          Pack<typename Traits::T>(pair[0], pair[1]) & at.kept[step].Pair(i % 2 * 2 + i / 2);
    }
  }
}

template <typename Traits>
__device__ __forceinline__ void Rescale(Rows<Traits>& rows, const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < Traits::kValueDim / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) rows.state.o[0][n][e] *= factor[e / 2];
  }
  if constexpr (Traits::kNarrow) {
#pragma unroll
    for (int i = 0; i < Traits::kValueRows / 2; ++i) rows.product[i] *= factor[i / 2 % 2];
    rows.total[0] *= factor[0];
    rows.total[1] *= factor[1];
  }
}

// -inf for keys that are in no block.
template <typename Traits>
__device__ __forceinline__ void MaskHoles(
    const uint32_t (&holes)[Traits::kLoadWarps][Traits::kLaneRows], Rows<Traits>& rows, int lane) {
  auto& s = rows.state.s[0];
  const int four = lane % 4 / 2, pair = lane % 2;  // where this lane's two of eight keys are
#pragma unroll
  for (int n = 0; n < Traits::kKeys / 8; ++n) {
    // LoadedRow, the other way.
    constexpr int kWarps = Traits::kLoadWarps;
    const int turn = n * 2 / kWarps;
    const uint32_t bits = holes[n * 2 % kWarps + four][turn / 8] >> (pair * 16);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (bits >> (e % 2 * 8 + turn % 8) & 1) s[n][e] = -INFINITY;
    }
  }
}

// Clears rows of a V tile, for this warpgroup's products. The other consumers do
// the same for theirs; all write zeros.
template <typename Traits>
__device__ __forceinline__ void ClearRows(char* v, int from, int end, int thread, int barrier) {
  constexpr int kPieces = kChunkRowBytes / 16;  // of 16 bytes in a row
#pragma unroll 1
  for (int c = 0; c < Traits::kValueChunks; ++c) {
    uint4* chunk = reinterpret_cast<uint4*>(v + c * Traits::kKeys * kChunkRowBytes);
#pragma unroll 1
    for (int i = from * kPieces + thread; i < end * kPieces; i += kWarpgroup) {
      chunk[i] = uint4{};
    }
  }
  FenceAsync();
  BarrierMeet(barrier, kWarpgroup);
}

}  // namespace kvblock::hopper
