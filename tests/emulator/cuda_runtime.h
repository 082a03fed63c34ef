// CUDA on a CPU, for tests: enough of it to run the kernels that are written with mma.sync and
// cp.async, thread by thread. It is slow and in order, and it is strict: what a kernel reads before
// it has arrived, or before anyone wrote it, is NaN, and threads that wait for a barrier that the
// others never reach are an error.
//
// A kernel is compiled by the host's compiler as the function that it is, with this folder before
// cpp/ on the include path: the headers of device/ that hold PTX are replaced by those here. CTAs
// run one after the other. The threads of a CTA are fibers; a fiber runs until it has to wait.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __align__(n) alignas(n)

using std::max;
using std::min;

struct uint3 {
  unsigned x, y, z;
};
struct int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

typedef struct CUstream_st* cudaStream_t;

inline uint3 threadIdx, blockIdx;
inline uint3 blockDim, gridDim;

namespace emulator {

constexpr int kSharedBytes = 232448, kWarp = 32;
alignas(1024) inline char shared[kSharedBytes];

[[noreturn]] inline void Die(const char* what) {
  std::fprintf(stderr, "emulator: block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, what);
  std::exit(3);
}

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  int thread;
  bool done = false;
};

// Where some threads wait for each other.
struct Barrier {
  int arrived = 0;
  std::vector<Fiber*> waiting;
};

struct Copy {
  char* to;
  const char* from;
  int bytes, zeros;
};

// The words that the lanes of a warp show each other. Two places in turn: nobody is two meetings
// ahead.
struct Warp {
  Barrier barrier;
  uint32_t words[2][kWarp][8];
};

struct Cta {
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::deque<Fiber*> ready;
  Fiber* running = nullptr;
  int alive = 0;
  Barrier all;
  std::vector<Warp> warps;
  std::vector<int> meetings;                           // of each thread with its warp
  std::vector<std::vector<std::vector<Copy>>> groups;  // of each thread, the last still open
  const std::function<void()>* kernel = nullptr;
};
inline Cta* cta = nullptr;

inline void Run(Fiber* fiber) {
  threadIdx = {static_cast<unsigned>(fiber->thread), 0, 0};
  cta->running = fiber;
  swapcontext(&cta->scheduler, &fiber->context);
}

inline void Wait(Barrier& barrier, int count) {
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    for (Fiber* fiber : barrier.waiting) cta->ready.push_back(fiber);
    barrier.waiting.clear();
    return;
  }
  Fiber* const self = cta->running;
  barrier.waiting.push_back(self);
  swapcontext(&self->context, &cta->scheduler);
}

inline void Entry() {
  (*cta->kernel)();
  Fiber* const self = cta->running;
  self->done = true;
  --cta->alive;
  swapcontext(&self->context, &cta->scheduler);
}

inline void RunCta(int threads, const std::function<void()>& kernel) {
  constexpr int kStack = 256 * 1024;
  Cta here;
  cta = &here;
  std::memset(shared, 0xff, sizeof(shared));
  here.kernel = &kernel;
  here.fibers.resize(threads);
  here.warps.resize((threads + kWarp - 1) / kWarp);
  here.meetings.resize(threads);
  here.groups.assign(threads, {{}});
  here.alive = threads;
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = here.fibers[i];
    fiber.thread = i;
    fiber.stack.reset(new char[kStack]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, Entry, 0);
    here.ready.push_back(&fiber);
  }
  while (!here.ready.empty()) {
    Fiber* const fiber = here.ready.front();
    here.ready.pop_front();
    Run(fiber);
  }
  if (here.alive != 0) Die("the others wait for a barrier that some threads never reach");
  for (const auto& groups : here.groups) {
    for (size_t i = 0; i + 1 < groups.size(); ++i) {
      if (!groups[i].empty()) Die("asynchronous copies are under way at the end");
    }
  }
  cta = nullptr;
}

// kernel() for every thread of grid x CTAs.
inline void Launch(unsigned grid_x, unsigned grid_y, int threads,
                   const std::function<void()>& kernel) {
  gridDim = {grid_x, grid_y, 1};
  blockDim = {static_cast<unsigned>(threads), 1, 1};
  for (unsigned y = 0; y < grid_y; ++y) {
    for (unsigned x = 0; x < grid_x; ++x) {
      blockIdx = {x, y, 0};
      RunCta(threads, kernel);
    }
  }
}

// What every lane of this warp shows, once all have.
inline uint32_t (*Show(std::initializer_list<uint32_t> words))[8] {
  const int thread = threadIdx.x;
  Warp& warp = cta->warps[thread / kWarp];
  auto& place = warp.words[cta->meetings[thread]++ % 2];
  std::copy(words.begin(), words.end(), place[thread % kWarp]);
  Wait(warp.barrier, kWarp);
  return place;
}

inline uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float Float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
template <typename T>
uint32_t Word(T x) {
  static_assert(sizeof(T) == 4);
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
template <typename T>
T FromWord(uint32_t bits) {
  T x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Addresses of the shared window count from `shared`.
inline char* SharedPointer(uint32_t address) { return shared + static_cast<int32_t>(address); }

}  // namespace emulator

inline size_t __cvta_generic_to_shared(const void* p) {
  return static_cast<uint32_t>(static_cast<const char*>(p) - emulator::shared);
}

inline void __syncthreads() { emulator::Wait(emulator::cta->all, emulator::cta->fibers.size()); }
inline void __syncwarp(unsigned = ~0u) { emulator::Show({}); }

template <typename T>
T __shfl_sync(unsigned, T x, int lane) {
  return emulator::FromWord<T>(emulator::Show({emulator::Word(x)})[lane % 32][0]);
}
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return emulator::FromWord<T>(emulator::Show({emulator::Word(x)})[threadIdx.x % 32 ^ mask][0]);
}
template <typename T>
T __shfl_up_sync(unsigned, T x, int delta) {
  const int lane = threadIdx.x % 32;
  return emulator::FromWord<T>(
      emulator::Show({emulator::Word(x)})[lane >= delta ? lane - delta : lane][0]);
}
inline unsigned __ballot_sync(unsigned, bool x) {
  const auto shown = emulator::Show({x});
  unsigned ballot = 0;
  for (int lane = 0; lane < 32; ++lane) ballot |= shown[lane][0] << lane;
  return ballot;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == ~0u; }

inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
template <typename T>
T __ldg(const T* p) {
  return *p;
}
inline int __float_as_int(float x) { return static_cast<int>(emulator::Bits(x)); }
inline float __int_as_float(int x) { return emulator::Float(static_cast<uint32_t>(x)); }
