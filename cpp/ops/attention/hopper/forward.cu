// Picks the instance of Hopper's forward kernel.
#include <mutex>
#include <unordered_map>

#include "ops/attention/hopper/forward.h"

namespace kvblock::hopper {

const char* LaunchForward(const kvblock_attention& a, cudaStream_t stream) {
  const int dim = a.head_dim, value_dim = a.value_dim;
  const auto fits = [&](int d, int v) { return dim <= d && value_dim <= v; };
  if (fits(64, 64)) return LaunchForwardDims<64, 64>(a, stream);
  if (fits(96, 96)) return LaunchForwardDims<96, 96>(a, stream);
  if (fits(128, 128)) return LaunchForwardDims<128, 128>(a, stream);
  if (fits(192, 128)) return LaunchForwardDims<192, 128>(a, stream);
  if (fits(192, 192)) return LaunchForwardDims<192, 192>(a, stream);
  return LaunchForwardDims<256, 256>(a, stream);
}

int ForwardCounter(int device, const void* o) {
  static std::mutex mutex;
  static auto* const of_devices = new std::unordered_map<int, std::unordered_map<const void*, int>>;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& counters = (*of_devices)[device];
  const auto found = counters.find(o);
  if (found != counters.end()) return found->second;
  if (counters.size() == kForwardCounters) return -1;
  const int counter = static_cast<int>(counters.size());
  counters.emplace(o, counter);
  return counter;
}

}  // namespace kvblock::hopper
