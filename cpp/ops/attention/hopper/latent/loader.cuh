// The loader of Hopper's kernel for latent caches (kernel.cuh): one warp that walks through the
// share, writes its pieces down and starts bulk copies of Q and of keys.
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
                                          LatentShared<Traits>& shared, const OwnLine& line)
      : p_(p),
        maps_(maps),
        shared_(shared),
        line_(line),
        lane_(threadIdx.x % 32),
        rank_(RankOf<Traits>()),
        boxes_(Traits::kKeys / maps.box_rows),
        layer_(LayerNumber(p, 0)) {}

  // The tiles from `begin` on, so many, of which `first` is the first.
  __device__ __forceinline__ void Run(int begin, int tiles, const Place& first) {
    at_ = first;
    position_ = begin;
    first_ = begin;
    left_ = tiles;
    for (Tile next = LookUp(); next.there;) {
      const Tile now = next;
      if (lane_ == 0 && left_ == min(tiles - 1, kTilesToBegin)) LetNextLaunchBegin();
      next = LookUp();
      Load(now);
    }
    WritePiece([](LatentPiece& end) { end.tiles = 0; });
  }

 private:
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

  // Asks for the ids of the next tile's blocks, and moves on.
  __device__ __forceinline__ Tile LookUp() {
    Tile tile = {{-1, 0}, 0, -1, left_ > 0, false, false};
    if (!tile.there) return tile;
    if (of_piece_ == 0) tile.q_row = BeginPiece();
    tile.owner = (piece_tiles_ - of_piece_) % 2 != 0;
    tile.layer = LayerOf(at_.rows.member);
    const int key = FirstKeyOf<Traits::kKeys, Params>(at_) + lane_ * maps_.box_rows;
    tile.seen =
        lane_ < boxes_ && key < at_.rows.end_key && key + maps_.box_rows > at_.rows.first_key;
    if (tile.seen) tile.at = FindKey(p_, at_.rows.member, key);
    --of_piece_;
    ++position_;
    if (--left_ > 0) line_.Next(&at_);
    return tile;
  }

  // The piece that begins with the next tile. Returns the row of q that is its first.
  __device__ __forceinline__ int BeginPiece() {
    piece_tiles_ = of_piece_ = min(min(at_.rows.tiles - at_.tile, left_), p_.split);
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
    char* const to = shared_.tiles[stage] + lane_ * maps_.box_rows * kChunkRowBytes;
#pragma unroll 1
    for (int i = 0; i < kChunkGroups; ++i) {
      const int group = GroupAt<Traits>(tile.owner, i);
      const uint32_t full = SharedAddress(&shared_.full[stage][group]);
      BarrierWait(SharedAddress(&shared_.empty[stage][group]), phase ^ 1);
      if (i + 1 == kChunkGroups) WriteHoles(holes, shared_.holes[stage]);
      if (lane_ == 0) BarrierExpect(full, ChunksOf(group) * Traits::kChunkBytes);
      __syncwarp();
      if (lane_ < boxes_) {
        // In a cluster every other one, and each time the other one of the last.
        const int first = Traits::kCluster == 1 ? 0 : (tiles_ ^ rank_) & 1;
        for (int c = group * 2 + first; c < group * 2 + ChunksOf(group); c += Traits::kCluster) {
          LoadKeys(SharedAddress(to + c * Traits::kChunkBytes), full, c * kChunkColumns, from,
                   tile.layer);
        }
      }
      __syncwarp();
    }
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
  const int lane_, rank_;
  const int boxes_, layer_;             // boxes of a tile; the layer of the first call
  Place at_;                            // of the tile that is to be looked up next
  int position_, first_, left_;         // its place in the line, the share's, and tiles from it on
  int of_piece_ = 0, piece_tiles_ = 0;  // how many of these the piece has, and all of its tiles
  int tiles_ = 0, pieces_ = 0;          // that were loaded, and written down
  int queries_ = 0;                     // the phase of Q
};

}  // namespace kvblock::hopper
