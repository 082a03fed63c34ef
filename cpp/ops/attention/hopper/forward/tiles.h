// The tile sizes of Hopper's forward kernel. docs/attention_log.md has what else was measured.
#pragma once

namespace kvblock::hopper {

struct ForwardTiles {
  int consumers;     // warpgroups that multiply, 64 query rows each
  int keys;          // in a KV tile
  int query_stages;  // query tiles in shared memory: with two, one runs into the next
  // Registers a thread, multiples of 8. A multiprocessor has 512 for the threads of all warpgroups.
  int producer_registers, consumer_registers;
  bool turns;   // the consumers take turns at the tensor cores
  int cluster;  // CTAs that go through the same K and V at the same time and load them once for all
  // Of keys in blocks: the warps that load. Four are a warpgroup, with registers of their own; two
  // are among those that plan and write.
  int load_warps = 0, loader_registers = 0;
};
constexpr int kKvStages = 2;        // KV tiles in shared memory
constexpr int kNarrowKvStages = 3;  // of 8 bits

// What a launch asks for.
enum class ForwardKind {
  kGeneral,  // every option
  kPlain,    // only masks, by position and segment; no tile lists
  kBand,     // only a causal mask, over many tiles, or any band over heads that share K and V
  kWide,     // only the end of the keys
  kCapped,   // as kPlain, with a softcap
  kLists,    // only masks, of every kind
  // Keys in the blocks of a cache, and ragged rows (paged_params.cuh); with a softcap.
  kPaged,
  kPagedCapped,
  kJoined,   // as kPlain, joined with the attention to other keys that o and lse hold
  kDropped,  // as kPlain, with dropout
};
constexpr bool IsPaged(ForwardKind kind) {
  return kind == ForwardKind::kPaged || kind == ForwardKind::kPagedCapped;
}

// Where keys lie in blocks. A product of 256 columns takes more registers than a thread of four
// warpgroups begins with.
constexpr ForwardTiles PagedTilesOf(int dim, int value_dim) {
  const int keys = value_dim <= 128 ? 128 : dim == 192 ? 112 : 80;
  const int query_stages = dim <= 128 ? 2 : 1;
  return dim > 192 ? ForwardTiles{2, keys, query_stages, 72, 216, true, 1, 2}
                   : ForwardTiles{2, keys, query_stages, 32, 208, true, 1, 4, 64};
}

// Of 8 bits, where keys lie in blocks. Consumers need every register that those of dense keys have.
constexpr ForwardTiles NarrowPagedTilesOf(int dim) {
  return dim == 64 ? ForwardTiles{2, 128, 2, 72, 216, true, 1, 2}
                   : ForwardTiles{2, 128, 2, 40, 232, true, 1, 2};
}

// Of 8 bits. O is summed up beside the products, so at head dim 128 consumers need every register
// there is.
constexpr ForwardTiles NarrowTilesOf(int dim, ForwardKind kind) {
  if (IsPaged(kind)) return NarrowPagedTilesOf(dim);
  const int cluster = kind == ForwardKind::kPlain ? 1 : 2;
  return dim == 64                     ? ForwardTiles{2, 128, 2, 72, 216, true, cluster}
         : kind == ForwardKind::kPlain ? ForwardTiles{2, 128, 2, 40, 232, true, cluster}
                                       : ForwardTiles{2, 128, 2, 24, 240, true, cluster};
}

// For a padded head dim and value dim. General tiles have 128 queries, which divide listed ones.
// Tiles of kJoined and kDropped are a cluster of one, since others than neighbours may be a
// sequence's.
constexpr ForwardTiles ForwardTilesOf(int dim, int value_dim, ForwardKind kind) {
  if (IsPaged(kind)) return PagedTilesOf(dim, value_dim);
  const bool general =
      kind == ForwardKind::kGeneral || kind == ForwardKind::kLists || kind == ForwardKind::kCapped;
  const bool alone = general || kind == ForwardKind::kJoined || kind == ForwardKind::kDropped;
  return dim == 64    ? general ? ForwardTiles{2, 128, 2, 72, 216, true, 1}
                                : ForwardTiles{3, 128, 2, 32, 160, true, 1}
         : dim == 96  ? ForwardTiles{2, 128, 2, 72, 216, true, alone ? 1 : 2}
         : dim == 128 ? kind == ForwardKind::kWide   ? ForwardTiles{2, 176, 1, 56, 224, true, 2}
                        : kind == ForwardKind::kBand ? ForwardTiles{2, 128, 2, 72, 216, true, 2}
                                                     : ForwardTiles{2, 128, 2, 72, 216, true, 1}
         : dim == 192
             ? ForwardTiles{2, value_dim <= 128 ? 128 : 112, 1, 72, 216, true, alone ? 1 : 2}
             : ForwardTiles{2, 80, 1, 24, 240, true, alone ? 1 : 2};
}

// The kind of the instance that serves a kind of 8 bits.
constexpr ForwardKind NarrowInstanceOf(ForwardKind kind) {
  return kind == ForwardKind::kWide ? ForwardKind::kBand : kind;
}

// The kind of the instance that serves a kind.
constexpr ForwardKind InstanceOf(int dim, ForwardKind kind) {
  const bool own = kind == ForwardKind::kGeneral || kind == ForwardKind::kLists ||
                   kind == ForwardKind::kCapped || kind == ForwardKind::kJoined ||
                   kind == ForwardKind::kDropped;
  if (dim == 128 || own) return kind;
  if (dim == 64) return kind == ForwardKind::kPlain ? kind : ForwardKind::kBand;
  return kind == ForwardKind::kPlain ? ForwardKind::kGeneral : ForwardKind::kBand;
}

}  // namespace kvblock::hopper
