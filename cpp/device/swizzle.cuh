// How tiles lie in shared memory for Hopper's warpgroup products (wgmma.cuh).
//
// Tiles lie in chunks of 64 columns (128 bytes), [columns / 64][rows][64], with the 128-byte
// swizzle in which bulk tensor copies write them (SwizzledOffset); every chunk begins at a multiple
// of 1024 bytes. An operand "lies across" when the dimension that is summed over runs along a row,
// and "down" when it runs from row to row.
#pragma once

#include <cstdint>

namespace kvblock {

constexpr int kChunkColumns = 64, kChunkRowBytes = 128;

// Where (row, column) of a tile of 16-bit elements lies; pairs of columns stay together.
__device__ __forceinline__ uint32_t SwizzledOffset(int rows, int row, int column) {
  const int in_row = column % kChunkColumns * 2;
  return (column / kChunkColumns * rows + row) * kChunkRowBytes + (in_row ^ (row % 8 * 16));
}

// What the tensor cores need to know of a shared operand. `address` is that of its first element; a
// multiple of 8 rows, so that the swizzle is that of the tile.
//
// The stride between groups of 8 rows is 1024 bytes. For an operand that lies down, `chunk_bytes`
// is the distance from one chunk of 64 columns to the next.
__device__ __forceinline__ uint64_t SharedOperand(uint32_t address, int chunk_bytes = 16) {
  constexpr uint64_t kSwizzle128 = 1, kGroupBytes = 1024;
  return (address & 0x3ffff) >> 4 | uint64_t(chunk_bytes >> 4) << 16 | (kGroupBytes >> 4) << 32 |
         kSwizzle128 << 62;
}

// The operand `bytes` further on. Only the lower word changes: the address never carries out of it.
__device__ __forceinline__ uint64_t Advance(uint64_t operand, int bytes) {
  const uint32_t low = static_cast<uint32_t>(operand) + (bytes >> 4);
  return (operand & ~uint64_t{0xffffffff}) | low;
}

enum class OperandLies { kAcross = 0, kDown = 1 };

}  // namespace kvblock
