// The tile sizes of Hopper's forward kernel. docs/attention_performance.md has what else was
// measured.
#pragma once

namespace kvblock::hopper {

struct ForwardTiles {
  int consumers;  // warpgroups that multiply, 64 query rows each
  int keys;       // in a KV tile
  int stages;     // KV tiles in shared memory
  // Registers a thread, multiples of 8. A multiprocessor has 512 for the threads of all warpgroups.
  int producer_registers, consumer_registers;
  bool turns;  // the consumers take turns at the tensor cores
};

// What a launch asks for.
enum class ForwardKind {
  kGeneral,
  kWide,    // nothing is masked but the end of the keys: larger KV tiles pay
  kListed,  // tile lists: the query tiles must divide 128
};

// For a padded head dim and value dim.
constexpr ForwardTiles ForwardTilesOf(int dim, int value_dim, ForwardKind kind) {
  const bool wide = kind == ForwardKind::kWide;
  if (dim <= 96 && kind == ForwardKind::kListed) return {2, 128, 2, 40, 232, true};
  return dim == 64    ? ForwardTiles{3, 112, 2, 56, 152, true}
         : dim == 96  ? ForwardTiles{2, 128, 2, 40, 232, true}
         : dim == 128 ? ForwardTiles{2, wide ? 176 : 128, 2, 40, 232, true}
         : dim == 192 ? ForwardTiles{2, value_dim <= 128 ? 128 : 96, 2, 40, 232, false}
                      : ForwardTiles{2, 80, 2, 40, 232, false};
}

// Whether a padded head dim has an instance of its own for a kind; else the general one serves.
constexpr bool HasInstance(int dim, ForwardKind kind) {
  return kind == ForwardKind::kWide ? dim == 128 : kind == ForwardKind::kListed ? dim <= 96 : true;
}

}  // namespace kvblock::hopper
