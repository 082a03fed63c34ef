// Hopper's warpgroup products (PTX wgmma, sm_90a): D += A B, 64 rows by kN columns by 32 bytes of
// each operand (16 elements of 16 bits, 32 of 8), float32 sums; of int8 int32 sums, in the bits of
// D. All 128 threads of a warpgroup issue them together; they run while the threads go on.
//
//   WgmmaFence();                      // registers of D (and A) are as they should be
//   Wgmma<128>::Shared<T>(d, a, b);    // any number of products
//   WgmmaCommit();                     // ... make a group
//   WgmmaWait<0>(); KeepAfter(d);      // at most 0 groups are still under way: D may be read
//
// Of D and of an A in registers, warp w of the group has rows 16 w to 16 w + 15, laid out as in
// mma.cuh: d[n * 4 + e] is element e of this lane in columns 8 n to 8 n + 7.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/swizzle.cuh"
#include "device/widen.cuh"

namespace kvblock {

__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The same with 0, which the assembler takes for another instruction, so that the two are not
// merged across a branch.
__device__ __forceinline__ void WgmmaWaitApart() {
  asm volatile("wgmma.wait_group.sync.aligned 0; // apart" ::: "memory");
}

// What follows in the program and uses D stays behind this point (the compiler does not know that a
// product writes its registers later), and what computes D stays before it.
template <int kCount>
__device__ __forceinline__ void KeepAfter(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// D (+)= A B. `accumulate` false: D's old value does not count.
template <int kN>
struct Wgmma;

// clang-format off
#define KVBLOCK_R8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define KVBLOCK_R16 KVBLOCK_R8(0,1,2,3,4,5,6,7) "," KVBLOCK_R8(8,9,10,11,12,13,14,15)
#define KVBLOCK_R32 KVBLOCK_R16 "," KVBLOCK_R8(16,17,18,19,20,21,22,23) "," \
                    KVBLOCK_R8(24,25,26,27,28,29,30,31)
#define KVBLOCK_R36 KVBLOCK_R32 ",%32,%33,%34,%35"
#define KVBLOCK_R40 KVBLOCK_R32 "," KVBLOCK_R8(32,33,34,35,36,37,38,39)
#define KVBLOCK_R48 KVBLOCK_R40 "," KVBLOCK_R8(40,41,42,43,44,45,46,47)
#define KVBLOCK_R56 KVBLOCK_R48 "," KVBLOCK_R8(48,49,50,51,52,53,54,55)
#define KVBLOCK_R64 KVBLOCK_R56 "," KVBLOCK_R8(56,57,58,59,60,61,62,63)
#define KVBLOCK_R68 KVBLOCK_R64 ",%64,%65,%66,%67"
#define KVBLOCK_R72 KVBLOCK_R64 "," KVBLOCK_R8(64,65,66,67,68,69,70,71)
#define KVBLOCK_R80 KVBLOCK_R72 "," KVBLOCK_R8(72,73,74,75,76,77,78,79)
#define KVBLOCK_R88 KVBLOCK_R80 "," KVBLOCK_R8(80,81,82,83,84,85,86,87)
#define KVBLOCK_R96 KVBLOCK_R88 "," KVBLOCK_R8(88,89,90,91,92,93,94,95)
#define KVBLOCK_R128 KVBLOCK_R96 "," KVBLOCK_R8(96,97,98,99,100,101,102,103) "," \
                     KVBLOCK_R8(104,105,106,107,108,109,110,111) "," \
                     KVBLOCK_R8(112,113,114,115,116,117,118,119) "," \
                     KVBLOCK_R8(120,121,122,123,124,125,126,127)
#define KVBLOCK_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KVBLOCK_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                      "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define KVBLOCK_D16 KVBLOCK_D8(0), KVBLOCK_D8(8)
#define KVBLOCK_D32 KVBLOCK_D16, KVBLOCK_D8(16), KVBLOCK_D8(24)
#define KVBLOCK_D36 KVBLOCK_D32, KVBLOCK_D4(32)
#define KVBLOCK_D40 KVBLOCK_D32, KVBLOCK_D8(32)
#define KVBLOCK_D48 KVBLOCK_D40, KVBLOCK_D8(40)
#define KVBLOCK_D56 KVBLOCK_D48, KVBLOCK_D8(48)
#define KVBLOCK_D64 KVBLOCK_D56, KVBLOCK_D8(56)
#define KVBLOCK_D68 KVBLOCK_D64, KVBLOCK_D4(64)
#define KVBLOCK_D72 KVBLOCK_D64, KVBLOCK_D8(64)
#define KVBLOCK_D80 KVBLOCK_D72, KVBLOCK_D8(72)
#define KVBLOCK_D88 KVBLOCK_D80, KVBLOCK_D8(80)
#define KVBLOCK_D96 KVBLOCK_D88, KVBLOCK_D8(88)
#define KVBLOCK_D128 KVBLOCK_D96, KVBLOCK_D8(96), KVBLOCK_D8(104), KVBLOCK_D8(112), KVBLOCK_D8(120)

#define KVBLOCK_I4(i) "+r"(sums[i]), "+r"(sums[i + 1]), "+r"(sums[i + 2]), "+r"(sums[i + 3])
#define KVBLOCK_I16(i) KVBLOCK_I4(i), KVBLOCK_I4(i + 4), KVBLOCK_I4(i + 8), KVBLOCK_I4(i + 12)
#define KVBLOCK_I64 KVBLOCK_I16(0), KVBLOCK_I16(16), KVBLOCK_I16(32), KVBLOCK_I16(48)

// The numbers of the operands that follow D's r registers: r, r + 1, ...
#define KVBLOCK_WGMMA_AS(type, n, r, o0, o1, o2, o3, o4, o5, o6)                                    \
  if constexpr (kRegisterA) {                                                                      \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #o5 ", 0;\n"                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {"              \
                 KVBLOCK_R##r "}, {%" #o0 ",%" #o1 ",%" #o2 ",%" #o3 "}, %" #o4 ", p, 1, 1, %" #o6 \
                 "; }"                                                                             \
                 : KVBLOCK_D##r                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)),       \
                   "n"(int(kB)));                                                                  \
  } else {                                                                                         \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #o2 ", 0;\n"                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {"              \
                 KVBLOCK_R##r "}, %" #o0 ", %" #o1 ", p, 1, 1, %" #o3 ", %" #o4 "; }"              \
                 : KVBLOCK_D##r                                                                    \
                 : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kA)), "n"(int(kB)));              \
  }

