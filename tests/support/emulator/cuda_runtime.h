// CUDA on a CPU, for tests: enough of it to run the kernels that are written with mma.sync and
// cp.async, Hopper's forward kernel over pages and in 8 bits, and its kernel for latent caches,
// thread by thread. It is slow and in order, and it is strict: what a kernel reads before it has
// arrived, or before anyone wrote it, is NaN, and threads that wait for a barrier that the others
// never reach are an error. In a library of its own, races.cc asks what orders the accesses of a
// CTA's threads to shared memory.
//
// A kernel is compiled by the host's compiler as the function that it is, with this folder before
// cpp/ on the include path: the headers of device/ that hold PTX are replaced by those here. CTAs
// run one after the other; those of a cluster take turns, when one has no thread that can go on.
// Then what lies in shared memory changes places with what the other has there. The threads of a
// CTA are fibers; a fiber runs until it has to wait.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "races.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#if KVBLOCK_EMULATES_CLUSTERS
// Where CTAs that change places find it; all functions that have some are inline or templates.
#define __shared__ static __attribute__((section("kvblock_shared")))
#else
#define __shared__ static
#endif
#define __align__(n) alignas(n)
#define __CUDA_ARCH_FEAT_SM90_ALL 1

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
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

typedef struct CUstream_st* cudaStream_t;

inline uint3 threadIdx, blockIdx;
inline uint3 blockDim, gridDim;

