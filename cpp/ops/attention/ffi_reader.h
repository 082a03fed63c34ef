// Reading the buffers of an XLA call.
#ifndef KVBLOCK_OPS_ATTENTION_FFI_READER_H_
#define KVBLOCK_OPS_ATTENTION_FFI_READER_H_

#include <cstdint>
#include <initializer_list>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace kvblock {

// Takes operands one after the other; remembers the first error.
class Reader {
 public:
  // `call` begins the messages.
  Reader(const xla::ffi::RemainingArgs& args, const xla::ffi::RemainingRets& rets, const char* call)
      : args_(args), rets_(rets), call_(call) {}

  xla::ffi::AnyBuffer Operand(const char* name) {
    auto buffer = args_.get<xla::ffi::AnyBuffer>(next_operand_++);
    if (buffer.has_error()) {
      Fail(std::string(name) + " is missing");
      return xla::ffi::AnyBuffer(&empty_);
    }
    return *buffer;
  }

  // The operand's data; its dtype and shape have to be as said.
  const void* Operand(const char* name, xla::ffi::DataType type,
                      std::initializer_list<int64_t> shape) {
    const xla::ffi::AnyBuffer buffer = Operand(name);
    Check(name, buffer, type, shape);
    return buffer.untyped_data();
  }

  void* Result(const char* name, xla::ffi::DataType type, std::initializer_list<int64_t> shape) {
    auto buffer = rets_.get<xla::ffi::AnyBuffer>(next_result_++);
    if (buffer.has_error()) {
      Fail(std::string("result ") + name + " is missing");
      return nullptr;
    }
    Check(name, **buffer, type, shape);
    return (*buffer)->untyped_data();
  }

  void Fail(const std::string& what) {
    if (error_.empty()) error_ = what;
  }

  bool HasOperands(size_t count) const { return next_operand_ + count <= args_.size(); }
  size_t operands_left() const { return args_.size() - next_operand_; }
  size_t results_left() const { return rets_.size() - next_result_; }
  bool failed() const { return !error_.empty(); }

  xla::ffi::Error Finish() {
    if (error_.empty() && next_operand_ != args_.size()) Fail("too many operands");
    if (error_.empty() && next_result_ != rets_.size()) Fail("too many results");
    if (error_.empty()) return xla::ffi::Error::Success();
    return xla::ffi::Error::InvalidArgument(std::string(call_) + ": " + error_);
  }

 private:
  void Check(const char* name, const xla::ffi::AnyBuffer& buffer, xla::ffi::DataType type,
             std::initializer_list<int64_t> shape) {
    const auto dims = buffer.dimensions();
    bool same = dims.size() == shape.size() && buffer.element_type() == type;
    size_t i = 0;
    for (int64_t size : shape) same = same && dims[i++] == size;
    if (!same) Fail(std::string(name) + " has another shape or dtype than the call implies");
  }

  const xla::ffi::RemainingArgs& args_;
  const xla::ffi::RemainingRets& rets_;
  const char* call_;
  size_t next_operand_ = 0, next_result_ = 0;
  std::string error_;
  XLA_FFI_Buffer empty_{};
};

}  // namespace kvblock

#endif  // KVBLOCK_OPS_ATTENTION_FFI_READER_H_
