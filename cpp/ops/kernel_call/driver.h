// What launching needs of the CUDA driver, by its documented ABI. CUDA's headers are not asked, so
// that a build without nvcc can launch kernels, too; tests/native/test_driver_abi.py holds this to
// cuda.h.
#ifndef KVBLOCK_OPS_KERNEL_CALL_DRIVER_H_
#define KVBLOCK_OPS_KERNEL_CALL_DRIVER_H_

#include <cstddef>
#include <cstdint>

namespace kvblock::driver {

using Result = int;
using Handle = void*;  // of a library, a kernel, a function, a stream, a context
using Address = unsigned long long;

constexpr Result kSuccess = 0, kUnsupportedPtx = 222, kNotFound = 500;

// CUjit_option
enum JitOption : int { kErrorLog = 5, kErrorLogBytes = 6 };
// CUfunction_attribute
enum FunctionAttribute : int {
  kMaxThreads = 0,
  kStaticShared = 1,
  kMaxDynamicShared = 8,
  kNonPortableCluster = 14,
};
// CUdevice_attribute
enum DeviceAttribute : int { kMaxSharedOfBlock = 97 };
// CUlaunchAttributeID
enum LaunchAttributeId : int { kCooperative = 2, kCluster = 4 };
// CUstreamCaptureMode, CUstreamCaptureStatus
enum CaptureMode : int { kRelaxed = 2 };
enum CaptureStatus : int { kNoCapture = 0 };

struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int cooperative;
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  Handle stream;
  LaunchAttribute* attributes;
  unsigned count;
};
static_assert(offsetof(LaunchConfig, stream) == 32 && sizeof(LaunchConfig) == 56);

// KVBLOCK_DRIVER(what this calls it, the driver's function, result, parameters)
#define KVBLOCK_DRIVER_FUNCTIONS(X)                                                  \
  X(CtxGetCurrent, cuCtxGetCurrent, (Handle*))                                       \
  X(CtxGetDevice, cuCtxGetDevice, (int*))                                            \
  X(DeviceGetAttribute, cuDeviceGetAttribute, (int*, int, int))                      \
  X(GetErrorName, cuGetErrorName, (Result, const char**))                            \
  X(GetErrorString, cuGetErrorString, (Result, const char**))                        \
  X(LibraryLoadData, cuLibraryLoadData,                                              \
    (Handle*, const void*, int*, void**, unsigned, int*, void**, unsigned))          \
  X(LibraryUnload, cuLibraryUnload, (Handle))                                        \
  X(LibraryGetKernel, cuLibraryGetKernel, (Handle*, Handle, const char*))            \
  X(KernelGetFunction, cuKernelGetFunction, (Handle*, Handle))                       \
  X(FuncGetAttribute, cuFuncGetAttribute, (int*, int, Handle))                       \
  X(FuncSetAttribute, cuFuncSetAttribute, (Handle, int, int))                        \
  X(LaunchKernelEx, cuLaunchKernelEx, (const LaunchConfig*, Handle, void**, void**)) \
  X(MemsetD8Async, cuMemsetD8Async, (Address, unsigned char, size_t, Handle))        \
  X(MemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, (Address, Address, size_t, Handle))       \
  X(StreamIsCapturing, cuStreamIsCapturing, (Handle, int*))                          \
  X(StreamSynchronize, cuStreamSynchronize, (Handle))                                \
  X(ThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (int*))      \
  X(TensorMapEncodeTiled, cuTensorMapEncodeTiled,                                    \
    (void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const unsigned*, \
     const unsigned*, int, int, int, int))

struct Driver {
#define KVBLOCK_DRIVER_FIELD(name, symbol, parameters) Result(*name) parameters;
  KVBLOCK_DRIVER_FUNCTIONS(KVBLOCK_DRIVER_FIELD)
#undef KVBLOCK_DRIVER_FIELD
};

// The driver's functions, found at the first call. A message in `error` where there is no driver,
// or where it is older than CUDA 12.
const Driver* Find(const char** error);

}  // namespace kvblock::driver

#endif  // KVBLOCK_OPS_KERNEL_CALL_DRIVER_H_
