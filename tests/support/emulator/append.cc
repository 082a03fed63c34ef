// libkvblock's append for the emulator: the function of kvblock/append.h with the kernel behind it,
// from the sources that nvcc compiles.
#include "ops/append/append_cuda.cu"

// The conversions of device/narrow.cuh, as they are where there is no instruction for them.
extern "C" uint16_t emulator_pair_of(int cache_dtype, float x, float y) {
  return kvblock::PairOf(cache_dtype, x, y);
}
extern "C" void emulator_cos_sin(int position, float frequency, float* cosine, float* sine) {
  const float2 made = kvblock::CosSin(position, frequency);
  *cosine = made.x;
  *sine = made.y;
}

// As block_copy_cuda.cu has it.
extern "C" const char* kvblock_copy_bytes_cuda(void* to, const void* from, int64_t bytes, void*) {
  if (to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
  return nullptr;
}
