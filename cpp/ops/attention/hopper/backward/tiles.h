// The tile sizes of Hopper's backward kernel. docs/attention_log.md has what else was
// measured.
#pragma once

namespace kvblock::hopper {

// A CTA owns `keys` keys and works on `queries` queries at a time; `stages` tiles of Q and of dO
// and `dq_stages` of dQ are in shared memory. The two warpgroups that compute share the keys, 64
// each, or, where dK and dV of 64 keys would not fit into the registers of one, the products
// (split_products.cuh, split_products_cluster.cuh). Tall tiles have a quarter more queries, and
// serve what LaunchIsTall tells.
struct BackwardTiles {
  int queries, keys, stages, dq_stages;
};
constexpr int kTallQueries = 80;
constexpr BackwardTiles BackwardTilesOf(int dim, int value_dim, bool tall) {
  return dim == 64                        ? BackwardTiles{128, 128, 2, 1}
         : tall                           ? BackwardTiles{kTallQueries, 128, 2, 1}
         : dim <= 128                     ? BackwardTiles{64, 128, 2, 2}
         : dim == 192 && value_dim == 128 ? BackwardTiles{64, 128, 2, 1}
                                          : BackwardTiles{64, 64, 2, 0};
}

// Registers of a thread, by role: 128 + 256 threads share the 65536 of a multiprocessor. Where the
// loops of the workers fit into fewer, the loader, whose walk needs about 40, spills less; to read
// entries of lists it needs 56.
struct BackwardRegisters {
  int loader, worker;
};
constexpr BackwardRegisters BackwardRegistersOf(int dim, int value_dim, bool tall, bool plain,
                                                bool whole_lists) {
  const bool fits = dim == 128 && !tall && plain;
  return dim == 96 || (dim == 192 && value_dim > 128) || (fits && whole_lists)
             ? BackwardRegisters{56, 224}
         : fits ? BackwardRegisters{40, 232}
                : BackwardRegisters{24, 240};
}

}  // namespace kvblock::hopper
