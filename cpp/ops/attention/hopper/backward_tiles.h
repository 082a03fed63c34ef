// The tiles of the Hopper backward kernel, by padded head dim.
#pragma once

namespace kvblock::hopper {

// kQueries by kKeys is the tile that a CTA works on at a time; kStages tiles of Q and dO are in
// shared memory.
template <int kDim>
struct BackwardTiles;
template <>
struct BackwardTiles<64> {
  static constexpr int kQueries = 128, kKeys = 128, kStages = 2;
};
template <>
struct BackwardTiles<96> {
  static constexpr int kQueries = 64, kKeys = 128, kStages = 2;
};
template <>
struct BackwardTiles<128> {
  static constexpr int kQueries = 64, kKeys = 128, kStages = 2;
};

// Registers of a thread, by role: 128 + 256 threads share the 65536 of a multiprocessor.
constexpr int kLoaderRegisters = 24, kWorkerRegisters = 240;

}  // namespace kvblock::hopper
