// Matrix products on tensor cores, one warp each (PTX mma.sync, sm_80 and newer).
//
// C [16, 8] += A [16, 16] B [16, 8], with float32 accumulators. Lane l holds, with g = l / 4 and
// t = l % 4, two neighbours to a register of A and B:
//
//   c[0], c[1]  row g,     columns 2 t, 2 t + 1        a[0]  row g,     columns 2 t, 2 t + 1
//   c[2], c[3]  row g + 8, the same columns            a[1]  row g + 8, the same columns
//   b0          column g,  rows 2 t, 2 t + 1           a[2], a[3]  as a[0], a[1], columns + 8
//   b1          column g,  rows 2 t + 8, 2 t + 9
//
// So two accumulators side by side, rounded to 16 bits, are the A operand of a next product.
//
// Of TF32 (device/tf32.cuh) a step has half as many: A [16, 8], B [8, 8], an element to a register.
//
//   a[0]  row g,      column t        a[2]  row g,      column t + 4       b0  row t,      column g
//   a[1]  row g + 8,  column t        a[3]  row g + 8,  column t + 4       b1  row t + 4,  column g
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace kvblock {

template <typename T>
__device__ __forceinline__ void Mma16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                           uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(std::is_same_v<T, __half>);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// C [16, 8] += A [16, 8] B [8, 8] of TF32.
__device__ __forceinline__ void Mma16x8x8(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two float32 rounded to 16 bits, `low` in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t Pack(float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// A pair of 16 bits as float32.
template <typename T>
__device__ __forceinline__ float2 Unpack(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
}

}  // namespace kvblock
