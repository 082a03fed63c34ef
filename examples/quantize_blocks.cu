// Blocks of a pool, gathered and rounded to int8 on the way, with a scale for each row of a token
// and head: what goes to another machine, or to slower memory, at half the bytes.
//
//   pool [B, R, DIM] bfloat16, where R are a block's rows (layers, outer, tokens, heads);
//   ids [N]; rows [N, R, DIM] int8; scales [N, R]. An id that is none gives zeros.
//
// DIM / 8 threads have a row, 16 bytes each. Which number is the largest they tell each other.
#include <cuda_bf16.h>

extern "C" __global__ void __launch_bounds__(256)
    quantize_blocks(const __nv_bfloat16* __restrict__ pool, const int* __restrict__ ids,
                    signed char* __restrict__ rows, float* __restrict__ scales, int blocks,
                    int of_block, int items) {
  constexpr int kThreads = DIM / 8;  // of a row
  const long long first = static_cast<long long>(blockIdx.x) * (256 / kThreads);
  const long long row = first + threadIdx.x / kThreads;
  const int part = threadIdx.x % kThreads;
  const bool there = row < static_cast<long long>(items) * of_block;
  const int id = there ? ids[row / of_block] : -1;
  uint4 words = {0, 0, 0, 0};
  if (id >= 0 && id < blocks) {
    const long long from = static_cast<long long>(id) * of_block + row % of_block;
    words = reinterpret_cast<const uint4*>(pool)[from * kThreads + part];
  }
  const unsigned pairs[4] = {words.x, words.y, words.z, words.w};
  float x[8], largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const unsigned bits = i % 2 ? pairs[i / 2] & 0xffff0000u : pairs[i / 2] << 16;
    x[i] = __int_as_float(static_cast<int>(bits));
    largest = fmaxf(largest, fabsf(x[i]));
  }
#pragma unroll
  for (int other = kThreads / 2; other > 0; other /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, other));
  }
  const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  unsigned bytes[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int rounded = __float2int_rn(x[i] * inverse);
    bytes[i / 4] |= (static_cast<unsigned>(rounded) & 0xffu) << 8 * (i % 4);
  }
  if (!there) return;
  reinterpret_cast<uint2*>(rows)[row * kThreads + part] = make_uint2(bytes[0], bytes[1]);
  if (part == 0) scales[row] = largest / 127.0f;
}
