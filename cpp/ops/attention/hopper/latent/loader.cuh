// The loader of Hopper's kernel for latent caches (kernel.cuh): warps that walk through the share
// and start bulk copies of keys; the first one also writes the pieces down and loads Q.
//
// To wait for a place, start its copies and look up the next blocks takes a warp 600 to 1600
// clocks, few as the instructions are, and a tile is to take 2500. So each warp has groups of
// chunks of its own, of every tile: it sees each phase of their barriers. All walk alike.
//
// A lane looks up the block of one box of a tile, a tile ahead. A box that no row of the unit sees,
// or whose block there is not, comes as zeros from beyond the last block; the keys of one that
// would be seen are written down as holes. Rows of others that come along in a box are masked and
// cleared by the consumers.
#pragma once

#include <cstdint>

#include "device/dependent.cuh"
#include "device/mbarrier.cuh"
#include "device/tensor_copy.cuh"
#include "ops/attention/hopper/latent/shared.cuh"

namespace kvblock::hopper {

template <typename Traits>
class LatentLoader {
 public:
  using Params = typename Traits::Params;
  using OwnLine = typename Traits::OwnLine;

  __device__ __forceinline__ LatentLoader(const Params& p, const LatentMaps& maps,
                                          LatentShared<Traits>& shared, const OwnLine& line,
                                          int warp)
      : p_(p),
        maps_(maps),
        shared_(shared),
        line_(line),
        warp_(warp),
        lane_(threadIdx.x % 32),
        rank_(RankOf<Traits>()),
        boxes_(Traits::kKeys / maps.box_rows),
        layer_(LayerNumber(p, 0)) {}

  // The tiles from `begin` on, so many, of which `first` is the first.
  __device__ __forceinline__ void Run(int begin, int tiles, const Place& first) {
    at_ = first;
    position_ = first_ = begin;
    left_ = tiles;
    for (Tile next = LookUp(); next.there;) {
      const Tile now = next;
      if (IsFirst() && left_ == min(tiles - 1, kTilesToBegin)) LetNextLaunchBegin();
      next = LookUp();
      Load(now);
    }
    if (warp_ == 0) WritePiece([](LatentPiece& end) { end.tiles = 0; });
  }

 private:
  __device__ __forceinline__ bool IsFirst() const { return warp_ == 0 && lane_ == 0; }

  static constexpr int kWarps = kWarpgroup / 32;
  static constexpr int kTilesToBegin = 6;  // as generic::SplitForward

  // A tile to load: this lane's box, its block and its first row there.
  struct Tile {
    PagedKey at;
    int layer;
    int q_row;  // where the piece that it begins has its rows in q; else -1
    bool there, seen, owner;
  };

  __device__ __forceinline__ int LayerOf(int member) const {
    return p_.layer_batch > 1 ? LayerNumber(p_, static_cast<int>(p_.by_sequences(member))) : layer_;
  }

  // Asks for the ids of the next tile's blocks, and moves on. What is the same for all tiles of a
  // piece is found once: a place waits for this, too.
  __device__ __forceinline__ Tile LookUp() {
    Tile tile = {{-1, 0}, 0, -1, left_ > 0, false, false};
    if (!tile.there) return tile;
    if (of_piece_ == 0) tile.q_row = BeginPiece();
    tile.owner = (piece_tiles_ - of_piece_) % 2 != 0;
    tile.layer = piece_layer_;
    tile.seen =
        lane_ < boxes_ && key_ < at_.rows.end_key && key_ + maps_.box_rows > at_.rows.first_key;
    if (tile.seen) tile.at = FindKey(p_, table_, key_);
    key_ += Traits::kKeys;
    --of_piece_;
    --left_;
    return tile;
  }

  // The piece that begins with the next tile. Who loads Q gets the row of q that is its first.
  __device__ __forceinline__ int BeginPiece() {
    if (piece_tiles_ > 0) {  // behind the one before
      position_ += piece_tiles_;
      at_.tile += piece_tiles_ - 1;
      line_.Next(&at_);
    }
    piece_tiles_ = of_piece_ = min(min(at_.rows.tiles - at_.tile, left_), p_.split);
    piece_layer_ = LayerOf(at_.rows.member);
    table_ = FindTable(p_, at_.rows.member);
    key_ = FirstKeyOf<Traits::kKeys, Params>(at_) + lane_ * maps_.box_rows;
    if (warp_ != 0) return -1;
    int row = 0;
    WritePiece([&](LatentPiece& piece) {
      piece.sequence = line_.SequenceOf(at_);
      piece.first_row = at_.rows.first_row + rank_ * Traits::kRows;
      piece.first_key = FirstKeyOf<Traits::kKeys, Params>(at_);
      piece.tiles = piece_tiles_;
      piece.key_begin = at_.rows.first_key;
      piece.key_end = at_.rows.end_key;
      const bool first = at_.tile == 0;
      piece.whole = first && piece_tiles_ == at_.rows.tiles;
      piece.slot = p_.split != kNoSplit ? line_.SplitSlot(position_, first)
                                        : PieceSlot(NumberOf<Traits>(), position_ == first_);
      row = static_cast<int>(piece.sequence.q_row * p_.num_heads) + piece.first_row;
    });
    return __shfl_sync(~0u, row, 0);
  }
  template <typename Write>
  __device__ __forceinline__ void WritePiece(Write write) {
    const int place = pieces_ % kPieces, phase = pieces_ / kPieces & 1;
    BarrierWait(SharedAddress(&shared_.piece_empty[place]), phase ^ 1);
    if (lane_ == 0) {
      write(shared_.pieces[place]);
      BarrierArrive(SharedAddress(&shared_.piece_full[place]));
    }
    ++pieces_;
  }

