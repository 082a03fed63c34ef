// The strided block copy, as a CUDA kernel.
//
// A copy is a box of `count` vectors of kWidth bytes. Vector v has coordinates c[0 .. kRank), the
// last one fastest, and each side turns coordinates into an address by strides (block_copy.h has
// the formula). A thread moves kUnroll vectors that lie one thread block apart, so that a warp's
// accesses stay contiguous, and issues all of its loads before its first store: bytes in flight
// decide the rate. The order of the dims is the caller's; it is chosen so that neighbouring threads
// write, and as far as the layouts allow read, neighbouring addresses.
//
// Everything the kernel needs travels by value in the parameter space, tables of base addresses
// too: nothing is staged on the device.
#pragma once

#include <cstdint>

#include "device/fast_div.cuh"
#include "kvblock/block_copy.h"

namespace kvblock {

template <int kRank>
struct SideParams {
  int64_t strides[kRank];
  int32_t table_strides[kRank];
  int32_t table_begin;  // where this side's base addresses start in Params::table
  int64_t offset;
  const int32_t* ids;
  int64_t id_outer_stride, id_inner_stride;
  FastDiv id_inner;
  int32_t id_limit;
  const int32_t* start;
  int64_t start_stride;
  int32_t start_table_stride, start_limit;
};

template <int kRank, int kTable>
struct Params {
  uint32_t count;
  FastDiv dims[kRank];
  SideParams<kRank> src, dst;
  char* table[kTable];
};

template <int kWidth>
struct VectorOf;
template <>
struct VectorOf<1> {
  using type = uint8_t;
};
template <>
struct VectorOf<2> {
  using type = uint16_t;
};
template <>
struct VectorOf<4> {
  using type = uint32_t;
};
template <>
struct VectorOf<8> {
  using type = uint2;
};
template <>
struct VectorOf<16> {
  using type = uint4;
};

// The address of a coordinate on one side; null when its id or start lies outside the side.
template <int kRank, int kTable>
__device__ __forceinline__ char* Address(const Params<kRank, kTable>& p,
                                         const SideParams<kRank>& side,
                                         const uint32_t (&c)[kRank]) {
  int64_t offset = side.offset;
  int32_t slot = side.table_begin;
#pragma unroll
  for (int k = 0; k < kRank; ++k) {
    offset += static_cast<int64_t>(c[k]) * side.strides[k];
    if (kTable > 2) slot += static_cast<int32_t>(c[k]) * side.table_strides[k];
  }
  if (side.ids != nullptr) {
    const int32_t id = __ldg(side.ids + c[0]);
    if (id < 0 || id >= side.id_limit) return nullptr;
    const uint32_t outer = side.id_inner(id), inner = id - outer * side.id_inner.d;
    offset += outer * side.id_outer_stride + inner * side.id_inner_stride;
  }
  if (side.start != nullptr) {
    const int32_t start = __ldg(side.start);
    if (start < 0 || start >= side.start_limit) return nullptr;
    offset += start * side.start_stride;
    if (kTable > 2) slot += start * side.start_table_stride;
  }
  return p.table[slot] + offset;
}

template <int kWidth, int kUnroll, int kRank, int kTable>
__global__ void BlockCopy(const __grid_constant__ Params<kRank, kTable> p) {
  using Vector = typename VectorOf<kWidth>::type;
  const uint32_t first = blockIdx.x * (blockDim.x * kUnroll) + threadIdx.x;
  Vector value[kUnroll];
  char* to[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const uint32_t v = first + u * blockDim.x;
    to[u] = nullptr;
    value[u] = Vector{};
    if (v >= p.count) continue;
    uint32_t c[kRank], rest = v;
#pragma unroll
    for (int k = kRank - 1; k > 0; --k) {
      const uint32_t outer = p.dims[k](rest);
      c[k] = rest - outer * p.dims[k].d;
      rest = outer;
    }
    c[0] = rest;
    to[u] = Address(p, p.dst, c);
    const char* from = Address(p, p.src, c);
    // Each byte is used once: do not keep it.
    if (from != nullptr && to[u] != nullptr)
      value[u] = __ldcs(reinterpret_cast<const Vector*>(from));
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (to[u] != nullptr) __stcs(reinterpret_cast<Vector*>(to[u]), value[u]);
  }
}

}  // namespace kvblock
