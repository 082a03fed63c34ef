// How a piece leaves Hopper's kernel for latent caches (kernel.cuh): as a result, or to memory
// until the other pieces of its unit are there.
#pragma once

#include <cfloat>
#include <cstdint>

#include "device/mbarrier.cuh"
#include "device/mma.cuh"
#include "device/publish.cuh"
#include "device/warpgroup.cuh"
#include "ops/attention/combine/result.cuh"
#include "ops/attention/hopper/forward/rows.cuh"
#include "ops/attention/hopper/latent/shared.cuh"
#include "ops/attention/schedule/packed_rows.cuh"

namespace kvblock::hopper {

// Both consumers, so many times. At a barrier in shared memory, as they do so in different places
// of the code, where compute-sanitizer does not see that a hardware barrier orders them.
template <typename Traits>
class BothMeet {
 public:
  __device__ __forceinline__ explicit BothMeet(LatentShared<Traits>& shared)
      : barrier_(SharedAddress(&shared.both_meet)) {}
  __device__ __forceinline__ void operator()() {
    BarrierArrive(barrier_);
    BarrierWait(barrier_, phase_);
    phase_ ^= 1;
  }

 private:
  const uint32_t barrier_;
  int phase_ = 0;
};

// Consumer kOwn has the columns from 256 kOwn on; both know each row's reference, and have the sum
// over their own tiles.
template <typename Traits, int kOwn>
__device__ __forceinline__ void WriteResult(const typename Traits::Params& p,
                                            LatentShared<Traits>& shared, const LatentPiece& piece,
                                            int number, BothMeet<Traits>& meet,
                                            Rows<Traits>& rows) {
  using T = typename Traits::T;
  const int lane = threadIdx.x % 32, first = threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;
  auto& sums = shared.sums[number % 2];
  PartialSum of_row[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float reference = rows.sums.reference[half];
    of_row[half] = {reference == -FLT_MAX ? -INFINITY : reference, RowSum(rows.sums.sum[half])};
    if (lane % 4 == 0) sums[kOwn][first + half * 8] = of_row[half].sum;
  }
  meet();
  const Sequence& s = piece.sequence;
  const PackedRows packed(p, 0, s.q_rows);
  const int rows_there = min(RowsOf<Traits>(p), packed.count() - piece.first_row);
  const auto& o = rows.state.o[0];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + half * 8;
    of_row[half].sum += sums[1 - kOwn][row];
    const bool there = row < rows_there;
    if (piece.whole) {
      // Lanes change half of their columns with their neighbour, so that each has 4 columns side by
      // side, and four lanes write 32 bytes of a row.
      const bool odd = lane % 2 != 0;
      const int column = kOwn * Traits::kValueDim + lane % 2 * 8 + lane % 4 / 2 * 4;
      const ResultRow<T> to(p, s, packed, piece.first_row + min(row, rows_there - 1), column);
      const float factor = to.Finish(&of_row[half]);
      const bool nothing = of_row[half].sum == 0.0f;
#pragma unroll
      for (int n = 0; n < Traits::kValueDim / 8; n += 2) {
        uint32_t words[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float (&x)[4] = o[n + i];
          words[i] = nothing ? 0 : Pack<T>(x[half * 2] * factor, x[half * 2 + 1] * factor);
        }
        const uint32_t got = __shfl_xor_sync(~0u, odd ? words[0] : words[1], 1);
        if (there) {
          to.Store(n * 8, odd ? make_uint2(got, words[1]) : make_uint2(words[0], got));
        }
      }
      if (there && lane % 4 == 0) to.WriteLse(of_row[half]);
    } else if (there) {
      const bool nothing = of_row[half].sum == 0.0f;
      const float share = Share(of_row[half].sum);
      const int in_unit = RankOf<Traits>() * Traits::kRows + row;
      const int64_t at = static_cast<int64_t>(piece.slot) * p.rows + in_unit;
      float* const to = p.piece_o + at * p.value_dim + kOwn * Traits::kValueDim + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < Traits::kValueDim / 8; ++n) {
        const float (&x)[4] = o[n];
        *reinterpret_cast<float2*>(to + n * 8) =
            nothing ? make_float2(0.0f, 0.0f)
                    : make_float2(x[half * 2] * share, x[half * 2 + 1] * share);
      }
      if (kOwn == 0 && lane % 4 == 0) StorePieceLse(p, at, of_row[half]);
    }
  }
  if (piece.whole || p.split != kNoSplit) return;
  meet();
  if (kOwn == 0 && threadIdx.x % kWarpgroup == 0) Publish(PieceThere<Traits>(p, piece.slot));
}

}  // namespace kvblock::hopper
