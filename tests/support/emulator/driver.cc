// A CUDA driver that runs kernels on the CPU: libcuda.so.1 as far as launching needs it, and twins
// of the tests' kernels, by their names. What is loaded and launched is what Python and the
// launcher made; only the kernels' own code is not run.
//
// A twin asks for its parameters by number. One that the PTX loads from memory is loaded here, too:
// the text that was loaded tells.
#include "ops/kernel_call/driver.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace driver = kvblock::driver;

namespace {

struct Function {
  std::string image, entry;
  int shared_limit = 48 * 1024;
};

struct Index {
  unsigned x, y, z;
};

struct Launch {
  const Function& function;
  const driver::LaunchConfig& config;
  void** parameters;

  bool IsLoaded(int number) const {
    return function.image.find("%kvblock_at" + std::to_string(number) + ",") != std::string::npos;
  }
  // By value, or from memory as the PTX has it.
  template <typename T>
  T Get(int number, Index block) const {
    if (!IsLoaded(number)) return *static_cast<T*>(parameters[number]);
    const char* at = *static_cast<const char**>(parameters[number]);
    const std::string part = "%kvblock_of" + std::to_string(number) + ",";
    const size_t narrow = function.image.find(part);
    const size_t size = narrow != std::string::npos ? 4 : sizeof(T);
    const std::string own = "%kvblock_block" + std::to_string(number) + ", %ctaid.";
    if (const size_t axis = function.image.find(own); axis != std::string::npos) {
      const char name = function.image[axis + own.size()];
      at += size * (name == 'x' ? block.x : name == 'y' ? block.y : block.z);
    }
    if (size == sizeof(T)) return *reinterpret_cast<const T*>(at);
    const size_t widened = function.image.find(", %kvblock_of" + std::to_string(number) + ";");
    const std::string type = function.image.substr(function.image.rfind("cvt.", widened), 12);
    if (type == "cvt.f64.f32 ") return static_cast<T>(*reinterpret_cast<const float*>(at));
    if (type == "cvt.s64.s32 ") return static_cast<T>(*reinterpret_cast<const int32_t*>(at));
    return static_cast<T>(*reinterpret_cast<const uint32_t*>(at));
  }
  template <typename T>
  T* Pointer(int number) const {
    return *static_cast<T**>(parameters[number]);
  }
};

// A thread of a grid: its block, and its number in it along x.
using Twin = std::function<void(const Launch&, Index block, unsigned thread)>;

std::map<std::string, Twin> Twins() {
  std::map<std::string, Twin> twins;
  // (const float* x, float* y, float a, int n): y = a x
  twins["scale"] = [](const Launch& l, Index block, unsigned thread) {
    const int64_t i = int64_t{block.x} * l.config.block[0] + thread;
    if (i >= l.Get<int32_t>(3, block)) return;
    l.Pointer<float>(1)[i] = l.Get<float>(2, block) * l.Pointer<float>(0)[i];
  };
  // The same for member blockIdx.z.
  twins["scale_members"] = [](const Launch& l, Index block, unsigned thread) {
    const int64_t n = l.Get<int32_t>(3, block), i = int64_t{block.x} * l.config.block[0] + thread;
    if (i >= n) return;
    l.Pointer<float>(1)[block.z * n + i] =
        l.Get<float>(2, block) * l.Pointer<float>(0)[block.z * n + i];
  };
  // (float* x, double a, long long n): x += a
  twins["shift"] = [](const Launch& l, Index block, unsigned thread) {
    const int64_t i = int64_t{block.x} * l.config.block[0] + thread;
    if (i >= l.Get<int64_t>(2, block)) return;
    l.Pointer<float>(0)[i] += static_cast<float>(l.Get<double>(1, block));
  };
  // (const float* x, float* kept, unsigned* count, int n, unsigned capacity): x > 0 are kept
  twins["keep_positive"] = [](const Launch& l, Index block, unsigned thread) {
    const int64_t i = int64_t{block.x} * l.config.block[0] + thread;
    if (i >= l.Get<int32_t>(3, block) || !(l.Pointer<float>(0)[i] > 0.0f)) return;
    const uint32_t place = l.Pointer<uint32_t>(2)[0]++;
    if (place < l.Get<uint32_t>(4, block)) l.Pointer<float>(1)[place] = l.Pointer<float>(0)[i];
  };
  // (const __grid_constant__ CUtensorMap map, unsigned long long* words): the map's words
  twins["show_map"] = [](const Launch& l, Index, unsigned thread) {
    if (thread < 16) {
      std::memcpy(l.Pointer<uint64_t>(1) + thread, static_cast<char*>(l.parameters[0]) + thread * 8,
                  8);
    }
  };
  return twins;
}

struct State {
  std::mutex mutex;
  int context = 0;
  std::set<Function*> functions;
  std::map<std::string, Twin> twins = Twins();
  int loads = 0, launches = 0, prepared = 0, fails_with = 0;
  driver::LaunchConfig last{};
  std::vector<driver::LaunchAttribute> attributes;
};
State& Global() {
  static State& state = *new State;
  return state;
}

constexpr int kInvalidPtx = 218, kNotFound = 500, kInvalidValue = 1;

}  // namespace

