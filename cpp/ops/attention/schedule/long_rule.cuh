// Who computes the sequences that have many queries, where a call's lengths lie on the device.
//
// Hopper's kernel shares out tiles of queries: a CTA walks along all the keys that its tile sees.
// That is best where every multiprocessor has a tile. A chunk of a prompt behind a long prefix has
// a few, each with many keys, and most of the GPU would look on. The line of few queries shares out
// keys as well (shares.cuh), and takes any number of tiles; where it is faster it has them all.
//
// Every CTA of each launch answers for itself, from the lengths of all members. Sums are of whole
// numbers, so all find the same.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kvblock {

// What is summed up: tiles have so many packed rows, and their keys are counted in steps.
constexpr int32_t kLongTileRows = 128, kLongStepKeys = 128;
// Of a tile; no more are counted. Then no sum overflows where there are few tiles.
constexpr int32_t kLongMostKeys = 1 << 27;

__host__ __device__ __forceinline__ uint32_t LongSteps(int64_t keys) {
  const int64_t counted = keys < kLongMostKeys ? keys : kLongMostKeys;
  return static_cast<uint32_t>(counted + kLongStepKeys - 1) / kLongStepKeys;
}

struct LongRule {
  int32_t multiprocessors;  // 0: the line never has them
  int32_t line_rows;        // of a tile of the line
  // What a step of such a tile takes, and what the line's CTAs do beside steps: in 64ths of a step
  // of a tile of Hopper's kernel.
  int32_t line_step, line_rest;

  // Whether the line has them. `tiles`: of all key heads; `line_steps`: of all tiles of the line;
  // `longest`: steps of the tile that sees the most keys.
  __host__ __device__ __forceinline__ bool Shares(uint32_t tiles, uint32_t line_steps,
                                                  uint32_t longest) const {
    if (tiles == 0 || tiles > static_cast<uint32_t>(multiprocessors)) return false;
    const uint64_t of_line = uint64_t{line_steps} * static_cast<uint32_t>(line_step) +
                             static_cast<uint64_t>(line_rest) * multiprocessors;
    return of_line * 8 < uint64_t{longest} * multiprocessors * 64 * 7;  // by an eighth, at least
  }
};

}  // namespace kvblock