namespace emulator {

constexpr int kSharedBytes = 232448, kWarp = 32;
alignas(1024) inline char shared[kSharedBytes];

constexpr int kDead = 70;  // the exit status; tests know it
[[noreturn]] inline void Die(const char* what) {
  std::fprintf(stderr, "emulator: block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, what);
  std::_Exit(kDead);  // this may be a fiber's stack
}

// What a fiber has of the processor while another runs. Where the architecture is known, a switch
// is a few instructions; swapcontext makes two calls of the system.
#if defined(__x86_64__)
struct Context {
  void* stack_pointer = nullptr;
};
asm(R"(
.pushsection .text
.local kvblock_emulator_switch
.type kvblock_emulator_switch, @function
kvblock_emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov (%rsi), %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.popsection
)");
extern "C" void kvblock_emulator_switch(Context* from, Context* to);
inline void Switch(Context* from, Context* to) { kvblock_emulator_switch(from, to); }
inline void Prepare(Context* context, char* stack, size_t bytes, void (*entry)()) {
  const auto top = (reinterpret_cast<uintptr_t>(stack) + bytes) / 16 * 16;
  void** place = reinterpret_cast<void**>(top) - 1;  // as if `entry` had been called
  *--place = reinterpret_cast<void*>(entry);
  context->stack_pointer = place - 6;
}
#else
struct Context {
  ucontext_t context;
};
inline void Switch(Context* from, Context* to) { swapcontext(&from->context, &to->context); }
inline void Prepare(Context* context, char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context->context);
  context->context.uc_stack.ss_sp = stack;
  context->context.uc_stack.ss_size = bytes;
  context->context.uc_link = nullptr;
  makecontext(&context->context, entry, 0);
}
#endif

constexpr size_t kStackBytes = 256 * 1024;

struct Cta;
struct Fiber {
  Context context;
  Cta* of = nullptr;
  int thread = 0;
  bool done = false;
  bool in_cluster = false;  // between arriving at its cluster and waiting for it
};

// Where some threads wait for each other.
struct Barrier {
  int arrived = 0;
  std::vector<Fiber*> waiting;
  races::Handover handover;
};

// A barrier in shared memory.
struct SharedBarrier {
  int expected = 0, arrived = 0;
  int64_t bytes = 0;  // of bulk copies, still to come
  unsigned phase = 0;
  std::vector<Fiber*> waiting;
  // Arrivals that follow copies under way. They happen when somebody waits.
  std::vector<std::function<void()>> late;
  races::Handover handover;
};

struct Copy {
  char* to;
  const char* from;
  int bytes, zeros;
};

// The words that the lanes of a warp show each other. Two places in turn: nobody is two meetings
// ahead.
constexpr int kWords = 12;
struct Warp {
  Barrier barrier;
  uint32_t words[2][kWarp][kWords];
};

struct Cta {
  Context scheduler;
  std::vector<Fiber> fibers;
  std::deque<Fiber*> ready;
  Fiber* running = nullptr;
  int alive = 0;
  Barrier all;
  std::map<int, Barrier> named;
  std::map<uint32_t, SharedBarrier> in_shared;
  std::vector<Warp> warps;
  std::vector<int> meetings;  // of each thread with its warp
  std::vector<int> counts;    // of each thread, as below
  int counted[3] = {};        // votes of __syncthreads_count: of this time, the last and the next
  std::vector<std::vector<std::vector<Copy>>> groups;  // of each thread, the last still open
  const std::function<void()>* kernel = nullptr;
  uint3 block{};
  int rank = 0;               // in its cluster
  std::vector<char> outside;  // while another one runs: what lies in shared memory
};
inline Cta* cta = nullptr;

// The CTAs that run together, of which `cta` is one.
struct Cluster {
  std::vector<std::unique_ptr<Cta>> ctas;
  Barrier all;
  Barrier begun;  // hands on what was done before FenceBarrierInit
};
inline Cluster* cluster = nullptr;

// What kernels have as __shared__, if it has a place of its own.
extern "C" __attribute__((weak, visibility("hidden"))) char __start_kvblock_shared[];
extern "C" __attribute__((weak, visibility("hidden"))) char __stop_kvblock_shared[];
EMULATOR_UNSEEN inline void CopyShared(std::vector<char>& outside, bool in) {
  const size_t variables = __stop_kvblock_shared - __start_kvblock_shared;
  outside.resize(kSharedBytes + variables);
  const auto copy = [&](char* place, char* at, size_t bytes) {
    if (bytes > 0) std::memcpy(in ? place : at, in ? at : place, bytes);
  };
  copy(shared, outside.data(), kSharedBytes);
  copy(__start_kvblock_shared, outside.data() + kSharedBytes, variables);
}
inline void ChangeTo(Cta* next) {
  if (cta == next) return;
  races::EnterCta(next->rank);
  if (cta != nullptr && cluster->ctas.size() > 1) CopyShared(cta->outside, false);
  if (!next->outside.empty()) CopyShared(next->outside, true);
  cta = next;
  blockIdx = cta->block;
}

inline void Run(Fiber* fiber) {
  threadIdx = {static_cast<unsigned>(fiber->thread), 0, 0};
  cta->running = fiber;
  races::running = cta->rank * static_cast<int>(cta->fibers.size()) + fiber->thread;
  Switch(&cta->scheduler, &fiber->context);
  races::running = -1;
}

inline void Sleep(std::vector<Fiber*>& waiting) {
  Fiber* const self = cta->running;
  waiting.push_back(self);
  Switch(&self->context, &cta->scheduler);
}
inline void Wake(std::vector<Fiber*>& waiting) {
  for (Fiber* fiber : waiting) fiber->of->ready.push_back(fiber);
  waiting.clear();
}

// Waits until so many threads are here; by Wait they also learn what the others have done.
inline void Meet(Barrier& barrier, int count) {
  if (++barrier.arrived < count) return Sleep(barrier.waiting);
  barrier.arrived = 0;
  Wake(barrier.waiting);
}
inline void Wait(Barrier& barrier, int count) {
  races::Release(barrier.handover);
  if (barrier.arrived + 1 == count) races::Complete(barrier.handover);
  Meet(barrier, count);
  races::Acquire(barrier.handover);
}

inline void Finish(const Copy& copy) {
  if (copy.bytes) std::memcpy(copy.to, copy.from, copy.bytes);
  if (copy.zeros) std::memset(copy.to, 0, copy.zeros);
}

inline void Entry() {
  (*cta->kernel)();
  Fiber* const self = cta->running;
  self->done = true;
  --cta->alive;
  Switch(&self->context, &cta->scheduler);
}

// `ctas` of them, side by side from `first` on.
inline void RunCluster(uint3 first, int ctas, int threads, const std::function<void()>& kernel) {
  static std::vector<std::unique_ptr<char[]>> stacks;  // of all clusters, one after the other
  while (stacks.size() < static_cast<size_t>(ctas * threads)) {
    stacks.emplace_back(new char[kStackBytes]);
  }
  Cluster here;
  cluster = &here;
  races::BeginCluster(ctas, threads);
  for (int rank = 0; rank < ctas; ++rank) {
    Cta& own = *here.ctas.emplace_back(std::make_unique<Cta>());
    own.block = {first.x + rank, first.y, first.z};
    own.rank = rank;
    if (ctas > 1) own.outside.assign(kSharedBytes, static_cast<char>(0xff));
    own.kernel = &kernel;
    own.fibers.resize(threads);
    own.warps.resize((threads + kWarp - 1) / kWarp);
    own.meetings.resize(threads);
    own.counts.resize(threads);
    own.groups.assign(threads, {{}});
    own.alive = threads;
    for (int i = 0; i < threads; ++i) {
      Fiber& fiber = own.fibers[i];
      fiber.of = &own;
      fiber.thread = i;
      Prepare(&fiber.context, stacks[rank * threads + i].get(), kStackBytes, Entry);
      own.ready.push_back(&fiber);
    }
  }
  std::memset(shared, 0xff, sizeof(shared));
  for (bool some = true; some;) {
    some = false;
    for (const auto& own : here.ctas) {
      if (own->ready.empty()) continue;
      some = true;
      ChangeTo(own.get());
      while (!cta->ready.empty()) {
        Fiber* const fiber = cta->ready.front();
        cta->ready.pop_front();
        Run(fiber);
      }
    }
  }
  for (const auto& own : here.ctas) {
    ChangeTo(own.get());
    if (own->alive != 0) Die("the others wait for a barrier that some threads never reach");
    for (const auto& groups : own->groups) {
      for (size_t i = 0; i + 1 < groups.size(); ++i) {
        if (!groups[i].empty()) Die("asynchronous copies are under way at the end");
      }
    }
    for (const auto& [at, barrier] : own->in_shared) {
      if (!barrier.late.empty()) Die("bulk copies are under way at the end");
    }
  }
  cta = nullptr;
  cluster = nullptr;
}

// What every lane of this warp shows, once all have.
template <size_t kCount>
uint32_t (*Show(const std::array<uint32_t, kCount>& words)) [kWords] {
  static_assert(kCount <= kWords);
  const int thread = threadIdx.x;
  Warp& warp = cta->warps[thread / kWarp];
  auto& place = warp.words[cta->meetings[thread]++ % 2];
  std::copy(words.begin(), words.end(), place[thread % kWarp]);
  Meet(warp.barrier, kWarp);
  return place;
} inline uint32_t (*Show(uint32_t word)) [kWords] { return Show(std::array<uint32_t, 1>{word}); }

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
inline int __syncthreads_count(bool x) {
  emulator::Cta& own = *emulator::cta;
  const int time = own.counts[threadIdx.x]++;
  own.counted[(time + 1) % 3] = 0;  // all have read it: they are beyond the time before this
  own.counted[time % 3] += x;
  __syncthreads();
  return own.counted[time % 3];
}
inline bool __syncthreads_or(bool x) { return __syncthreads_count(x) != 0; }
inline void __syncwarp(unsigned = ~0u) {
  emulator::Wait(emulator::cta->warps[threadIdx.x / emulator::kWarp].barrier, emulator::kWarp);
}

template <typename T>
T __shfl_sync(unsigned, T x, int lane, int width = 32) {
  const int first = threadIdx.x % 32 / width * width;
  return emulator::FromWord<T>(emulator::Show(emulator::Word(x))[first + lane % width][0]);
}
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return emulator::FromWord<T>(emulator::Show(emulator::Word(x))[threadIdx.x % 32 ^ mask][0]);
}
template <typename T>
T __shfl_up_sync(unsigned, T x, int delta) {
  const int lane = threadIdx.x % 32;
  return emulator::FromWord<T>(
      emulator::Show(emulator::Word(x))[lane >= delta ? lane - delta : lane][0]);
}
inline unsigned __ballot_sync(unsigned, bool x) {
  const auto shown = emulator::Show(static_cast<uint32_t>(x));
  unsigned ballot = 0;
  for (int lane = 0; lane < 32; ++lane) ballot |= shown[lane][0] << lane;
  return ballot;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == ~0u; }

inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(unsigned x) { return x == 0 ? 32 : __builtin_clz(x); }
template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
T __ldcg(const T* p) {
  return *p;
}
template <typename T>
void __stwb(T* to, T x) {
  *to = x;
}
template <typename T>
T __reduce_add_sync(unsigned, T x) {
  const auto shown = emulator::Show(emulator::Word(x));
  T sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += emulator::FromWord<T>(shown[lane][0]);
  return sum;
}
template <typename T>
T __reduce_max_sync(unsigned, T x) {
  const auto shown = emulator::Show(emulator::Word(x));
  T most = x;
  for (int lane = 0; lane < 32; ++lane) {
    most = std::max(most, emulator::FromWord<T>(shown[lane][0]));
  }
  return most;
}
template <typename T, typename U>
T atomicAdd(T* to, U x) {
  emulator::races::Touch(emulator::races::Access::kAtomic, to, sizeof(T));
  const emulator::races::Unseen unseen;
  return std::exchange(*to, *to + x);
}
template <typename T, typename U>
T atomicOr(T* to, U x) {
  emulator::races::Touch(emulator::races::Access::kAtomic, to, sizeof(T));
  const emulator::races::Unseen unseen;
  return std::exchange(*to, *to | x);
}
inline void __threadfence() {}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline int __float2int_rn(float x) {
  if (x != x) return 0;
  if (std::fabs(x) >= 0x1p31f) return x < 0 ? INT_MIN : INT_MAX;
  return static_cast<int>(std::nearbyint(x));
}
inline void sincospif(float x, float* sine, float* cosine) {
  *sine = static_cast<float>(std::sin(x * M_PI));
  *cosine = static_cast<float>(std::cos(x * M_PI));
}
inline float __fdividef(float a, float b) { return a / b; }
inline int __float_as_int(float x) { return static_cast<int>(emulator::Bits(x)); }
inline float __int_as_float(int x) { return emulator::Float(static_cast<uint32_t>(x)); }
inline unsigned __float_as_uint(float x) { return emulator::Bits(x); }
inline float __saturatef(float x) { return x > 0.0f ? min(x, 1.0f) : 0.0f; }  // 0 for NaN
// Four bytes of the eight of y and x, as the digits of `selector` say.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t eight = uint64_t{y} << 32 | x;
  unsigned bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned which = selector >> i * 4 & 7;
    bytes |= static_cast<unsigned>(eight >> which * 8 & 0xff) << i * 8;
  }
  return bytes;
}

