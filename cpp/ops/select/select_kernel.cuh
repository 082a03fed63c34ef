// Which tiles a row keeps, and lists of them, as CUDA kernels (kvblock/select.h).
//
// A CTA has a row; of rows up to 512 columns it is one warp, which waits for nobody. Each thread
// has 16 columns side by side, whose scores stay in its registers as integers in the order of
// floats. The threshold is found bit by bit: a bit stays where enough is still at least as high. So
// nothing is sorted, and memory is read once.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kvblock/select.h"

namespace kvblock {

constexpr int kSelectMostThreads = 1024, kSelectMostWarps = kSelectMostThreads / 32;
constexpr int kSelectEach = 16;  // columns of a thread
static_assert(kSelectEach * kSelectMostThreads == KVBLOCK_MOST_COLUMNS);

struct SelectSides {
  int32_t columns;
  bool in_pieces;  // whether a thread's columns are whole pieces of 16 bytes, wherever they lie
};

struct KeepTilesParams {
  const float* scores;
  const uint8_t* states;
  const int32_t* limits;
  uint8_t* kept;
  float* masses;
  float tau;
  SelectSides sides;
};

struct ListTilesParams {
  const uint8_t* map;
  int32_t *indices, *counts;
  int32_t width;
  SelectSides sides;
};

// From 1 on, in the order of floats; NaN comes first, and 0 is left for what is not free.
__device__ __forceinline__ uint32_t KeyOf(float score) {
  const uint32_t bits = __float_as_uint(score);
  if (score != score) return 1;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// What a key's score counts as mass: 0 for those below 0 and for NaN.
__device__ __forceinline__ float MassOf(uint32_t key) {
  return key > 0x80000000u ? __uint_as_float(key & 0x7fffffffu) : 0.0f;
}

// Sums over all threads of a CTA, each in one order, which all threads get. Two places take turns,
// so that one barrier a sum is enough.
template <typename T>
struct SumPlaces {
  T of_warps[2][kSelectMostWarps];
};

template <typename T>
class CtaSum {
 public:
  __device__ explicit CtaSum(SumPlaces<T>& places) : places_(places) {}

  __device__ __forceinline__ T Of(T x) {
    if constexpr (std::is_same_v<T, int>) {
      x = __reduce_add_sync(~0u, x);
    } else {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    }
    return blockDim.x == 32 ? x : Across(x, blockDim.x / 32);
  }

  // What the threads before this one have, and what all have.
  __device__ __forceinline__ T Before(T x, T* all) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T upto = x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const T other = __shfl_up_sync(~0u, upto, step);
      if (lane >= step) upto += other;
    }
    const T of_warp = __shfl_sync(~0u, upto, 31);
    *all = Across(of_warp, blockDim.x / 32);
    T before = upto - x;
    for (int i = 0; i < warp; ++i) before += places_.of_warps[turn_ ^ 1][i];
    return before;
  }

 private:
  __device__ __forceinline__ T Across(T of_warp, int warps) {
    T* const places = places_.of_warps[turn_];
    turn_ ^= 1;
    if (threadIdx.x % 32 == 0) places[threadIdx.x / 32] = of_warp;
    __syncthreads();
    T sum = places[0];
    for (int i = 1; i < warps; ++i) sum += places[i];
    return sum;
  }

  SumPlaces<T>& places_;
  int turn_ = 0;
};

// A thread's columns of a row; those beyond its end are 0.
template <typename T>
__device__ __forceinline__ void LoadColumns(const T* row, int first, const SelectSides& sides,
                                            T (&out)[kSelectEach]) {
  constexpr int kOfPiece = 16 / sizeof(T), kPieces = kSelectEach / kOfPiece;
  if (sides.in_pieces) {
    union {
      uint4 pieces[kPieces];
      T columns[kSelectEach];
    } run{};
    if (first < sides.columns) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        run.pieces[i] = reinterpret_cast<const uint4*>(row + first)[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kSelectEach; ++i) out[i] = run.columns[i];
    return;
  }
#pragma unroll
  for (int i = 0; i < kSelectEach; ++i) {
    out[i] = first + i < sides.columns ? row[first + i] : T{};
  }
}

__device__ __forceinline__ void StoreColumns(uint8_t* row, int first, const SelectSides& sides,
                                             uint32_t bits) {
  if (sides.in_pieces) {
    union {
      uint4 piece;
      uint8_t columns[kSelectEach];
    } run;
#pragma unroll
    for (int i = 0; i < kSelectEach; ++i) run.columns[i] = bits >> i & 1;
    if (first < sides.columns) *reinterpret_cast<uint4*>(row + first) = run.piece;
    return;
  }
#pragma unroll
  for (int i = 0; i < kSelectEach; ++i) {
    if (first + i < sides.columns) row[first + i] = bits >> i & 1;
  }
}

