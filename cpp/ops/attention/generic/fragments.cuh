// Operands of products as a warp's registers have them, by the element type.
//
// A step is 32 bytes of the summed dimension: 16 elements of 16 bits, 8 of float32. What lies
// across (the summed dimension along a row) is read by ldmatrix, whose matrices have rows of 16
// bytes whatever is in them. What lies down is read by ldmatrix transposed, if it has 16 bits. Of
// float32 a lane, g = lane / 4 and t = lane % 4, reads kWide neighbours of rows 2 t and 2 t + 1,
// that is of the summed elements in places t and t + 4 of a step: where accumulators side by side
// have theirs (LaneDown). The four rows of a load lie in different chunks, so no bank is met twice.
// Neighbours belong to blocks side by side, so that
//
//   column g of block j of kWide is column kWide g + j of 8 kWide (ColumnDown, RowDown).
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/mma.cuh"
#include "device/shared.cuh"
#include "device/tf32.cuh"

namespace kvblock::generic {

template <typename T>
constexpr bool kIsFloat32 = sizeof(T) == 4;
template <typename T>
constexpr int kStep = 32 / static_cast<int>(sizeof(T));

// Whether a tile's product is summed up by itself, and then added: the tensor cores round their
// sums towards zero, which shows beside the error of Tf32x3 where thousands of keys are summed.
template <typename T>
constexpr bool kSumsApart = false;
template <>
constexpr bool kSumsApart<Tf32x3> = true;

// ---- words as products take them ---------------------------------------------------------

template <typename T, int kWords>
struct Fragment {
  uint32_t words[kWords];
};
template <int kWords>
struct Fragment<Tf32x3, kWords> {
  uint32_t words[kWords], rest[kWords];
};

// From words as they lie in memory.
template <typename T, int kWords>
__device__ __forceinline__ Fragment<T, kWords> Prepare(const uint32_t (&loaded)[kWords]) {
  Fragment<T, kWords> made;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if constexpr (std::is_same_v<T, Tf32x3>) {
      SplitToTf32(loaded[i], &made.words[i], &made.rest[i]);
    } else if constexpr (std::is_same_v<T, Tf32>) {
      made.words[i] = RoundToTf32(loaded[i]);
    } else {
      made.words[i] = loaded[i];
    }
  }
  return made;
}

// Block n of the accumulators side by side, of two of 16 bits or one of float32, that become the A
// operand of a step that sums over their columns: those of float32 in places t and t + 4.
template <typename T>
__device__ __forceinline__ void TakeAccumulators(uint32_t (&words)[4], int n, const float (&c)[4]) {
  if constexpr (kIsFloat32<T>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = static_cast<uint32_t>(__float_as_int(c[i % 2 * 2 + i / 2]));
    }
  } else {
    words[2 * n] = Pack<T>(c[0], c[1]);
    words[2 * n + 1] = Pack<T>(c[2], c[3]);
  }
}

// Which terms of products are added: of Tf32x3 lo hi and hi lo are small, and hi hi is large. Small
// ones come first, as long as the sums are small, too, and little is lost of them.
enum class Terms { kAll, kSmall, kLarge };

// c += a times two words of b.
template <typename T>
__device__ __forceinline__ void Multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  if constexpr (kIsFloat32<T>) {
    Mma16x8x8(c, a, b0, b1);
  } else {
    Mma16x8x16<T>(c, a, b0, b1);
  }
}

// c(m, j) += a[m] times block j of b, of which two words are a block.
template <typename T, Terms kTerms, int kM, int kWords, typename C>
__device__ __forceinline__ void MultiplyBlocks(const Fragment<T, 4> (&a)[kM],
                                               const Fragment<T, kWords>& b, const C& c) {
  const auto each = [&](auto term) {
#pragma unroll
    for (int j = 0; j < kWords / 2; ++j) {
#pragma unroll
      for (int m = 0; m < kM; ++m) term(c(m, j), m, j);
    }
  };
  if constexpr (std::is_same_v<T, Tf32x3>) {
    if constexpr (kTerms != Terms::kLarge) {
      each([&](float (&c)[4], int m, int j) {
        Multiply<T>(c, a[m].rest, b.words[2 * j], b.words[2 * j + 1]);
      });
      each([&](float (&c)[4], int m, int j) {
        Multiply<T>(c, a[m].words, b.rest[2 * j], b.rest[2 * j + 1]);
      });
    }
  }
  if constexpr (kTerms != Terms::kSmall) {
    each([&](float (&c)[4], int m, int j) {
      Multiply<T>(c, a[m].words, b.words[2 * j], b.words[2 * j + 1]);
    });
  }
}

// ---- float32 that lies down --------------------------------------------------------------

// How many blocks a lane reads of at once, where there are so many.
template <int kBlocks>
constexpr int kWideOf = kBlocks % 4 == 0 ? 4 : 2;

// The column that a lane's accumulator c[n][e] has (e % 2: its column of two).
template <int kWide>
__device__ __forceinline__ int ColumnDown(int lane, int n, int e) {
  return n / kWide * (8 * kWide) + (lane % 4 * 2 + e) * kWide + n % kWide;
}
// The row that its accumulator c[m][.][2 half] has; kM blocks of 16 rows.
template <int kM>
__device__ __forceinline__ int RowDown(int lane, int m, int half) {
  constexpr int kWide = kWideOf<2 * kM>;
  const int block = 2 * m + half;
  return block / kWide * (8 * kWide) + lane / 4 * kWide + block % kWide;
}

// A lane's part of the addresses of blocks [8, 8 kWide] of a tile.
template <typename Tile, int kWide>
struct LaneDown {
  uint32_t rows, swizzle;

  __device__ __forceinline__ explicit LaneDown(int lane) {
    const int row = lane % 4 * 2, bytes = lane / 4 * kWide * 4;
    rows = row * Tile::kRowBytes + bytes % 16;
    swizzle = (bytes / 16 ^ row) * 16;
  }

  // Reads the block at (row, column): even[j] of row 2 t, odd[j] of row 2 t + 1.
  __device__ __forceinline__ void Load(uint32_t (&even)[kWide], uint32_t (&odd)[kWide],
                                       uint32_t base, int row, int column) const {
    const uint32_t bytes = column * 4, to = base + row * Tile::kRowBytes + (bytes & ~127u);
    const uint32_t place = swizzle ^ (bytes & 127);
    LoadShared(even, to + rows + place);
    LoadShared(odd, to + rows + Tile::kRowBytes + (place ^ 16));
  }
};

}  // namespace kvblock::generic
