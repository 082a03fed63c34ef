// A CUDA driver that runs kernels on the CPU: libcuda.so.1 as far as launching needs it. What is
// loaded and launched is what Python and the launcher made; in place of the code that was loaded
// runs the kernel's source, compiled as C++ (own_kernels.h), by its name. A parameter that the PTX
// loads from memory is loaded here, too: the text that was loaded tells.
#include "ops/kernel_call/driver.h"

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace driver = kvblock::driver;

namespace {

struct Function {
  std::string image, entry;
  int shared_limit = 48 * 1024;
};

// A launch, as a kernel that the emulator compiled asks about it (own_kernels.h).
struct OwnLaunch {
  unsigned grid[3], block[3], at[3], together, shared_bytes;
  const void* launch;
  void (*read)(const OwnLaunch*, int number, int bytes, char kind, void* to);
};
using RunOwn = void (*)(const OwnLaunch*);

struct Launch {
  const Function& function;
  void** parameters;

  bool Has(const std::string& text) const { return function.image.find(text) != std::string::npos; }
  // By value, or from memory as the PTX has it: of the grid's member, and of a narrower type.
  void Read(const OwnLaunch& at, int number, int bytes, char kind, void* to) const {
    const std::string n = std::to_string(number);
    const bool widened = Has("%kvblock_of" + n + ",");
    const Table table = FindTable();
    if (const auto found = table.find(number); found != table.end()) {
      const auto [place, axis] = found->second;
      const auto* const addresses = static_cast<const char**>(parameters[OthersBefore(table)]);
      const size_t block = axis == 0 ? 0 : at.at[axis - 'x'];
      return Take(addresses[place] + block * (widened ? 4 : bytes), widened, n, bytes, kind, to);
    }
    const int own_number = OthersBefore(table, number);
    if (!Has("%kvblock_at" + n + ",")) return void(std::memcpy(to, parameters[own_number], bytes));
    const char* from = *static_cast<const char**>(parameters[own_number]);
    const std::string own = "%kvblock_block" + n + ", %ctaid.";
    if (const size_t axis = function.image.find(own); axis != std::string::npos) {
      const char name = function.image[axis + own.size()];
      from += size_t{at.at[name - 'x']} * (widened ? 4 : bytes);
    }
    Take(from, widened, n, bytes, kind, to);
  }

  // Of the scalars whose addresses are one parameter, the last: by number their place, and the axis
  // whose blocks have a value each, or 0.
  using Table = std::map<int, std::pair<int, char>>;
  Table FindTable() const {
    const std::string begin = "/* kvblock_addresses: ";
    const size_t from = function.image.find(begin);
    if (from == std::string::npos) return {};
    const size_t to = function.image.find("*/", from);
    std::istringstream words(function.image.substr(from + begin.size(), to - from - begin.size()));
    Table table;
    for (std::string word; words >> word;) {
      const char last = word.back();
      const int place = static_cast<int>(table.size());
      table[std::stoi(word)] = {place, last >= 'x' ? last : '\0'};
    }
    return table;
  }
  // How many parameters there are in front of one that are not in the table; or of all that the
  // kernel has, which are those in front of the table: it is the last.
  static int OthersBefore(const Table& table, int number) {
    int others = number;
    for (const auto& entry : table) others -= entry.first < number;
    return others;
  }
  int OthersBefore(const Table& table) const {
    const size_t entry = function.image.find(".entry " + function.entry);
    const size_t end = function.image.find("kvblock_addresses[", entry);
    int others = 0;
    for (size_t at = function.image.find(".param", entry); at < end;
         at = function.image.find(".param", at + 1)) {
      ++others;
    }
    return others - 1;  // the table itself
  }

  void Take(const char* from, bool widened, const std::string& n, int bytes, char kind,
            void* to) const {
    if (!widened) return void(std::memcpy(to, from, bytes));
    const size_t use = function.image.find(", %kvblock_of" + n + ";");
    const std::string type = function.image.substr(function.image.rfind("cvt.", use), 12);
    if (kind == 'f') {
      *static_cast<double*>(to) = *reinterpret_cast<const float*>(from);
    } else if (type == "cvt.s64.s32 ") {
      *static_cast<int64_t*>(to) = *reinterpret_cast<const int32_t*>(from);
    } else {
      *static_cast<uint64_t*>(to) = *reinterpret_cast<const uint32_t*>(from);
    }
  }
};

void Read(const OwnLaunch* at, int number, int bytes, char kind, void* to) {
  static_cast<const Launch*>(at->launch)->Read(*at, number, bytes, kind, to);
}

struct State {
  std::mutex mutex;
  int context = 0;
  std::set<Function*> functions;
  // In blocks of any shape there is nothing to run of one that does nothing.
  std::map<std::string, RunOwn> kernels{{"nothing", [](const OwnLaunch*) {}}};
  int loads = 0, launches = 0, prepared = 0, fails_with = 0, fails_when_asked = 0;
  int milliseconds = 0;  // from looking at an attribute to telling it
  driver::LaunchConfig last{};
  std::vector<driver::LaunchAttribute> attributes;
};
State& Global() {
  static State& state = *new State;
  return state;
}

constexpr int kInvalidPtx = 218, kNotFound = driver::kNotFound, kInvalidValue = 1;

}  // namespace

extern "C" {

// ---- what tests ask and set ----------------------------------------------------------

void emulator_add_kernel(const char* entry, RunOwn run) { Global().kernels[entry] = run; }
int emulator_loads() { return Global().loads; }
int emulator_launches() { return Global().launches; }
void emulator_fail_with(int status) { Global().fails_with = status; }
void emulator_fail_when_asked(int status) { Global().fails_when_asked = status; }
void emulator_look_slowly(int milliseconds) { Global().milliseconds = milliseconds; }
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
  if (image.find(".version 98") != std::string::npos) return driver::kUnsupportedPtx;
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
  // Not before, as a driver that loads lazily.
  if (image.find(".version 99") != std::string::npos) return driver::kUnsupportedPtx;
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
  std::this_thread::sleep_for(std::chrono::milliseconds(Global().milliseconds));
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
  const auto kernel = state.kernels.find(own.entry);
  if (kernel == state.kernels.end()) return kNotFound;
  const Launch launch{own, parameters};
  OwnLaunch at{{}, {}, {}, 1, config->shared_bytes, &launch, Read};
  for (const auto& attribute : state.attributes) {  // all of a row of the grid run at once
    if (attribute.id == driver::kCooperative && attribute.value.cooperative) {
      at.together = config->grid[0];
    }
  }
  std::memcpy(at.grid, config->grid, 12);
  std::memcpy(at.block, config->block, 12);
  for (at.at[2] = 0; at.at[2] < at.grid[2]; ++at.at[2]) {
    for (at.at[1] = 0; at.at[1] < at.grid[1]; ++at.at[1]) {
      for (at.at[0] = 0; at.at[0] < at.grid[0]; at.at[0] += at.together) kernel->second(&at);
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
  return Global().fails_when_asked;
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
