// Kernels that are not this library's own: loading them once, and launching them.
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "host/message.h"
#include "kvblock/kernel.h"
#include "ops/kernel_call/driver.h"

namespace kvblock {
namespace {

using driver::Driver;
using driver::Handle;

std::string NameOf(const Driver& cuda, driver::Result status) {
  const char *name = nullptr, *text = nullptr;
  cuda.GetErrorName(status, &name);
  cuda.GetErrorString(status, &text);
  std::string said = name != nullptr ? name : "error " + std::to_string(status);
  if (text != nullptr) said += std::string(" (") + text + ")";
  return said;
}

// What to do where the driver is older than the PTX.
std::string VersionOf(const std::string& image) {
  const std::string word = ".version ";
  const size_t at = image.find(word);
  if (at == std::string::npos) return "";
  const size_t from = at + word.size();
  return "; its PTX is of version " + image.substr(from, image.find_first_of(" \n", from) - from) +
         ", newer than the driver: compile it for an older one, or take a newer driver";
}

// An image that the driver has, and one entry of it. It stays loaded as long as a kernel has it:
// a CUDA graph that was captured may still launch it after that, so it is never unloaded.
class Loaded {
 public:
  // The same for every kernel with the same image and entry.
  static std::shared_ptr<Loaded> Of(std::string image, std::string entry) {
    static auto& mutex = *new std::mutex;
    static auto& known =
        *new std::map<std::pair<std::string, std::string>, std::shared_ptr<Loaded>>;
    const std::lock_guard<std::mutex> lock(mutex);
    auto& loaded = known[{image, entry}];
    if (!loaded) loaded.reset(new Loaded(std::move(image), std::move(entry)));
    return loaded;
  }

  // Held by who looks at a function's attributes and changes them: all kernels of this image and
  // entry have the same function on a GPU.
  std::mutex attributes;

  // The function for a context, which is the current one, or a message.
  const char* Find(const Driver& cuda, const std::string& shown, Handle context, Handle* function) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Handle& known = functions_[context];
    if (known == nullptr) {
      // What loads may be forbidden to a thread whose stream is captured; not in this mode.
      int mode = driver::kRelaxed;
      cuda.ThreadExchangeStreamCaptureMode(&mode);
      const char* const error = Load(cuda, shown, &known);
      cuda.ThreadExchangeStreamCaptureMode(&mode);
      if (error != nullptr) return error;
    }
    *function = known;
    return nullptr;
  }

 private:
  Loaded(std::string image, std::string entry)
      : image_(std::move(image)), entry_(std::move(entry)) {}

  const char* Load(const Driver& cuda, const std::string& shown, Handle* function) {
    if (kernel_ == nullptr) {
      int options[] = {driver::kErrorLog, driver::kErrorLogBytes};
      void* values[] = {log_.data(), reinterpret_cast<void*>(log_.size())};
      const driver::Result status =
          cuda.LibraryLoadData(&library_, image_.c_str(), options, values, 2, nullptr, nullptr, 0);
      if (status != driver::kSuccess) return Refused(cuda, shown, status);
      // A driver that loads lazily looks at the code here for the first time.
      if (const auto missing = cuda.LibraryGetKernel(&kernel_, library_, entry_.c_str());
          missing != driver::kSuccess) {
        kernel_ = nullptr;
        cuda.LibraryUnload(library_);
        if (missing != driver::kNotFound) return Refused(cuda, shown, missing);
        return Message("kernel_call: " + shown + " has no entry '" + entry_ +
                       "': " + NameOf(cuda, missing));
      }
    }
    const driver::Result status = cuda.KernelGetFunction(function, kernel_);
    if (status == driver::kSuccess) return nullptr;
    *function = nullptr;
    return Message("kernel_call: " + shown +
                   " does not load for this GPU: " + NameOf(cuda, status));
  }

  const char* Refused(const Driver& cuda, const std::string& shown, driver::Result status) const {
    std::string said = "kernel_call: the driver does not load " + shown + ": ";
    said += NameOf(cuda, status);
    if (status == driver::kUnsupportedPtx) said += VersionOf(image_);
    if (log_[0] != '\0') said += std::string("\n") + log_.data();
    return Message(said);
  }

  const std::string image_, entry_;
  std::array<char, 4096> log_{};  // the driver may write to it later, when it loads lazily
  std::mutex mutex_;
  Handle library_ = nullptr, kernel_ = nullptr;
  std::map<Handle, Handle> functions_;  // by context
};

std::string Shown(const uint32_t (&sizes)[3]) {
  return "(" + std::to_string(sizes[0]) + ", " + std::to_string(sizes[1]) + ", " +
         std::to_string(sizes[2]) + ")";
}

}  // namespace
}  // namespace kvblock

