// Lanes of launches (hopper/lanes.h) on the emulator's streams, with copies for launches.
#define STREAMS_EVENT_FLAGS cudaEventDisableTiming
#include "ops/attention/hopper/lanes.h"

#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

// Whatever comes after it in a stream comes late.
void Delay(cudaStream_t stream, int milliseconds) {
  stream->Ask([=] { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); });
}

constexpr int kLanes = 2;

int Run(int slow, int rounds, int* found) {
  cudaStream_t caller = nullptr;
  if (cudaStreamCreateWithFlags(&caller, cudaStreamNonBlocking) != cudaSuccess) return 1;
  const int seed = 7;
  int before = 0;
  std::vector<int> in_lanes(kLanes), of_rounds(rounds);
  Delay(caller, 30);
  cudaMemcpyAsync(&before, &seed, sizeof(int), cudaMemcpyDefault, caller);
  kvblock::hopper::Lanes lanes(caller);
  int status = lanes.Fork();
  for (int i = 0; status == cudaSuccess && i < rounds; ++i) {
    const int lane = i % kLanes;
    if (lane == slow) Delay(lanes[lane], 30);
    cudaMemcpyAsync(&in_lanes[lane], &before, sizeof(int), cudaMemcpyDefault, lanes[lane]);
    cudaMemcpyAsync(&of_rounds[i], &in_lanes[lane], sizeof(int), cudaMemcpyDefault, lanes[lane]);
  }
  if (status == cudaSuccess) status = lanes.Join();
  for (int i = 0; i < rounds; ++i) {
    cudaMemcpyAsync(found + i, &of_rounds[i], sizeof(int), cudaMemcpyDefault, caller);
  }
  cudaStreamSynchronize(caller);
  if (status == cudaSuccess) cudaStreamSynchronize(lanes[1]);
  cudaStreamDestroy(caller);
  return status;
}

}  // namespace

// Of each round what the caller's stream finds behind Join: 7, if all have waited, though one lane
// is slow. By a thread of its own, whose streams end with it.
extern "C" int emulator_lanes(int slow, int rounds, int* found) {
  int status = 0;
  std::thread([&] {
    status = Run(slow, rounds, found);
    if (status == 0) status = Run(slow, rounds, found);  // with the streams that it has
  }).join();
  return status;
}
extern "C" int64_t emulator_alive() { return streams::alive; }
