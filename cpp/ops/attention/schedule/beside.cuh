// How the GPU is shared out where the launch for few queries and that for many run side by side.
//
// The one is bound by memory, the other by products, so together they take little longer than the
// longer of them. Lengths lie on the device: every CTA of the first launch finds out for itself how
// many multiprocessors are its launch's, evenly spread. CTAs on the others end at once, and the
// second launch begins there; it takes over the rest as the first one ends.
//
// Which CTAs end is known when they run. So those that stay take shares by a counter, one after the
// other, until there are none: nothing but the time depends on where CTAs run. The last CTA of all
// stays in any case.
//
// A multiprocessor by itself can read more than its part of what memory gives to all. So those that
// read are as many as it takes to get all of that, and of the rest as many as leave both launches
// the same time.
#pragma once

#include <cstdint>

#include "device/grid_size.cuh"
#include "ops/attention/schedule/ragged.cuh"

namespace kvblock {

// In a clock of a multiprocessor, about, on Hopper: bytes that the first launch reads, those of
// them that it has when all read, and operations of the second one.
constexpr float kReadAlone = 24.0f, kReadTogether = 19.0f, kOperations = 2200.0f;

// Words of RaggedParams::sharing: CTAs of a line that have shares, for combine.cuh; shares that
// were taken; CTAs that ended without one.
enum Sharing { kCtas, kTaken, kGone };

// Pairs of a query and a key that it sees, of the sequences that the second launch has. All threads
// of the CTA get the same sum.
template <int kThreads>
__device__ __forceinline__ float LongPairs(const RaggedParams& p) {
  float pairs = 0.0f;
#pragma unroll 1
  for (int member = threadIdx.x; member < p.batch; member += kThreads) {
    const Sequence s = MemberSequence(p, member);
    if (s.q_rows <= 0 || !IsLong(p, s.q_rows)) continue;
    const int middle = s.q_len / 2;
    int first, end;
    s.VisibleKeys(middle, middle + 1, &first, &end);
    pairs += static_cast<float>(max(end - first, 0)) * static_cast<float>(s.q_len);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) pairs += __shfl_xor_sync(~0u, pairs, step);
  __shared__ float of_warps[kThreads / 32];
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = pairs;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) sum += of_warps[i];
  return sum;
}

// Of a line with so many tiles of kKeys keys, how many CTAs have shares, of as many as p.ctas,
// which the whole GPU has. At least one; all where there is nothing for the second launch.
template <int kKeys, int kThreads>
__device__ __forceinline__ int CtasBeside(const RaggedParams& p, int tiles) {
  const float pairs = LongPairs<kThreads>(p);
  if (pairs == 0.0f) return p.ctas;
  const float columns = static_cast<float>(p.head_dim + p.value_dim);
  // In clocks of one multiprocessor.
  const float reads = static_cast<float>(tiles) * p.lines * kKeys * columns * 2.0f / kReadAlone;
  const float computes = pairs * p.num_heads * columns * 2.0f / kOperations;
  const float part = reads / (reads + computes), enough = kReadTogether / kReadAlone;
  const float rest = 1.0f - computes / reads * enough;
  const float some = part < enough ? part : fmaxf(enough, rest);
  return Between(static_cast<int>(some * p.ctas + 0.5f), 1, p.ctas);
}

// Whether this CTA's multiprocessor is one of `count`, evenly spread.
__device__ __forceinline__ bool IsOnOneOf(const RaggedParams& p, int count) {
  const int number = MultiprocessorNumber() % p.multiprocessors;
  return (number + 1) * count / p.multiprocessors > number * count / p.multiprocessors;
}

// Whether this CTA takes shares, of a launch that has so many multiprocessors. Thread 0.
__device__ __forceinline__ bool Stays(const RaggedParams& p, int multiprocessors) {
  if (IsOnOneOf(p, multiprocessors)) return true;
  return atomicAdd(p.sharing + kGone, 1) == static_cast<int>(gridDim.x) - 1;
}

constexpr int kNoShare = 1 << 20;

// The next share that nobody has taken, which may be none. All threads; `stays`: of thread 0.
__device__ __forceinline__ int TakeShare(const RaggedParams& p, bool stays) {
  __shared__ int share;
  __syncthreads();
  if (threadIdx.x == 0) share = stays ? atomicAdd(p.sharing + kTaken, 1) : kNoShare;
  __syncthreads();
  return share;
}

}  // namespace kvblock
