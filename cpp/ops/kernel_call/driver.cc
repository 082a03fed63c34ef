#include "ops/kernel_call/driver.h"

#include <dlfcn.h>

#include <string>

#include "host/message.h"

// The tests have a driver of their own.
#ifndef KVBLOCK_DRIVER_LIBRARY
#define KVBLOCK_DRIVER_LIBRARY "libcuda.so.1"
#endif

namespace kvblock::driver {
namespace {

struct Found {
  Driver driver{};
  std::string error;
};

Found Look() {
  Found found;
  void* const library = dlopen(KVBLOCK_DRIVER_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    found.error =
        "kernel_call: no NVIDIA driver is here (" KVBLOCK_DRIVER_LIBRARY " does not load)";
    return found;
  }
#define KVBLOCK_DRIVER_LOOK(name, symbol, parameters)                                         \
  found.driver.name = reinterpret_cast<decltype(found.driver.name)>(dlsym(library, #symbol)); \
  if (found.driver.name == nullptr && found.error.empty()) {                                  \
    found.error = "kernel_call: the driver has no " #symbol "; CUDA 12 or newer is needed";   \
  }
  KVBLOCK_DRIVER_FUNCTIONS(KVBLOCK_DRIVER_LOOK)
#undef KVBLOCK_DRIVER_LOOK
  return found;
}

}  // namespace

const Driver* Find(const char** error) {
  static const Found& found = *new Found(Look());  // kernels may outlive static objects
  if (found.error.empty()) return &found.driver;
  *error = Message(found.error);
  return nullptr;
}

}  // namespace kvblock::driver
