// Kernels of one's own for the emulator: a CUDA source is compiled as C++ behind this header, and
// the driver that stands in (driver.cc) runs its kernels with the parameters of a launch.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#include "cuda_runtime.h"

namespace emulator {

// What the driver tells of a launch. So many CTAs in x run at once. `read` copies the value of a
// parameter, by value or from where the code that was loaded finds it.
struct OwnLaunch {
  unsigned grid[3], block[3], at[3], together, shared_bytes;
  const void* launch;
  void (*read)(const OwnLaunch*, int number, int bytes, char kind, void* to);
};

template <typename T>
T Read(const OwnLaunch& launch, int number) {
  constexpr char kind = std::is_floating_point_v<T> ? 'f'
                        : !std::is_integral_v<T>    ? 'b'
                        : std::is_signed_v<T>       ? 's'
                                                    : 'u';
  std::remove_const_t<T> value;
  launch.read(&launch, number, sizeof(T), kind, &value);
  return value;
}

// Runs the CTAs that the launch is at. One that takes long shows in a test's time: it is an
// emulator.
template <typename... Parameters, size_t... kNumbers>
void RunOwn(void (*kernel)(Parameters...), const OwnLaunch& launch,
            std::index_sequence<kNumbers...>) {
  const std::tuple<Parameters...> values{Read<Parameters>(launch, kNumbers)...};
  if (launch.block[1] * launch.block[2] != 1) Die("blocks have one dimension here");
  gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
  blockDim = {launch.block[0], 1, 1};
  launched_bytes = launch.shared_bytes;
  const uint3 at = {launch.at[0], launch.at[1], launch.at[2]};
  RunCluster(at, static_cast<int>(launch.together), static_cast<int>(launch.block[0]),
             [&] { std::apply(kernel, values); });
}
template <typename... Parameters>
void RunOwn(void (*kernel)(Parameters...), const OwnLaunch* launch) {
  RunOwn(kernel, *launch, std::index_sequence_for<Parameters...>());
}

// All threads meet of a cooperative launch, whose CTAs are one cluster here; or those of a cluster
// that it has of its own, of so many CTAs.
inline void MeetInGrid() {
  Wait(cluster->all, static_cast<int>(cluster->ctas.size() * cta->fibers.size()));
}
inline void MeetInCluster(int ctas) {
  static std::map<int, Barrier> barriers;
  Wait(barriers[cta->rank / ctas], static_cast<int>(ctas * cta->fibers.size()));
}

}  // namespace emulator