struct kvblock_kernel {
  // A context that it is prepared for. Launches look here without a lock.
  struct Place {
    std::atomic<kvblock::driver::Handle> context{nullptr};
    kvblock::driver::Handle function = nullptr;
  };
  std::shared_ptr<kvblock::Loaded> loaded;
  std::string shown;
  std::mutex mutex;
  std::array<Place, 16> places;
};

namespace kvblock {
namespace {

// What is wrong with a launch that the driver refused, as far as that can be found out.
const char* Explain(const Driver& cuda, const kvblock_kernel& kernel, Handle function,
                    const kvblock_kernel_shape& shape, driver::Result status) {
  std::string said = "kernel_call: the driver refuses to launch " + kernel.shown + ": " +
                     NameOf(cuda, status) + "; grid " + Shown(shape.grid) + ", block " +
                     Shown(shape.block);
  if (shape.cluster[0] != 0) said += ", cluster " + Shown(shape.cluster);
  said += ", " + std::to_string(shape.shared_bytes) + " bytes of dynamic shared memory";
  int most = 0;
  const uint64_t threads = uint64_t{shape.block[0]} * shape.block[1] * shape.block[2];
  if (cuda.FuncGetAttribute(&most, driver::kMaxThreads, function) == driver::kSuccess &&
      threads > static_cast<uint64_t>(most)) {
    said += "; with its registers it can have blocks of " + std::to_string(most) +
            " threads, not " + std::to_string(threads);
  }
  return Message(said);
}

// Dynamic shared memory beyond 48 KiB is to be asked for.
const char* AllowShared(const Driver& cuda, const kvblock_kernel& kernel, Handle function,
                        const kvblock_kernel_shape& shape) {
  const std::lock_guard<std::mutex> lock(kernel.loaded->attributes);
  int allowed = 0;
  cuda.FuncGetAttribute(&allowed, driver::kMaxDynamicShared, function);
  if (shape.shared_bytes > static_cast<uint32_t>(allowed)) {
    int device = 0, most = 0, fixed = 0;
    cuda.CtxGetDevice(&device);
    cuda.DeviceGetAttribute(&most, driver::kMaxSharedOfBlock, device);
    cuda.FuncGetAttribute(&fixed, driver::kStaticShared, function);
    if (int64_t{shape.shared_bytes} + fixed > most) {
      return Message("kernel_call: " + kernel.shown + " asks for " +
                     std::to_string(shape.shared_bytes) + " bytes of dynamic and " +
                     std::to_string(fixed) + " of static shared memory; a block can have " +
                     std::to_string(most) + " on this GPU");
    }
    const auto status = cuda.FuncSetAttribute(function, driver::kMaxDynamicShared,
                                              static_cast<int>(shape.shared_bytes));
    if (status != driver::kSuccess) return Explain(cuda, kernel, function, shape, status);
  }
  const uint64_t blocks = uint64_t{shape.cluster[0]} * shape.cluster[1] * shape.cluster[2];
  if (blocks > 8) cuda.FuncSetAttribute(function, driver::kNonPortableCluster, 1);
  return nullptr;
}

// The function for the current context, which is prepared now unless it was before.
const char* Ready(const Driver& cuda, kvblock_kernel* kernel, const kvblock_kernel_shape& shape,
                  Handle* function) {
  Handle context = nullptr;
  if (cuda.CtxGetCurrent(&context) != driver::kSuccess || context == nullptr) {
    return Message("kernel_call: " + kernel->shown + ": no CUDA context is current");
  }
  for (const auto& place : kernel->places) {
    if (place.context.load(std::memory_order_acquire) != context) continue;
    *function = place.function;
    return nullptr;
  }
  const std::lock_guard<std::mutex> lock(kernel->mutex);
  if (const char* error = kernel->loaded->Find(cuda, kernel->shown, context, function))
    return error;
  if (const char* error = AllowShared(cuda, *kernel, *function, shape)) return error;
  for (auto& place : kernel->places) {
    const Handle taken = place.context.load(std::memory_order_relaxed);
    if (taken == context) return nullptr;
    if (taken != nullptr) continue;
    place.function = *function;
    place.context.store(context, std::memory_order_release);
    return nullptr;
  }
  return nullptr;  // more contexts than places: it is found again each time
}

}  // namespace
}  // namespace kvblock

using kvblock::Message;
namespace cu = kvblock::driver;

extern "C" kvblock_kernel* kvblock_kernel_create(const void* image, size_t bytes, const char* entry,
                                                 const char* shown) {
  std::string copied(static_cast<const char*>(image), bytes);
  auto* const kernel = new kvblock_kernel;
  kernel->loaded = kvblock::Loaded::Of(std::move(copied), entry);
  kernel->shown = shown;
  return kernel;
}

