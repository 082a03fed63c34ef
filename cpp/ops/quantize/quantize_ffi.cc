// quantize, the middle floor: decode the buffers and attributes of one XLA call into a
// kvblock_quantize, check that every buffer has the size that the call implies, and hand it to the
// launcher.
//
// Operands: the arrays, [batch, rows, heads, dim], and then lengths, int32 [batch]. Results: of
// each array its codes, its scales and, where it is centred, its mean; the workspace comes last.
// Mirrors jax_kvblock/fp8/cuda.py.
#include "ops/quantize/quantize_ffi.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "kvblock/quantize.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// The numbers of the attribute `arrays` for each of them, in their order.
enum ArrayNumber {
  kShared,   // kvblock_quantize_shared
  kCentred,  // 1: the mean is taken away
  kTurns,
  kLengths,  // which operand of lengths, or -1
  kIntegers,
  kNumArrayNumbers,
};

using Numbers = ffi::Span<const int64_t>;
using Shape = std::initializer_list<int64_t>;

ffi::Error Invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("kvblock_quantize: " + what);
}

bool Has(const ffi::AnyBuffer& buffer, ffi::DataType type, Shape shape) {
  const auto dims = buffer.dimensions();
  return buffer.element_type() == type &&
         std::equal(shape.begin(), shape.end(), dims.begin(), dims.end());
}

// Rows of [batch, rows, heads, dim] that follow each other.
void SetStrides(int64_t element, int64_t rows, int64_t heads, int64_t dim, int64_t* batch_stride,
                int64_t* row_stride, int64_t* head_stride) {
  *head_stride = dim * element;
  *row_stride = heads * *head_stride;
  *batch_stride = rows * *row_stride;
}

ffi::Error Quantize(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    Numbers arrays) {
  const size_t count = arrays.size() / kNumArrayNumbers;
  if (count < 1 || count > KVBLOCK_QUANTIZE_MAX_ARRAYS || arrays.size() % kNumArrayNumbers != 0) {
    return Invalid("the attributes do not fit");
  }
  kvblock_quantize call{};
  call.num_arrays = static_cast<int32_t>(count);
  size_t next_result = 0;
  const auto result = [&]() {
    auto buffer = rets.get<ffi::AnyBuffer>(next_result++);
    return **buffer;
  };
  size_t means = 0, lengths = 0;
  for (size_t i = 0; i < count; ++i) {
    const int64_t* const numbers = arrays.begin() + i * kNumArrayNumbers;
    means += numbers[kCentred] != 0;
    if (numbers[kLengths] < 0) continue;
    lengths = std::max(lengths, static_cast<size_t>(numbers[kLengths]) + 1);
  }
  if (args.size() != count + lengths || rets.size() != 2 * count + means + 1) {
    return Invalid("there must be as many operands and results as the attributes say");
  }

  const ffi::AnyBuffer first = *args.get<ffi::AnyBuffer>(0);
  const ffi::DataType type = first.element_type();
  if (type != ffi::DataType::BF16 && type != ffi::DataType::F16) {
    return Invalid("arrays must be bfloat16 or float16");
  }
  call.dtype = type == ffi::DataType::BF16 ? KVBLOCK_QUANTIZE_BF16 : KVBLOCK_QUANTIZE_F16;
  for (size_t i = 0; i < count; ++i) {
    const int64_t* const numbers = arrays.begin() + i * kNumArrayNumbers;
    const std::string name = "array " + std::to_string(i);
    kvblock_quantize_array& a = call.arrays[i];
    const ffi::AnyBuffer x = *args.get<ffi::AnyBuffer>(i);
    const auto dims = x.dimensions();
    if (dims.size() != 4 || x.element_type() != type) {
      return Invalid(name + " must be [batch, rows, heads, dim], of one dtype with the others");
    }
    if (i == 0) call.batch = dims[0];
    if (dims[0] != call.batch) return Invalid(name + " must have the batch of the first one");
    if (dims[2] > INT32_MAX || dims[3] > INT32_MAX) return Invalid(name + " is too large");
    if (numbers[kShared] < 0 || numbers[kShared] > KVBLOCK_QUANTIZE_TENSOR) {
      return Invalid("the attributes do not fit");
    }
    a.rows = dims[1];
    a.heads = static_cast<int32_t>(dims[2]);
    a.dim = static_cast<int32_t>(dims[3]);
    a.shared = static_cast<int32_t>(numbers[kShared]);
    a.turns = numbers[kTurns] != 0;
    a.integers = numbers[kIntegers] != 0;
    a.x = x.untyped_data();
    SetStrides(2, a.rows, a.heads, a.dim, &a.batch_stride, &a.row_stride, &a.head_stride);
    SetStrides(1, a.rows, a.heads, a.dim, &a.out_batch_stride, &a.out_row_stride,
               &a.out_head_stride);
    if (numbers[kLengths] >= 0) {
      const auto which = count + static_cast<size_t>(numbers[kLengths]);
      const ffi::AnyBuffer lens = *args.get<ffi::AnyBuffer>(which);
      if (!Has(lens, ffi::DataType::S32, {call.batch})) {
        return Invalid("lengths must be int32 [batch]");
      }
      a.lens = static_cast<const int32_t*>(lens.untyped_data());
    }
    const ffi::AnyBuffer out = result(), scales = result();
    const int64_t rows = KVBLOCK_QUANTIZE_ROWS, blocks = (a.rows + rows - 1) / rows;
    const int64_t shares = a.shared == KVBLOCK_QUANTIZE_BLOCK ? std::max<int64_t>(blocks, 1) : 1;
    const auto codes = a.integers ? ffi::DataType::S8 : ffi::DataType::F8E4M3FN;
    if (!Has(out, codes, {call.batch, a.rows, a.heads, a.dim}) ||
        !Has(scales, ffi::DataType::F32, {call.batch, a.heads, shares})) {
      return Invalid("the codes or scales of " + name + " have another shape or dtype");
    }
    a.out = out.untyped_data();
    a.scales = static_cast<float*>(scales.untyped_data());
    if (numbers[kCentred] == 0) continue;
    const ffi::AnyBuffer mean = result();
    if (!Has(mean, ffi::DataType::F32, {call.batch, a.heads, a.dim})) {
      return Invalid("the mean of " + name + " has another shape or dtype");
    }
    a.mean = static_cast<float*>(mean.untyped_data());
  }
  const ffi::AnyBuffer workspace = result();
  call.workspace = workspace.untyped_data();
  call.workspace_bytes = static_cast<int64_t>(workspace.size_bytes());
  const char* const message = kvblock_quantize_cuda(&call, stream);
  return message == nullptr ? ffi::Error::Success() : Invalid(message);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvblockQuantize, Quantize,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<Numbers>("arrays"),
                              {ffi::Traits::kCmdBufferCompatible});