// kMass: whether there is a tau.
template <bool kMass>
__global__ void __launch_bounds__(kSelectMostThreads, 1)
    KeepTiles(const __grid_constant__ KeepTilesParams p) {
  constexpr int kEach = kSelectEach;
  __shared__ SumPlaces<int> number_places;
  __shared__ SumPlaces<float> mass_places;
  CtaSum<int> numbers(number_places);
  CtaSum<float> masses(mass_places);
  const int first = threadIdx.x * kEach;
  const int64_t row = blockIdx.x, start = row * p.sides.columns;

  float scores[kEach];
  uint8_t states[kEach];
  LoadColumns(p.scores + start, first, p.sides, scores);
  LoadColumns(p.states + start, first, p.sides, states);
  uint32_t keys[kEach], always = 0;
  int free = 0;
  float seen_mass = 0.0f, always_mass = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const bool is_free = states[i] == KVBLOCK_TILE_FREE, has_to = states[i] == KVBLOCK_TILE_ALWAYS;
    const uint32_t key = KeyOf(scores[i]);
    if constexpr (kMass) {
      seen_mass += is_free || has_to ? MassOf(key) : 0.0f;
      always_mass += has_to ? MassOf(key) : 0.0f;
    }
    always |= static_cast<uint32_t>(has_to) << i;
    free += is_free;
    keys[i] = is_free ? key : 0;
  }
  const int num_always = numbers.Of(__popc(always)), num_free = numbers.Of(free);
  const int room = min(max(p.limits[row], num_always) - num_always, num_free);
  float need = 0.0f, total = 0.0f;
  if constexpr (kMass) {
    total = masses.Of(seen_mass);
    always_mass = masses.Of(always_mass);
    // A row of which nothing is known takes what it may, one that has all there is no more.
    need = total > 0.0f ? 0.0f : INFINITY;
    if (always_mass < total) need = p.tau * total - always_mass;
  }

  const auto count_from = [&](uint32_t least) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) count += keys[i] >= least;
    return numbers.Of(count);
  };
  const auto mass_from = [&](uint32_t least) {
    float mass = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) mass += keys[i] >= least ? MassOf(keys[i]) : 0.0f;
    return masses.Of(mass);
  };
  // A threshold from which on there is as much as a row may have, or needs: the highest one, or one
  // from which on there is exactly as much as it may have.
  uint32_t at = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    const int count = count_from(at | bit);
    bool enough = count >= room;
    if constexpr (kMass) enough = enough || mass_from(at | bit) >= need;
    if (enough) at |= bit;
    if (!kMass && count == room) break;
  }

  // Nothing is above the last number there is.
  const bool last = at == ~0u;
  int more = room - (last ? 0 : count_from(at + 1));
  if constexpr (kMass) {
    const float missing = need - (last ? 0.0f : mass_from(at + 1)), each = MassOf(at);
    if (each > 0.0f) {
      // An infinite mass is all there is.
      const float steps = each == INFINITY ? 1.0f : ceilf(missing / each);
      more = min(more, static_cast<int>(fminf(steps, p.sides.columns)));
    }
  }
  int equal = 0, of_all;
#pragma unroll
  for (int i = 0; i < kEach; ++i) equal += keys[i] == at;
  int rank = numbers.Before(equal, &of_all);
  float kept_mass = 0.0f;
  uint32_t kept = always;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const bool is_equal = keys[i] == at;
    const bool taken = keys[i] > at || (is_equal && rank < more);
    rank += is_equal;
    if constexpr (kMass) kept_mass += taken ? MassOf(keys[i]) : 0.0f;
    kept |= static_cast<uint32_t>(taken) << i;
  }
  StoreColumns(p.kept + start, first, p.sides, kept);
  if constexpr (kMass) {
    const float reached = masses.Of(kept_mass) + always_mass;
    if (threadIdx.x == 0) p.masses[row] = reached < total ? reached / total : 1.0f;
  }
}

static __global__ void __launch_bounds__(kSelectMostThreads, 1)
    ListTiles(const __grid_constant__ ListTilesParams p) {
  __shared__ SumPlaces<int> places;
  CtaSum<int> numbers(places);
  const int first = threadIdx.x * kSelectEach;
  const int64_t row = blockIdx.x;
  uint8_t map[kSelectEach];
  LoadColumns(p.map + row * p.sides.columns, first, p.sides, map);
  uint32_t kept = 0;
#pragma unroll
  for (int i = 0; i < kSelectEach; ++i) kept |= static_cast<uint32_t>(map[i] != 0) << i;
  int all;
  int place = numbers.Before(__popc(kept), &all);
  int32_t* const indices = p.indices + row * p.width;
  for (; kept != 0 && place < p.width; kept &= kept - 1) {
    indices[place++] = first + __ffs(kept) - 1;
  }
  for (int i = all + threadIdx.x; i < p.width; i += blockDim.x) indices[i] = -1;
  if (threadIdx.x == 0) p.counts[row] = min(all, p.width);
}

}  // namespace kvblock
