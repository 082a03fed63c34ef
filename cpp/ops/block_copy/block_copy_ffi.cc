// block_copy, the middle floor: decode the buffers and attributes of one XLA call into a
// kvblock_copy and hand it to a launcher, which checks every address against its buffer.
//
// Operands: num_src sources, then (in_place) num_dst destinations, then whichever of source ids,
// destination ids, source start and destination start `scalars` names (bits 0 to 3), all int32.
// Results: num_dst destinations; with in_place they alias the operands.
#include "ops/block_copy/block_copy_ffi.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kvblock/block_copy.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using Numbers = ffi::Span<const int64_t>;
constexpr int64_t kSideNumbers = 8;  // the numbers of a side that come before its strides

struct Decoded {
  kvblock_copy copy{};
  std::vector<void*> src, dst;
};

ffi::Error Invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("kvblock_copy: " + what);
}

// Mirrors `Side.numbers` in jax_kvblock/blocks/plan.py.
ffi::Error DecodeSide(Numbers numbers, int64_t rank, kvblock_side* side) {
  if (static_cast<int64_t>(numbers.size()) != kSideNumbers + 2 * rank) {
    return Invalid("a side has 8 numbers and two strides a dim");
  }
  side->offset = numbers[0];
  side->id_limit = numbers[1];
  side->id_inner = numbers[2];
  side->id_outer_stride = numbers[3];
  side->id_inner_stride = numbers[4];
  side->start_limit = numbers[5];
  side->start_stride = numbers[6];
  side->start_table_stride = numbers[7];
  for (int64_t k = 0; k < rank; ++k) {
    side->strides[k] = numbers[kSideNumbers + k];
    side->table_strides[k] = numbers[kSideNumbers + rank + k];
  }
  return ffi::Error::Success();
}

ffi::Error DecodeScalar(const ffi::RemainingArgs& args, size_t index, int64_t count,
                        const int32_t** out) {
  auto buffer = args.get<ffi::AnyBuffer>(index);
  if (buffer.has_error()) return buffer.error();
  if (buffer->element_type() != ffi::DataType::S32) return Invalid("ids and starts are int32");
  if (static_cast<int64_t>(buffer->element_count()) != count) {
    return Invalid("expected " + std::to_string(count) + " ids, got " +
                   std::to_string(buffer->element_count()));
  }
  *out = static_cast<const int32_t*>(buffer->untyped_data());
  return ffi::Error::Success();
}

void AddBuffer(void* data, size_t bytes, std::vector<void*>* table, int64_t* smallest) {
  *smallest = table->empty() ? static_cast<int64_t>(bytes)
                             : std::min(*smallest, static_cast<int64_t>(bytes));
  table->push_back(data);
}

ffi::Error Decode(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, int64_t num_src,
                  bool in_place, int64_t scalars, int64_t unit, Numbers dims, Numbers src,
                  Numbers dst, Decoded* out) {
  kvblock_copy& copy = out->copy;
  copy.rank = static_cast<int64_t>(dims.size());
  if (copy.rank < 1 || copy.rank > KVBLOCK_MAX_RANK) return Invalid("rank must be 1 to 8");
  std::copy(dims.begin(), dims.end(), copy.dims);
  copy.unit = unit;
  if (ffi::Error error = DecodeSide(src, copy.rank, &copy.src); error.failure()) return error;
  if (ffi::Error error = DecodeSide(dst, copy.rank, &copy.dst); error.failure()) return error;

  const int64_t num_dst = static_cast<int64_t>(rets.size());
  int64_t num_scalars = 0;
  for (int bit = 0; bit < 4; ++bit) num_scalars += (scalars >> bit) & 1;
  if (scalars < 0 || scalars > 15 || num_src < 1 || num_src > static_cast<int64_t>(args.size()) ||
      num_dst < 1 ||
      static_cast<int64_t>(args.size()) != num_src + (in_place ? num_dst : 0) + num_scalars) {
    return Invalid("the number of operands does not fit num_src, in_place and scalars");
  }
  for (int64_t i = 0; i < num_src; ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    AddBuffer(buffer->untyped_data(), buffer->size_bytes(), &out->src, &copy.src.buffer_bytes);
  }
  for (int64_t i = 0; i < num_dst; ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    AddBuffer((*buffer)->untyped_data(), (*buffer)->size_bytes(), &out->dst,
              &copy.dst.buffer_bytes);
  }
  copy.src.buffers = out->src.data();
  copy.dst.buffers = out->dst.data();
  copy.src.num_buffers = num_src;
  copy.dst.num_buffers = num_dst;

  size_t next = static_cast<size_t>(args.size()) - num_scalars;
  const int32_t** targets[] = {&copy.src.ids, &copy.dst.ids, &copy.src.start, &copy.dst.start};
  for (int bit = 0; bit < 4; ++bit) {
    if (((scalars >> bit) & 1) == 0) continue;
    const int64_t count = bit < 2 ? copy.dims[0] : 1;
    if (ffi::Error error = DecodeScalar(args, next++, count, targets[bit]); error.failure()) {
      return error;
    }
  }
  return ffi::Error::Success();
}

