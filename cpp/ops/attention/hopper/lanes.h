// Launches that may run side by side, although XLA gives a call one stream.
#pragma once

#include <cuda_runtime.h>

#include <map>

namespace kvblock::hopper {

// Two streams: lane 0 is the caller's, lane 1 one of this thread's own. Between Fork and Join a
// launch waits for those before it in its lane, and for what the caller's stream had before Fork.
// What the caller's stream has after Join waits for both. A graph that is recorded from the
// caller's stream records both; so another thread, which may launch at the same time, has other
// streams.
class Lanes {
 public:
  explicit Lanes(cudaStream_t caller) : caller_(caller) {}

  cudaStream_t operator[](int lane) const { return lane == 0 ? caller_ : own_->stream; }

  cudaError_t Fork() {
    thread_local std::map<int, Own> of_devices;
    int device = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess) return status;
    Own& own = of_devices[device];
    if ((status = own.Make()) != cudaSuccess) return status;
    if ((status = cudaEventRecord(own.event, caller_)) != cudaSuccess) return status;
    if ((status = cudaStreamWaitEvent(own.stream, own.event, 0)) == cudaSuccess) own_ = &own;
    return status;
  }
  // Also where a launch failed in between: a recording ends with all of its streams joined.
  cudaError_t Join() {
    if (own_ == nullptr) return cudaSuccess;
    const cudaError_t status = cudaEventRecord(own_->event, own_->stream);
    return status != cudaSuccess ? status : cudaStreamWaitEvent(caller_, own_->event, 0);
  }

 private:
  struct Own {
    cudaStream_t stream = nullptr;
    cudaEvent_t event = nullptr;

    Own() = default;
    Own(const Own&) = delete;
    Own& operator=(const Own&) = delete;

    cudaError_t Make() {
      cudaError_t status = cudaSuccess;
      if (stream == nullptr) status = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
      if (status == cudaSuccess && event == nullptr) {
        status = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
      }
      return status;
    }
    ~Own() {  // whatever is under way ends
      if (event != nullptr) cudaEventDestroy(event);
      if (stream != nullptr) cudaStreamDestroy(stream);
    }
  };

  cudaStream_t caller_;
  Own* own_ = nullptr;
};

}  // namespace kvblock::hopper