// ---- the runtime -----------------------------------------------------------------------

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}  // NOLINT: as in CUDA
};
enum cudaError_t { cudaSuccess = 0 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout,
  cudaFuncAttributeNonPortableClusterSizeAllowed,
};
enum { cudaSharedmemCarveoutMaxShared = 100 };
struct cudaFuncAttributes {
  int ptxVersion, binaryVersion;
};
enum cudaLaunchAttributeID {
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension,
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    uint3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  const cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
// Device kFirst + n has n multiprocessors. What is remembered of a device is of lower numbers: a
// test may change what this one has.
namespace emulator {
constexpr int kFirst = 1000;
inline int device = kFirst + 3;
inline int multiprocessor_bytes = kSharedBytes + 1024, cta_bytes = kSharedBytes;
inline int major = 8;                       // of the compute capability
inline bool on_one_multiprocessor = false;  // all CTAs
inline int grids = 0;                       // bit n: a launch had n CTAs in x
inline int launches = 0;
inline int hopper_ctas = 0;     // that are warpgroups which play different roles
inline int clustered_ctas = 0;  // that are not alone
}  // namespace emulator
inline cudaError_t cudaGetDevice(int* device) {
  *device = emulator::device;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  *value = attribute == cudaDevAttrMultiProcessorCount            ? device - emulator::kFirst
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? emulator::cta_bytes
           : attribute == cudaDevAttrComputeCapabilityMajor       ? emulator::major
           : attribute == cudaDevAttrComputeCapabilityMinor       ? 0
                                                                  : emulator::multiprocessor_bytes;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int bytes) {
  if (bytes > emulator::cta_bytes) emulator::Die("more shared memory than a CTA can have");
  return cudaSuccess;
}
// Compiled for sm_80: no launch begins early.
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
  *attributes = {80, 80};
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

template <typename... Parameters, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Args&... args) {
  const auto& [grid, block] = std::pair(config->gridDim, config->blockDim);
  if (grid.x <= 30) emulator::grids |= 1 << grid.x;
  ++emulator::launches;
  unsigned together = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) together = attribute.val.clusterDim.x;
  }
  if (grid.x % together != 0) emulator::Die("a cluster is not whole");
  gridDim = {grid.x, grid.y, grid.z};
  blockDim = {block.x, 1, 1};
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; x += together) {
        if (together > 1) emulator::clustered_ctas += static_cast<int>(together);
        emulator::RunCluster({x, y, z}, static_cast<int>(together), static_cast<int>(block.x),
                             [&] { kernel(args...); });
      }
    }
  }
  return cudaSuccess;
}
