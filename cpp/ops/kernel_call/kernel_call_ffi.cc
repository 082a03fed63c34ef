// kernel_call, the middle floor: what a call has is decoded once, when XLA instantiates it; the
// kernel is loaded for a GPU when it prepares there; executing gathers addresses and launches.
//
// Loading is in prepare since it waits for kernels of other GPUs that run, and these may wait for
// this one. Where XLA did not prepare, executing loads.
//
// Mirrors jax_kvblock/kernels/cuda.py.
#include "ops/kernel_call/kernel_call_ffi.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvblock/kernel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using Numbers = ffi::Span<const int64_t>;

// Of the attribute `shape`.
enum ShapeNumber {
  kGrid,
  kBlock = 3,
  kCluster = 6,
  kShared = 9,
  kCooperative,
  kMembers,
  kNumShapeNumbers,
};

// Of the attribute `parameters`, three numbers for each of the kernel's: which kind, and
enum ParameterKind : int64_t {
  kBuffer,     // an operand or result, counted through: its number
  kValue,      // bytes of `values`: where, how many
  kMap,        // a tensor map of a buffer: where it begins in `maps`, the buffer's number
  kAddresses,  // of several buffers, one after the other: where in `addresses`, how many
};
constexpr int kParameterNumbers = 3;

// Of a tensor map in `maps`: dtype, rank, 5 sizes, 4 strides, 5 of the box, 5 steps, interleave,
// swizzle, L2 promotion, fill.
constexpr int kMapNumbers = 25;

struct Parameter {
  ParameterKind kind;
  int64_t first, second;
};

struct KernelState {
  static ffi::TypeId id;

  ~KernelState() { kvblock_kernel_destroy(kernel); }

  kvblock_kernel* kernel = nullptr;
  kvblock_kernel_shape shape{};
  int64_t members = 1;  // launches, one after the other
  std::vector<Parameter> parameters;
  std::string values;
  std::vector<kvblock_kernel_map> maps;
  std::vector<int64_t> addresses;  // numbers of buffers
  std::vector<int64_t> strides;    // of each buffer, from a member to the next, in bytes
  std::vector<int64_t> zeroed;     // results
  std::vector<int64_t> aliased;    // operand, result, operand, …
};

ffi::TypeId KernelState::id = {};

ffi::Error Invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("kernel_call: " + what);
}
ffi::Error ResultOf(const char* message) {
  return message == nullptr ? ffi::Error::Success() : ffi::Error::InvalidArgument(message);
}

kvblock_kernel_map MapOf(const int64_t* numbers) {
  kvblock_kernel_map map{};
  const auto take = [&](auto* to) {
    *to = static_cast<std::remove_reference_t<decltype(*to)>>(*numbers++);
  };
  take(&map.dtype);
  take(&map.rank);
  for (auto& size : map.sizes) take(&size);
  for (auto& stride : map.strides) take(&stride);
  for (auto& size : map.box) take(&size);
  for (auto& step : map.steps) take(&step);
  take(&map.interleave);
  take(&map.swizzle);
  take(&map.l2_promotion);
  take(&map.fill);
  return map;
}

// Whether the attributes name nothing beyond values, maps and buffers.
bool Fits(const KernelState& state) {
  const auto buffers = static_cast<int64_t>(state.strides.size());
  const auto is_buffer = [&](int64_t n) { return n >= 0 && n < buffers; };
  const auto within = [](const Parameter& p, size_t size) {
    const auto all = static_cast<int64_t>(size);
    return p.first >= 0 && p.second >= 0 && p.first <= all && p.second <= all - p.first;
  };
  for (const Parameter& p : state.parameters) {
    switch (p.kind) {
      case kBuffer:
        if (!is_buffer(p.first)) return false;
        break;
      case kValue:
        if (!within(p, state.values.size())) return false;
        break;
      case kMap:
        if (p.first < 0 || p.first >= static_cast<int64_t>(state.maps.size()) ||
            !is_buffer(p.second)) {
          return false;
        }
        break;
      case kAddresses:
        if (!within(p, state.addresses.size())) return false;
        break;
      default: return false;
    }
  }
  for (const int64_t buffer : state.addresses) {
    if (!is_buffer(buffer)) return false;
  }
  return state.aliased.size() % 2 == 0 && state.members >= 1;
}