extern "C" {

// ---- what tests ask and set ----------------------------------------------------------

int emulator_loads() { return Global().loads; }
int emulator_launches() { return Global().launches; }
void emulator_fail_with(int status) { Global().fails_with = status; }
void emulator_last_launch(unsigned* numbers) {  // grid, block, shared bytes, cluster, cooperative
  const State& state = Global();
  std::memcpy(numbers, state.last.grid, 12);
  std::memcpy(numbers + 3, state.last.block, 12);
  numbers[6] = state.last.shared_bytes;
  for (int i = 7; i < 11; ++i) numbers[i] = 0;
  for (const auto& attribute : state.attributes) {
    if (attribute.id == driver::kCluster) std::memcpy(numbers + 7, attribute.value.bytes, 12);
    if (attribute.id == driver::kCooperative) numbers[10] = attribute.value.cooperative;
  }
}

// ---- the driver ----------------------------------------------------------------------

int cuCtxGetCurrent(void** context) {
  *context = &Global().context;
  return 0;
}
int cuCtxGetDevice(int* device) {
  *device = 0;
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == driver::kMaxSharedOfBlock ? 232448 : 0;
  return 0;
}
int cuGetErrorName(int status, const char** name) {
  *name = status == kInvalidPtx ? "CUDA_ERROR_INVALID_PTX"
          : status == kNotFound ? "CUDA_ERROR_NOT_FOUND"
          : status == 700       ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                : "CUDA_ERROR_INVALID_VALUE";
  return 0;
}
int cuGetErrorString(int, const char** text) {
  *text = "as the emulator says";
  return 0;
}
int cuLibraryLoadData(void** library, const void* code, int* options, void** values, unsigned count,
                      int*, void**, unsigned) {
  const std::string image = static_cast<const char*>(code);
  if (image.find(".version") == std::string::npos || image.find("broken") != std::string::npos) {
    for (unsigned i = 0; i < count; ++i) {
      if (options[i] == driver::kErrorLog) {
        std::snprintf(static_cast<char*>(values[i]), 64, "ptxas: line 1 is wrong");
      }
    }
    return kInvalidPtx;
  }
  ++Global().loads;
  *library = new std::string(image);
  return 0;
}
int cuLibraryUnload(void* library) {
  delete static_cast<std::string*>(library);
  return 0;
}
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  const auto& image = *static_cast<std::string*>(library);
  if (image.find(std::string(".entry ") + name) == std::string::npos) return kNotFound;
  *kernel = new Function{image, name};
  return 0;
}
int cuKernelGetFunction(void** function, void* kernel) {
  ++Global().prepared;
  *function = kernel;
  return 0;
}
int cuFuncGetAttribute(int* value, int attribute, void* function) {
  const auto& own = *static_cast<Function*>(function);
  *value = attribute == driver::kMaxThreads         ? 512
           : attribute == driver::kMaxDynamicShared ? own.shared_limit
                                                    : 0;
  return 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  if (attribute == driver::kMaxDynamicShared)
    static_cast<Function*>(function)->shared_limit = value;
  return 0;
}
int cuLaunchKernelEx(const driver::LaunchConfig* config, void* function, void** parameters,
                     void**) {
  State& state = Global();
  const auto& own = *static_cast<Function*>(function);
  const std::lock_guard<std::mutex> lock(state.mutex);
  const uint64_t threads = uint64_t{config->block[0]} * config->block[1] * config->block[2];
  if (threads > 512 || static_cast<int>(config->shared_bytes) > own.shared_limit) {
    return kInvalidValue;
  }
  state.last = *config;
  state.attributes.assign(config->attributes, config->attributes + config->count);
  ++state.launches;
  const auto twin = state.twins.find(own.entry);
  if (twin == state.twins.end()) return 0;
  const Launch launch{own, *config, parameters};
  for (unsigned z = 0; z < config->grid[2]; ++z) {
    for (unsigned y = 0; y < config->grid[1]; ++y) {
      for (unsigned x = 0; x < config->grid[0]; ++x) {
        for (unsigned t = 0; t < threads; ++t) twin->second(launch, {x, y, z}, t);
      }
    }
  }
  return 0;
}
int cuMemsetD8Async(driver::Address to, unsigned char value, size_t bytes, void*) {
  std::memset(reinterpret_cast<void*>(to), value, bytes);
  return 0;
}
int cuMemcpyDtoDAsync_v2(driver::Address to, driver::Address from, size_t bytes, void*) {
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  return 0;
}
int cuStreamIsCapturing(void*, int* capturing) {
  *capturing = 0;
  return 0;
}
int cuStreamSynchronize(void*) { return Global().fails_with; }
int cuThreadExchangeStreamCaptureMode(int*) { return 0; }
int cuTensorMapEncodeTiled(void* map, int dtype, unsigned rank, void* address,
                           const uint64_t* sizes, const uint64_t* strides, const unsigned* box,
                           const unsigned* steps, int interleave, int swizzle, int promotion,
                           int fill) {
  uint64_t* const words = static_cast<uint64_t*>(map);
  std::memset(words, 0, 128);
  words[0] = reinterpret_cast<uint64_t>(address);
  words[1] = static_cast<uint64_t>(dtype) | uint64_t{rank} << 8 | uint64_t(interleave) << 16 |
             uint64_t(swizzle) << 24 | uint64_t(promotion) << 32 | uint64_t(fill) << 40;
  for (unsigned i = 0; i < rank; ++i) words[2 + i] = sizes[i];
  for (unsigned i = 0; i + 1 < rank; ++i) words[7 + i] = strides[i];
  for (unsigned i = 0; i < rank; ++i) words[11 + i] = box[i] | uint64_t{steps[i]} << 32;
  return 0;
}

}  // extern "C"
