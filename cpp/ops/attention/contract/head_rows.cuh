// Where the rows of one head lie in global memory: the one view of q, k, v and their like that the
// kernels' own loads and stores take. Dense arrays have one; so will blocks of a paged cache.
#pragma once

#include <cstdint>

namespace kvblock {

// Rows of one head in an array [rows, heads, dim].
struct HeadRows {
  const char* first;  // row 0 of the sequence, this head
  int64_t stride;     // bytes from row to row
  int dim;            // elements; a multiple of 8
};

template <typename T>
__device__ __forceinline__ HeadRows RowsOfHead(const void* array, int64_t first_row, int heads,
                                               int head, int dim) {
  const int64_t offset = (first_row * heads + head) * dim;
  return {static_cast<const char*>(array) + offset * sizeof(T),
          static_cast<int64_t>(heads) * dim * static_cast<int64_t>(sizeof(T)), dim};
}

// Writes kRows x kDim of a tile in shared memory to global memory, as far as rows and columns
// exist.
template <typename Tile, int kThreads, int kElementBytes = 2>
__device__ __forceinline__ void StoreTile(const char* tile, const HeadRows& to, int first, int end,
                                          int thread) {
  constexpr int kColumns = 16 / kElementBytes, kChunks = Tile::kDim / kColumns;
#pragma unroll 4
  for (int i = thread; i < Tile::kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, column = i % kChunks * kColumns;
    if (first + row < end && column < to.dim) {
      const int4 value = *reinterpret_cast<const int4*>(tile + Tile::Offset(row, column));
      char* row_start = const_cast<char*>(to.first) + (first + row) * to.stride;
      *reinterpret_cast<int4*>(row_start + column * kElementBytes) = value;
    }
  }
}

}  // namespace kvblock