extern "C" void kvblock_kernel_destroy(kvblock_kernel* kernel) { delete kernel; }

extern "C" const char* kvblock_kernel_prepare(kvblock_kernel* kernel,
                                              const kvblock_kernel_shape* shape) {
  cu::Handle function = nullptr;
  const char* error = nullptr;
  const cu::Driver* const cuda = cu::Find(&error);
  return cuda == nullptr ? error : kvblock::Ready(*cuda, kernel, *shape, &function);
}

extern "C" const char* kvblock_kernel_launch(kvblock_kernel* kernel,
                                             const kvblock_kernel_shape* shape, void** parameters,
                                             void* stream) {
  const char* error = nullptr;
  const cu::Driver* const cuda = cu::Find(&error);
  if (cuda == nullptr) return error;
  cu::Handle function = nullptr;
  if ((error = kvblock::Ready(*cuda, kernel, *shape, &function))) return error;
  cu::LaunchAttribute attributes[2] = {};
  cu::LaunchConfig config{};
  std::memcpy(config.grid, shape->grid, sizeof(config.grid));
  std::memcpy(config.block, shape->block, sizeof(config.block));
  config.shared_bytes = shape->shared_bytes;
  config.stream = stream;
  config.attributes = attributes;
  if (shape->cluster[0] != 0) {
    cu::LaunchAttribute& cluster = attributes[config.count++];
    cluster.id = cu::kCluster;
    cluster.value.cluster = {shape->cluster[0], shape->cluster[1], shape->cluster[2]};
  }
  if (shape->cooperative != 0) {
    cu::LaunchAttribute& cooperative = attributes[config.count++];
    cooperative.id = cu::kCooperative;
    cooperative.value.cooperative = 1;
  }
  const cu::Result status = cuda->LaunchKernelEx(&config, function, parameters, nullptr);
  if (status == cu::kSuccess) return nullptr;
  return kvblock::Explain(*cuda, *kernel, function, *shape, status);
}

extern "C" const char* kvblock_kernel_wait(kvblock_kernel* kernel, void* stream) {
  const char* error = nullptr;
  const cu::Driver* const cuda = cu::Find(&error);
  if (cuda == nullptr) return error;
  int capturing = cu::kNoCapture;
  // A kernel that has failed by now is told of here.
  cu::Result status = cuda->StreamIsCapturing(stream, &capturing);
  if (status == cu::kSuccess && capturing != cu::kNoCapture) return nullptr;
  if (status == cu::kSuccess) status = cuda->StreamSynchronize(stream);
  if (status == cu::kSuccess) return nullptr;
  return Message("kernel_call: " + kernel->shown +
                 " failed as it ran: " + kvblock::NameOf(*cuda, status));
}

extern "C" const char* kvblock_kernel_encode(kvblock_kernel* kernel, const kvblock_kernel_map* map,
                                             void* address, void* to_128_bytes) {
  const char* error = nullptr;
  const cu::Driver* const cuda = cu::Find(&error);
  if (cuda == nullptr) return error;
  const cu::Result status = cuda->TensorMapEncodeTiled(
      to_128_bytes, map->dtype, static_cast<unsigned>(map->rank), address, map->sizes, map->strides,
      map->box, map->steps, map->interleave, map->swizzle, map->l2_promotion, map->fill);
  if (status == cu::kSuccess) return nullptr;
  return Message("kernel_call: the driver refuses a tensor map of " + kernel->shown + ": " +
                 kvblock::NameOf(*cuda, status));
}

extern "C" const char* kvblock_kernel_zero(void* memory, size_t bytes, void* stream) {
  const char* error = nullptr;
  const cu::Driver* const cuda = cu::Find(&error);
  if (cuda == nullptr) return error;
  if (bytes == 0) return nullptr;
  const auto at = reinterpret_cast<cu::Address>(memory);
  const cu::Result status = cuda->MemsetD8Async(at, 0, bytes, stream);
  if (status == cu::kSuccess) return nullptr;
  return Message("kernel_call: memory is not zeroed: " + kvblock::NameOf(*cuda, status));
}

extern "C" const char* kvblock_kernel_copy(void* to, const void* from, size_t bytes, void* stream) {
  const char* error = nullptr;
  const cu::Driver* const cuda = cu::Find(&error);
  if (cuda == nullptr) return error;
  if (bytes == 0 || to == from) return nullptr;
  const cu::Result status = cuda->MemcpyDtoDAsync(
      reinterpret_cast<cu::Address>(to), reinterpret_cast<cu::Address>(from), bytes, stream);
  if (status == cu::kSuccess) return nullptr;
  return Message("kernel_call: memory is not copied: " + kvblock::NameOf(*cuda, status));
}