ffi::ErrorOr<std::unique_ptr<KernelState>> Instantiate(
    std::string_view image, std::string_view entry, std::string_view shown, Numbers shape,
    Numbers parameters, std::string_view values, Numbers maps, Numbers addresses, Numbers strides,
    Numbers zeroed, Numbers aliased) {
  auto state = std::make_unique<KernelState>();
  if (shape.size() != kNumShapeNumbers || parameters.size() % kParameterNumbers != 0 ||
      maps.size() % kMapNumbers != 0) {
    return ffi::Unexpected(Invalid("the attributes do not fit"));
  }
  for (const int64_t number : shape) {
    if (number < 0 || number > UINT32_MAX) {
      return ffi::Unexpected(Invalid("the attributes do not fit"));
    }
  }
  for (int i = 0; i < 3; ++i) {
    state->shape.grid[i] = static_cast<uint32_t>(shape[kGrid + i]);
    state->shape.block[i] = static_cast<uint32_t>(shape[kBlock + i]);
    state->shape.cluster[i] = static_cast<uint32_t>(shape[kCluster + i]);
  }
  state->shape.shared_bytes = static_cast<uint32_t>(shape[kShared]);
  state->shape.cooperative = shape[kCooperative] != 0;
  state->members = shape[kMembers];
  for (size_t i = 0; i < parameters.size(); i += kParameterNumbers) {
    state->parameters.push_back(
        {static_cast<ParameterKind>(parameters[i]), parameters[i + 1], parameters[i + 2]});
  }
  state->values = values;
  for (size_t i = 0; i < maps.size(); i += kMapNumbers) {
    state->maps.push_back(MapOf(maps.begin() + i));
  }
  state->addresses.assign(addresses.begin(), addresses.end());
  state->strides.assign(strides.begin(), strides.end());
  state->zeroed.assign(zeroed.begin(), zeroed.end());
  state->aliased.assign(aliased.begin(), aliased.end());
  if (!Fits(*state)) return ffi::Unexpected(Invalid("the attributes do not fit"));
  state->kernel = kvblock_kernel_create(image.data(), image.size(), std::string(entry).c_str(),
                                        std::string(shown).c_str());
  return state;
}

ffi::Error Prepare(KernelState* state, ffi::RemainingArgs, ffi::RemainingRets) {
  return ResultOf(kvblock_kernel_prepare(state->kernel, &state->shape));
}

// The operands' addresses, and the results' behind them.
ffi::Error Gather(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                  std::vector<char*>* buffers, std::vector<int64_t>* bytes) {
  for (size_t i = 0; i < args.size(); ++i) {
    const auto buffer = args.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    buffers->push_back(static_cast<char*>(buffer->untyped_data()));
    bytes->push_back(static_cast<int64_t>(buffer->size_bytes()));
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    buffers->push_back(static_cast<char*>((*buffer)->untyped_data()));
    bytes->push_back(static_cast<int64_t>((*buffer)->size_bytes()));
  }
  return ffi::Error::Success();
}

// Whether `zeroed` and `aliased` name operands and results that there are, each of a pair as large
// as the other.
bool NamesBuffers(const KernelState& state, size_t num_args, const std::vector<int64_t>& bytes) {
  const auto operands = static_cast<int64_t>(num_args);
  const auto results = static_cast<int64_t>(bytes.size()) - operands;
  const auto is_result = [&](int64_t n) { return n >= 0 && n < results; };
  for (const int64_t result : state.zeroed) {
    if (!is_result(result)) return false;
  }
  for (size_t i = 0; i < state.aliased.size(); i += 2) {
    const int64_t from = state.aliased[i], to = state.aliased[i + 1];
    if (from < 0 || from >= operands || !is_result(to)) return false;
    if (bytes[from] != bytes[operands + to]) return false;
  }
  return true;
}