  // Where a box comes from: one that is in no block, from behind the last one.
  __device__ __forceinline__ PagedKey BoxOf(const Tile& tile) const {
    return HasBlock(p_, tile.at) ? tile.at : PagedKey{static_cast<int>(p_.num_blocks), 0};
  }

  __device__ __forceinline__ void Load(const Tile& tile) {
    const int stage = tiles_ % Traits::kStages, phase = tiles_ / Traits::kStages & 1;
    const bool layer = tile.layer >= 0 && tile.layer < p_.num_layers;
    const bool there = layer && HasBlock(p_, tile.at);
    const unsigned holes = __ballot_sync(~0u, tile.seen && !there);
    const PagedKey from = BoxOf(tile);
    const uint32_t to =
        SharedAddress(shared_.tiles[stage]) + lane_ * maps_.box_rows * kChunkRowBytes;
    // In a cluster this CTA's of the two chunks of a group, each time the other one of the last.
    const int own = (tiles_ ^ rank_) & 1;
    const auto load = [&](int group, bool is_last) {
      const uint32_t full = SharedAddress(&shared_.full[stage][group]);
      BarrierWait(SharedAddress(&shared_.empty[stage][group]), phase ^ 1);
      if (is_last) {
        FenceAsync();  // consumers have written P here, by another proxy
        WriteHoles(holes, shared_.holes[stage]);
      }
      if (lane_ == 0) BarrierExpect(full, ChunksOf(is_last ? kLastGroup : 0) * Traits::kChunkBytes);
      if (lane_ < boxes_) {
#pragma unroll
        for (int c = 0; c < 2; c += Traits::kCluster) {
          const int chunk = group * 2 + (Traits::kCluster == 1 ? c : own);
          if (is_last && chunk >= Traits::kKeyChunks) break;
          LoadKeys(to + chunk * Traits::kChunkBytes, full, chunk * kChunkColumns, from, tile.layer);
        }
      }
      __syncwarp();
    };
    // The last warp has the last group, too: before its own or after it, as GroupAt says.
    const bool last = warp_ == kWarps - 1;
    if (Traits::kCluster > 1 && last) load(kLastGroup, true);
    load(warp_, false);
    if (Traits::kCluster == 1 && last) load(kLastGroup, true);
    if (tile.q_row >= 0) LoadQueries(tile.q_row);
    ++tiles_;
  }

  // A box, for all CTAs of the cluster: it reports to the barrier of each.
  __device__ __forceinline__ void LoadKeys(uint32_t to, uint32_t full, int column,
                                           const PagedKey& from, int layer) const {
    if constexpr (Traits::kCluster == 1) {
      LoadBox(to, maps_.k, full, column, from.slot, from.block, layer);
    } else {
      LoadBoxToCtas(to, maps_.k, full, column, from.slot, from.block, layer,
                    (1 << Traits::kCluster) - 1);
    }
  }

  // Rows behind the tile's come along; nobody reads what becomes of them.
  __device__ __forceinline__ void LoadQueries(int row) {
    const uint32_t full = SharedAddress(&shared_.q_full);
    BarrierWait(SharedAddress(&shared_.q_empty), queries_ ^ 1);
    if (lane_ == 0) BarrierExpect(full, Traits::kTileBytes);
    __syncwarp();
    if (lane_ < Traits::kKeyChunks) {
      LoadBox(SharedAddress(shared_.q + lane_ * Traits::kChunkBytes), maps_.q, full,
              lane_ * kChunkColumns, 0, row, 0);
    }
    __syncwarp();
    queries_ ^= 1;
  }

  // A bit for each key of the boxes in `boxes`. Lane 0 tells that they are there.
  __device__ __forceinline__ void WriteHoles(unsigned boxes,
                                             uint32_t (&holes)[Traits::kKeys / 32]) {
    if (lane_ != 0) return;
    uint64_t keys = 0;
#pragma unroll 1
    for (; boxes != 0; boxes &= boxes - 1) {
      const int box = __ffs(boxes) - 1;
      keys |= (~uint64_t{0} >> (64 - maps_.box_rows)) << (box * maps_.box_rows);
    }
    holes[0] = static_cast<uint32_t>(keys);
    holes[1] = static_cast<uint32_t>(keys >> 32);
  }

  const Params& p_;
  const LatentMaps& maps_;
  LatentShared<Traits>& shared_;
  const OwnLine& line_;
  const int warp_, lane_, rank_;
  const int boxes_, layer_;  // boxes of a tile; the layer of the first call
  // Of the piece that is looked up: where it begins in the line, and the share does; its layer, its
  // sequence's blocks, and its tiles.
  Place at_;
  int position_, first_, piece_layer_ = 0;
  const int32_t* table_ = nullptr;
  int piece_tiles_ = 0;
  int of_piece_ = 0, left_;     // tiles of it, and of the share, that are not looked up
  int key_ = 0;                 // the first one of this lane's next box
  int tiles_ = 0, pieces_ = 0;  // that were loaded, and written down
  int queries_ = 0;             // the phase of Q
};

}  // namespace kvblock::hopper
