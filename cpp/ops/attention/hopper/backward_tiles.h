// The tiles of the Hopper backward kernel, by padded head dim.
#pragma once

namespace kvblock::hopper {

// A CTA owns kKeys keys and works on kQueries queries at a time; kStages tiles of Q and of dO are
// in shared memory. The two warpgroups that compute share the keys, 64 each, or, where dK and dV of
// 64 keys would not fit into the registers of one, the columns (backward_wide.cuh).
template <int kDim>
struct BackwardTiles;
template <>
struct BackwardTiles<64> {
  static constexpr int kQueries = 128, kKeys = 128, kStages = 2;
};
template <>
struct BackwardTiles<96> {
  static constexpr int kQueries = 64, kKeys = 128, kStages = 3;
};
template <>
struct BackwardTiles<128> {
  static constexpr int kQueries = 64, kKeys = 128, kStages = 3;
};
template <>
struct BackwardTiles<192> {
  static constexpr int kQueries = 64, kKeys = 64, kStages = 2;
};
template <>
struct BackwardTiles<256> {
  static constexpr int kQueries = 64, kKeys = 64, kStages = 2;
};

// Registers of a thread, by role: 128 + 256 threads share the 65536 of a multiprocessor.
constexpr int kLoaderRegisters = 24, kWorkerRegisters = 240;

}  // namespace kvblock::hopper