// What the results hold before the kernel runs: zeros, or what the operands do that they stand for.
const char* Begin(const KernelState& state, size_t num_args, const std::vector<char*>& buffers,
                  const std::vector<int64_t>& bytes, void* stream) {
  for (const int64_t result : state.zeroed) {
    const size_t at = num_args + static_cast<size_t>(result);
    if (const char* error = kvblock_kernel_zero(buffers[at], bytes[at], stream)) return error;
  }
  for (size_t i = 0; i < state.aliased.size(); i += 2) {
    const auto from = static_cast<size_t>(state.aliased[i]);
    const size_t to = num_args + static_cast<size_t>(state.aliased[i + 1]);
    if (const char* error = kvblock_kernel_copy(buffers[to], buffers[from], bytes[to], stream)) {
      return error;
    }
  }
  return nullptr;
}

struct alignas(64) TensorMap {
  char bytes[128];
};

ffi::Error Execute(void* stream, KernelState* state, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  std::vector<char*> buffers;
  std::vector<int64_t> bytes;
  if (args.size() + rets.size() != state->strides.size()) {
    return Invalid("the buffers are others than the attributes say");
  }
  buffers.reserve(state->strides.size());
  bytes.reserve(state->strides.size());
  if (ffi::Error error = Gather(args, rets, &buffers, &bytes); error.failure()) return error;
  if (!NamesBuffers(*state, args.size(), bytes)) {
    return Invalid("the buffers are others than the attributes say");
  }
  if (const char* error = Begin(*state, args.size(), buffers, bytes, stream)) {
    return ResultOf(error);
  }
  std::vector<TensorMap> maps(state->maps.size());
  std::vector<char*> addresses(state->addresses.size());
  std::vector<void*> parameters(state->parameters.size());
  for (int64_t member = 0; member < state->members; ++member) {
    for (size_t i = 0; i < addresses.size(); ++i) addresses[i] = buffers[state->addresses[i]];
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Parameter& p = state->parameters[i];
      if (p.kind == kBuffer) {
        parameters[i] = &buffers[p.first];
      } else if (p.kind == kValue) {
        parameters[i] = state->values.data() + p.first;
      } else if (p.kind == kAddresses) {
        parameters[i] = addresses.data() + p.first;
      } else {
        TensorMap& map = maps[p.first];
        if (const char* error = kvblock_kernel_encode(state->kernel, &state->maps[p.first],
                                                      buffers[p.second], map.bytes)) {
          return ResultOf(error);
        }
        parameters[i] = map.bytes;
      }
    }
    if (const char* error =
            kvblock_kernel_launch(state->kernel, &state->shape, parameters.data(), stream)) {
      return ResultOf(error);
    }
    for (size_t i = 0; i < buffers.size(); ++i) buffers[i] += state->strides[i];
  }
  return ffi::Error::Success();
}

ffi::Error ExecuteAndWait(void* stream, KernelState* state, ffi::RemainingArgs args,
                          ffi::RemainingRets rets) {
  if (ffi::Error error = Execute(stream, state, args, rets); error.failure()) return error;
  return ResultOf(kvblock_kernel_wait(state->kernel, stream));
}

}  // namespace

namespace kvblock {

XLA_FFI_TypeId* KernelStateId() { return &KernelState::id; }

const XLA_FFI_TypeInfo* KernelStateInfo() {
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<KernelState>();
  return &info;
}

}  // namespace kvblock

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvblockKernelInstantiate, Instantiate,
                              ffi::Ffi::BindInstantiate()
                                  .Attr<std::string_view>("image")
                                  .Attr<std::string_view>("entry")
                                  .Attr<std::string_view>("shown")
                                  .Attr<Numbers>("shape")
                                  .Attr<Numbers>("parameters")
                                  .Attr<std::string_view>("values")
                                  .Attr<Numbers>("maps")
                                  .Attr<Numbers>("addresses")
                                  .Attr<Numbers>("strides")
                                  .Attr<Numbers>("zeroed")
                                  .Attr<Numbers>("aliased"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    KvblockKernelPrepare, Prepare,
    ffi::Ffi::BindPrepare().Ctx<ffi::State<KernelState>>().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvblockKernelExecute, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Ctx<ffi::State<KernelState>>()
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvblockKernelExecuteAndWait, ExecuteAndWait,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Ctx<ffi::State<KernelState>>()
                                  .RemainingArgs()
                                  .RemainingRets());
