// CUDA's streams and events on a CPU, for tests: each stream is a thread that copies later than it
// is asked to, so that who does not wait reads what was there before.
//
// A test may hold all streams, have a call fail, say where memory lies, and ask what was called.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#define CUDART_VERSION 13000
#ifndef STREAMS_EVENT_FLAGS  // those that the program under test should give
#define STREAMS_EVENT_FLAGS (cudaEventBlockingSync | cudaEventDisableTiming)
#endif

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorCallRequiresNewerDriver = 36,
  cudaErrorInvalidDevice = 101,
  cudaErrorNotReady = 600,
  cudaErrorNotSupported = 801,
};
enum cudaMemoryType {
  cudaMemoryTypeUnregistered = 0,
  cudaMemoryTypeHost = 1,
  cudaMemoryTypeDevice = 2,
};
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
enum { cudaStreamNonBlocking = 1 };
enum { cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
enum cudaMemcpySrcAccessOrder { cudaMemcpySrcAccessOrderStream = 1 };
struct cudaMemcpyAttributes {
  cudaMemcpySrcAccessOrder srcAccessOrder;
};
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
};

namespace streams {

constexpr int kDevices = 2;
inline std::mutex lock;
inline std::condition_variable changed;
inline bool held = false, old_driver = false;       // one that knows no batches
inline int64_t copies = 0, fail_at = 0, alive = 0;  // calls of copies; streams and events
inline std::map<const char*, std::pair<int64_t, cudaPointerAttributes>> memory;
inline thread_local int device = 0;
inline thread_local cudaError_t last = cudaSuccess;

inline cudaError_t Said(cudaError_t status) {
  if (status != cudaSuccess) last = status;
  return status;
}

struct Stream {
  std::deque<std::function<void()>> work;
  int64_t asked = 0, done = 0;
  bool closed = false;
  std::thread thread{[this] { Run(); }};

  void Run() {
    std::unique_lock<std::mutex> guard(lock);
    while (true) {
      changed.wait(guard, [&] { return closed || (!held && !work.empty()); });
      if (work.empty()) return;
      if (held) continue;
      const std::function<void()> next = std::move(work.front());
      work.pop_front();
      guard.unlock();
      next();
      guard.lock();
      ++done;
      changed.notify_all();
    }
  }
  void Ask(std::function<void()> what) {
    std::lock_guard<std::mutex> guard(lock);
    work.push_back(std::move(what));
    ++asked;
    changed.notify_all();
  }
  void Wait(int64_t until) {
    std::unique_lock<std::mutex> guard(lock);
    changed.wait(guard, [&] { return done >= until; });
  }
};

struct Event {
  Stream* stream = nullptr;
  int64_t at = 0;
};

inline cudaError_t Copy(std::function<void()> what, Stream* stream) {
  {
    std::lock_guard<std::mutex> guard(lock);
    if (++copies == fail_at) return Said(cudaErrorInvalidValue);
  }
  stream->Ask(std::move(what));
  return cudaSuccess;
}

}  // namespace streams

typedef streams::Stream* cudaStream_t;
typedef streams::Event* cudaEvent_t;

inline const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaErrorInvalidDevice ? "invalid device ordinal" : "invalid argument";
}
inline cudaError_t cudaGetLastError() { return std::exchange(streams::last, cudaSuccess); }
inline cudaError_t cudaGetDevice(int* device) {
  *device = streams::device;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= streams::kDevices) return streams::Said(cudaErrorInvalidDevice);
  streams::device = device;
  return cudaSuccess;
}
// What nobody has said anything of is memory of device 0.
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  std::lock_guard<std::mutex> guard(streams::lock);
  *found = {cudaMemoryTypeDevice, 0};
  for (const auto& [first, said] : streams::memory) {
    const int64_t place = static_cast<const char*>(address) - first;
    if (place >= 0 && place < said.first) *found = said.second;
  }
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  if (flags != cudaStreamNonBlocking) return streams::Said(cudaErrorInvalidValue);
  *stream = new streams::Stream;
  ++streams::alive;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  stream->Wait(stream->asked);
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  {
    std::lock_guard<std::mutex> guard(streams::lock);
    stream->closed = true;
    --streams::alive;
    streams::changed.notify_all();
  }
  stream->thread.join();
  delete stream;
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (flags != STREAMS_EVENT_FLAGS) return streams::Said(cudaErrorInvalidValue);
  *event = new streams::Event;
  std::lock_guard<std::mutex> guard(streams::lock);
  ++streams::alive;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->stream = stream;
  event->at = stream->asked;
  return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  stream->Ask([other = event->stream, at = event->at] { other->Wait(at); });
  return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  std::lock_guard<std::mutex> guard(streams::lock);
  const bool ended = event->stream->done >= event->at;
  return ended ? cudaSuccess : streams::Said(cudaErrorNotReady);
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  event->stream->Wait(event->at);
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  std::lock_guard<std::mutex> guard(streams::lock);
  --streams::alive;
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
  return streams::Copy([=] { std::memcpy(to, from, bytes); }, stream);
}
inline cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                     size_t bytes, size_t rows, cudaMemcpyKind,
                                     cudaStream_t stream) {
  const auto copy = [=] {
    for (size_t i = 0; i < rows; ++i) {
      std::memcpy(static_cast<char*>(to) + i * to_pitch,
                  static_cast<const char*>(from) + i * from_pitch, bytes);
    }
  };
  return streams::Copy(copy, stream);
}
// In the order of CUDA's freedom: the last one first.
inline cudaError_t cudaMemcpyBatchAsync(const void** to, const void** from, const size_t* bytes,
                                        size_t count, cudaMemcpyAttributes* attributes,
                                        size_t* first, size_t kinds, cudaStream_t stream) {
  if (streams::old_driver) return streams::Said(cudaErrorCallRequiresNewerDriver);
  const bool known = attributes->srcAccessOrder == cudaMemcpySrcAccessOrderStream;
  if (!known || *first != 0 || kinds != 1 || count == 0) return cudaErrorInvalidValue;
  for (size_t i = count; i-- > 0;) {
    void* target = const_cast<void*>(to[i]);
    const cudaError_t status =
        cudaMemcpyAsync(target, from[i], bytes[i], cudaMemcpyDefault, stream);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}