// The same of 8 bits, whose operands lie across; the numbers of operands are those above.
#define KVBLOCK_WGMMA_NARROW(n, r, o0, o1, o2, o3, o4, o5, o6)                                     \
  if constexpr (kRegisterA) {                                                                      \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #o5 ", 0;\n"                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" KVBLOCK_R##r         \
                 "}, {%" #o0 ",%" #o1 ",%" #o2 ",%" #o3 "}, %" #o4 ", p, 1, 1; }"                  \
                 : KVBLOCK_D##r                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));      \
  } else {                                                                                         \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #o2 ", 0;\n"                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" KVBLOCK_R##r         \
                 "}, %" #o0 ", %" #o1 ", p, 1, 1; }"                                               \
                 : KVBLOCK_D##r                                                                    \
                 : "l"(a), "l"(b), "r"(int(accumulate)));                                          \
  }

// Products of int8, of 128 columns alone: D is what its bits are as int32.
__device__ __forceinline__ void AddIntegers(float (&d)[64], uint64_t a, uint64_t b,
                                            bool accumulate) {
  int32_t(&sums)[64] = reinterpret_cast<int32_t(&)[64]>(d);
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" KVBLOCK_R64
               "}, %64, %65, p; }"
               : KVBLOCK_I64
               : "l"(a), "l"(b), "r"(int(accumulate)));
}

#define KVBLOCK_WGMMA(n, r, ...)                                                                   \
  template <>                                                                                      \
  struct Wgmma<n> {                                                                                \
    template <typename T, bool kRegisterA, OperandLies kA, OperandLies kB, typename A>             \
    __device__ __forceinline__ static void Issue(float (&d)[r], const A& a, uint64_t b,            \
                                                 bool accumulate) {                                \
      if constexpr (std::is_same_v<T, Int8>) {                                                     \
        static_assert(!kRegisterA && kA == OperandLies::kAcross && kB == OperandLies::kAcross);    \
        AddIntegers(d, a, b, accumulate);                                                          \
      } else if constexpr (std::is_same_v<T, E4m3>) {                                              \
        static_assert(kA == OperandLies::kAcross && kB == OperandLies::kAcross);                   \
        KVBLOCK_WGMMA_NARROW(n, r, __VA_ARGS__)                                                    \
      } else if constexpr (std::is_same_v<T, __half>) {                                            \
        KVBLOCK_WGMMA_AS("f16", n, r, __VA_ARGS__)                                                 \
      } else {                                                                                     \
        KVBLOCK_WGMMA_AS("bf16", n, r, __VA_ARGS__)                                                \
      }                                                                                            \
    }                                                                                              \
    /* A and B in shared memory. */                                                                \
    template <typename T, OperandLies kA = OperandLies::kAcross,                                   \
              OperandLies kB = OperandLies::kAcross>                                               \
    __device__ __forceinline__ static void Shared(float (&d)[r], uint64_t a, uint64_t b,           \
                                                  bool accumulate = true) {                        \
      Issue<T, false, kA, kB>(d, a, b, accumulate);                                                \
    }                                                                                              \
    /* A in registers. */                                                                          \
    template <typename T, OperandLies kB = OperandLies::kAcross>                                   \
    __device__ __forceinline__ static void Registers(float (&d)[r], const uint32_t (&a)[4],        \
                                                     uint64_t b, bool accumulate = true) {         \
      Issue<T, true, OperandLies::kAcross, kB>(d, a, b, accumulate);                               \
    }                                                                                              \
  };

KVBLOCK_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
KVBLOCK_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
KVBLOCK_WGMMA(72, 36, 36, 37, 38, 39, 40, 41, 42)
KVBLOCK_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
KVBLOCK_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
KVBLOCK_WGMMA(112, 56, 56, 57, 58, 59, 60, 61, 62)
KVBLOCK_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
KVBLOCK_WGMMA(136, 68, 68, 69, 70, 71, 72, 73, 74)
KVBLOCK_WGMMA(144, 72, 72, 73, 74, 75, 76, 77, 78)
KVBLOCK_WGMMA(160, 80, 80, 81, 82, 83, 84, 85, 86)
KVBLOCK_WGMMA(176, 88, 88, 89, 90, 91, 92, 93, 94)
KVBLOCK_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
KVBLOCK_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)
// clang-format on

}  // namespace kvblock
