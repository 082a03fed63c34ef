// A tile of rows in shared memory, laid out so that ldmatrix reads it without bank conflicts.
//
// A row is kDim elements of 2 bytes (or 4): kDim / 8 chunks of 16 bytes. Chunk c of row r lies at
// chunk c ^ (r % 8) of its row. ldmatrix reads eight rows at the same chunk: the eight places
// differ modulo 128 bytes, so they touch every bank once. The same holds for eight lanes that copy
// the eight chunks of 128 contiguous bytes.
#pragma once

#include <cstdint>

#include "device/cp_async.cuh"
#include "device/ldmatrix.cuh"
#include "ops/attention/contract/head_rows.cuh"

namespace kvblock::generic {

// Where one lane points ldmatrix.x4, relative to a 16 x 16 block of a tile. The four 8 x 8
// matrices come in one of two orders:
//
//   kRowsFirst     (0, 0), (8, 0), (0, 8), (8, 8)  A of a product as it lies; B when transposed
//   kColumnsFirst  (0, 0), (0, 8), (8, 0), (8, 8)  A when transposed; two B as they lie
//
// "As it lies": A [m, k] lies as rows m, B [k, n] as rows n (K in Q K^T). "Transposed": A lies as
// rows k, B lies as rows k (V in P V). For B, registers 0 and 1 are the operand of the first 8
// columns n, 2 and 3 of the next 8.
//
// Of elements of 4 bytes a block has 16 rows and 8 columns, and a matrix 4: the same bytes.
enum class BlockOrder { kRowsFirst, kColumnsFirst };

template <int kRows_, int kDim_, int kElementBytes_ = 2>
struct SharedTile {
  static constexpr int kRows = kRows_, kDim = kDim_, kElementBytes = kElementBytes_;
  static constexpr int kRowBytes = kDim * kElementBytes;
  static constexpr int kBytes = kRows * kRowBytes;
  // Of the threads that copy a row together, each takes a chunk at a time.
  static constexpr int kLanes = 8, kColumnsOfChunk = 16 / kElementBytes;
  static_assert(kRowBytes % 128 == 0 && kRows % 16 == 0);

  __device__ static __forceinline__ uint32_t ChunkOffset(int row, int chunk) {
    return Offset(row, chunk * kColumnsOfChunk);
  }

  // The offset of an element; columns in one chunk follow each other.
  __device__ static __forceinline__ uint32_t Offset(int row, int column) {
    const int chunk = (column / kColumnsOfChunk) ^ (row % 8);
    return row * kRowBytes + chunk * 16 + (column % kColumnsOfChunk) * kElementBytes;
  }
};

// That of an element type.
template <typename T, int kRows, int kDim>
using TileOf = SharedTile<kRows, kDim, sizeof(T)>;

// A lane's part of the addresses of 16 x 16 blocks. Blocks start at multiples of 16, so the swizzle
// of a block's column is one exclusive or on top of the lane's own. Columns are of 2 bytes: kDim of
// them are a row.
template <int kDim, BlockOrder kOrder>
struct LaneBlock {
  uint32_t rows;  // bytes
  uint32_t swizzle;

  __device__ __forceinline__ explicit LaneBlock(int lane) {
    const int matrix = lane / 8, row = lane % 8;
    const int down = kOrder == BlockOrder::kRowsFirst ? matrix % 2 : matrix / 2;
    const int right = kOrder == BlockOrder::kRowsFirst ? matrix / 2 : matrix % 2;
    rows = (down * 8 + row) * kDim * 2;
    swizzle = (right ^ row) * 16;
  }

  // Of the block at (row, column), both multiples of 16, in the tile at `base`.
  __device__ __forceinline__ uint32_t Address(uint32_t base, int row, int column) const {
    const uint32_t bytes = column * 2;
    return base + rows + (swizzle ^ (bytes & 127)) + row * kDim * 2 + (bytes & ~127u);
  }
};

// Starts copying rows [first, first + kRows) to the tile at `base`; all kThreads threads take part.
// Rows from `end` on and columns from from.dim on become zeros and are not read. policy: for L2
// (device/cp_async.cuh), or nothing.
template <typename Tile, int kThreads, typename... Policy>
__device__ __forceinline__ void LoadTileAsync(uint32_t base, HeadRows from, int first, int end,
                                              int thread, Policy... policy) {
  // Eight lanes copy 128 contiguous bytes; a thread's rows are alike modulo 8, so is its swizzle.
  constexpr int kStep = kThreads / 8, kColumns = Tile::kColumnsOfChunk;
  static_assert(kStep % 8 == 0 && Tile::kRows % kStep == 0);
  const int row = thread / 8, chunk = thread % 8;
  const uint32_t to = base + Tile::Offset(row, chunk * kColumns);
  const char* source = from.first + (first + row) * from.stride + chunk * 16;
#pragma unroll
  for (int r = 0; r < Tile::kRows; r += kStep) {
    const bool valid = first + row + r < end;
#pragma unroll
    for (int c = 0; c < Tile::kDim; c += 8 * kColumns) {
      CopyAsync16(to + r * Tile::kRowBytes + c * Tile::kElementBytes,
                  source + c * Tile::kElementBytes, valid && c + chunk * kColumns < from.dim,
                  policy...);
    }
    source += kStep * from.stride;
  }
}

}  // namespace kvblock::generic
