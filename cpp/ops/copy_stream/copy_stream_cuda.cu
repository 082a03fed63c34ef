// Streams of copies on CUDA: a stream that waits for no other, and an event behind each copy.
#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <vector>

#include "host/copy_batch.h"
#include "host/copy_stream_check.h"
#include "host/message.h"
#include "kvblock/copy_stream.h"

struct kvblock_copy_stream {
  int device;
  cudaStream_t stream;
};

struct kvblock_copy_mark {
  int device;
  cudaEvent_t event;
};

namespace kvblock {
namespace {

const char* Failed(const char* what, cudaError_t status) {
  if (status == cudaSuccess) return nullptr;
  cudaGetLastError();  // or the next launch of this thread would report it
  return Message(std::string("copy_stream: ") + what + ": " + cudaGetErrorString(status));
}

// Makes a device the thread's current one, and the one before again at the end.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    status_ = cudaGetDevice(&before_);
    if (status_ == cudaSuccess) status_ = cudaSetDevice(device);
  }
  ~OnDevice() {
    if (status_ == cudaSuccess) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  const char* error() const { return Failed("the device cannot be used", status_); }

 private:
  int before_ = 0;
  cudaError_t status_;
};

const char* CheckMemory(const char* side, const void* address, int device) {
  cudaPointerAttributes found{};
  if (const char* error = Failed(side, cudaPointerGetAttributes(&found, address))) return error;
  if (found.type == cudaMemoryTypeHost) return nullptr;
  if (found.type == cudaMemoryTypeDevice && found.device == device) return nullptr;
  if (found.type == cudaMemoryTypeDevice) {
    return Message("copy_stream: " + std::string(side) + " lies on device " +
                   std::to_string(found.device) + ", the stream is of device " +
                   std::to_string(device));
  }
  return Message("copy_stream: " + std::string(side) +
                 " is memory of the host that is not pinned; take it from cudaHostAlloc, or a "
                 "pool in pinned_host");
}

// Strips of one row in one call, the others each in one of their own.
cudaError_t Enqueue(const std::vector<kvblock_strip>& strips, cudaStream_t stream) {
  CopyList list;
  for (const kvblock_strip& strip : strips) {
    if (strip.rows == 1) {
      list.Add(strip.to, strip.from, strip.bytes);
      continue;
    }
    const cudaError_t status =
        cudaMemcpy2DAsync(strip.to, strip.to_pitch, strip.from, strip.from_pitch, strip.bytes,
                          strip.rows, cudaMemcpyDefault, stream);
    if (status != cudaSuccess) return status;
  }
  return CopyBatch(list, stream);
}

}  // namespace
}  // namespace kvblock

using kvblock::Failed;
using kvblock::Message;
using kvblock::OnDevice;

extern "C" const char* kvblock_copy_stream_open(int device, kvblock_copy_stream** stream) {
  if (stream == nullptr) return Message("copy_stream: stream is NULL");
  *stream = nullptr;
  OnDevice there(device);
  if (const char* error = there.error()) return error;
  auto made = std::make_unique<kvblock_copy_stream>();
  made->device = device;
  const cudaError_t status = cudaStreamCreateWithFlags(&made->stream, cudaStreamNonBlocking);
  if (const char* error = Failed("a stream", status)) return error;
  *stream = made.release();
  return nullptr;
}

extern "C" const char* kvblock_copy_stream_close(kvblock_copy_stream* stream) {
  if (stream == nullptr) return nullptr;
  const std::unique_ptr<kvblock_copy_stream> closed(stream);
  OnDevice there(closed->device);
  if (const char* error = there.error()) return error;
  const cudaError_t waited = cudaStreamSynchronize(closed->stream);
  const cudaError_t destroyed = cudaStreamDestroy(closed->stream);
  return Failed("closing", waited != cudaSuccess ? waited : destroyed);
}

extern "C" const char* kvblock_copy_stream_start(kvblock_copy_stream* stream,
                                                 const kvblock_strip* strips, int64_t count,
                                                 kvblock_copy_mark** mark) {
  if (mark == nullptr) return Message("copy_stream: mark is NULL");
  *mark = nullptr;
  if (stream == nullptr) return Message("copy_stream: stream is NULL");
  if (const char* error = kvblock_strips_check(strips, count)) return error;
  OnDevice there(stream->device);
  if (const char* error = there.error()) return error;
  if (count > 0) {
    if (const char* error = kvblock::CheckMemory("to", strips->to, stream->device)) return error;
    if (const char* error = kvblock::CheckMemory("from", strips->from, stream->device)) {
      return error;
    }
  }
  auto made = std::make_unique<kvblock_copy_mark>();
  made->device = stream->device;
  // Who waits for it sleeps; nobody asks for its time.
  const unsigned flags = cudaEventBlockingSync | cudaEventDisableTiming;
  cudaError_t status = cudaEventCreateWithFlags(&made->event, flags);
  if (const char* error = Failed("an event", status)) return error;
  status = kvblock::Enqueue(kvblock::JoinStrips(strips, count), stream->stream);
  if (status == cudaSuccess) status = cudaEventRecord(made->event, stream->stream);
  if (status != cudaSuccess) {
    cudaStreamSynchronize(stream->stream);
    cudaEventDestroy(made->event);
    return Failed("a copy", status);
  }
  *mark = made.release();
  return nullptr;
}

extern "C" const char* kvblock_copy_mark_done(kvblock_copy_mark* mark, int* done) {
  if (mark == nullptr || done == nullptr) return Message("copy_stream: mark or done is NULL");
  const cudaError_t status = cudaEventQuery(mark->event);
  *done = status != cudaErrorNotReady;
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return nullptr;
  }
  return Failed("a copy", status);
}

extern "C" const char* kvblock_copy_mark_wait(kvblock_copy_mark* mark) {
  if (mark == nullptr) return Message("copy_stream: mark is NULL");
  return Failed("a copy", cudaEventSynchronize(mark->event));
}

extern "C" const char* kvblock_copy_mark_free(kvblock_copy_mark* mark) {
  if (mark == nullptr) return nullptr;
  const std::unique_ptr<kvblock_copy_mark> freed(mark);
  OnDevice there(freed->device);
  if (const char* error = there.error()) return error;
  return Failed("an event", cudaEventDestroy(freed->event));
}
