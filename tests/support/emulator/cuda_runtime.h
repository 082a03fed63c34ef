// CUDA on a CPU, for tests: enough of it to run the kernels that are written with mma.sync and
// cp.async, and Hopper's, thread by thread. It is slow and in order, and it is strict: what a
// kernel reads before it has arrived, or before anyone wrote it, is NaN, and threads that wait for
// a barrier that the others never reach are an error; so are operands, boxes and maps that the
// hardware does not take, and bytes that a barrier does not expect. In a library of its own,
// races.cc asks what orders the accesses of a CTA's threads to shared memory.
//
// A kernel is compiled by the host's compiler as the function that it is, with this folder before
// cpp/ on the include path: the headers of device/ that hold PTX are replaced by those here. How
// the threads of a CTA take turns is in fibers.h.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#if KVBLOCK_KERNEL_NAMES_SHARED  // that of the launch, and has no other
#define __shared__
#elif KVBLOCK_EMULATES_CLUSTERS
// Where CTAs that change places find it; all functions that have some are inline or templates.
#define __shared__ static __attribute__((section("kvblock_shared")))
#else
#define __shared__ static
#endif
#define __align__(n) __attribute__((aligned(n)))
#define __CUDA_ARCH_FEAT_SM90_ALL 1

using std::max;
using std::min;

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
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

typedef struct CUstream_st* cudaStream_t;

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
T __ldcs(const T* p) {
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
inline float __uint_as_float(unsigned x) { return emulator::Float(x); }
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
namespace emulator {
inline std::map<void*, int> allowed_bytes;  // of shared memory, by kernel
constexpr int kAlwaysAllowed = 48 * 1024;
}  // namespace emulator
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int bytes) {
  if (bytes > emulator::cta_bytes) emulator::Die("more shared memory than a CTA can have");
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    emulator::allowed_bytes[reinterpret_cast<void*>(kernel)] = bytes;
  }
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

// What is launched has run when the next one is: streams have nothing to wait for.
typedef struct CUevent_st* cudaEvent_t;
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t*, unsigned) { return cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t*, unsigned) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

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
  if (grid.y > 65535 || grid.z > 65535) emulator::Die("a grid is too large in y or z");
  const int most =
      std::max(emulator::allowed_bytes[reinterpret_cast<void*>(kernel)], emulator::kAlwaysAllowed);
  emulator::launched_bytes = config->dynamicSmemBytes;
  if (emulator::launched_bytes > static_cast<size_t>(most)) {
    emulator::Die("more shared memory than was allowed");
  }
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