ffi::Error ToError(const char* message) {
  return message == nullptr ? ffi::Error::Success() : Invalid(message);
}

// In place, results are the operands that they update. Where XLA gives one other memory all the
// same, as where a loop stacks results, it begins as a copy: copy(to, from, bytes) tells what is
// wrong, or NULL.
template <typename Copy>
ffi::Error BeginInPlace(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                        const Decoded& d, bool in_place, const Copy& copy) {
  if (!in_place) return ffi::Error::Success();
  for (size_t i = 0; i < d.dst.size(); ++i) {
    auto operand = args.get<ffi::AnyBuffer>(d.src.size() + i);
    if (operand.has_error()) return operand.error();
    auto result = rets.get<ffi::AnyBuffer>(i);
    if (result.has_error()) return result.error();
    const auto bytes = static_cast<int64_t>(operand->size_bytes());
    if (bytes != static_cast<int64_t>((*result)->size_bytes())) {
      return Invalid("a result in place has another size than its operand");
    }
    const void* const from = operand->untyped_data();
    if (from == d.dst[i]) continue;
    if (const char* message = copy(d.dst[i], from, bytes)) return Invalid(message);
  }
  return ffi::Error::Success();
}

ffi::Error BeginInPlaceCuda(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                            const Decoded& d, bool in_place, void* stream) {
  return BeginInPlace(args, rets, d, in_place, [stream](void* to, const void* from, int64_t bytes) {
    return kvblock_copy_bytes_cuda(to, from, bytes, stream);
  });
}

ffi::Error CopyCpu(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   int64_t num_src, bool in_place, int64_t scalars, int64_t unit, Numbers dims,
                   Numbers src, Numbers dst) {
  Decoded d;
  ffi::Error error = Decode(args, rets, num_src, in_place, scalars, unit, dims, src, dst, &d);
  if (error.failure()) return error;
  error = BeginInPlace(args, rets, d, in_place, [](void* to, const void* from, int64_t bytes) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return static_cast<const char*>(nullptr);
  });
  if (error.failure()) return error;
  const kvblock_schedule schedule = [](void* context, kvblock_task task, void* data) {
    static_cast<ffi::ThreadPool*>(context)->Schedule([task, data] { task(data); });
  };
  return ToError(kvblock_copy_cpu(&d.copy, pool.num_threads(), schedule, &pool));
}

ffi::Error CopyCuda(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t num_src,
                    bool in_place, int64_t scalars, int64_t unit, Numbers dims, Numbers src,
                    Numbers dst) {
  Decoded d;
  ffi::Error error = Decode(args, rets, num_src, in_place, scalars, unit, dims, src, dst, &d);
  if (error.failure()) return error;
  error = BeginInPlaceCuda(args, rets, d, in_place, stream);
  if (error.failure()) return error;
  return ToError(kvblock_copy_cuda(&d.copy, KVBLOCK_KERNEL, stream));
}

ffi::Error CopyCudaRuns(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        int64_t num_src, bool in_place, int64_t scalars, int64_t unit, Numbers dims,
                        Numbers src, Numbers dst, int64_t backend) {
  Decoded d;
  ffi::Error error = Decode(args, rets, num_src, in_place, scalars, unit, dims, src, dst, &d);
  if (error.failure()) return error;
  if (backend != KVBLOCK_BATCH && backend != KVBLOCK_ASYNC) return Invalid("unknown backend");
  error = BeginInPlaceCuda(args, rets, d, in_place, stream);
  if (error.failure()) return error;
  return ToError(kvblock_copy_cuda(&d.copy, static_cast<kvblock_backend>(backend), stream));
}

constexpr auto Attributes = [](auto&& binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<int64_t>("num_src")
      .template Attr<bool>("in_place")
      .template Attr<int64_t>("scalars")
      .template Attr<int64_t>("unit")
      .template Attr<Numbers>("dims")
      .template Attr<Numbers>("src")
      .template Attr<Numbers>("dst");
};

using Stream = ffi::PlatformStream<void*>;

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvblockCopyCpu, CopyCpu,
                              Attributes(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(KvblockCopyCuda, CopyCuda, Attributes(ffi::Ffi::Bind().Ctx<Stream>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(KvblockCopyCudaRuns, CopyCudaRuns,
                              Attributes(ffi::Ffi::Bind().Ctx<Stream>()).Attr<int64_t>("backend"));
