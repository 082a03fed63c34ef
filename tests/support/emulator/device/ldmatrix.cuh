// Matrix fragments from shared memory, for the emulator: see cpp/device/ldmatrix.cuh.
#pragma once

#include "cuda_runtime.h"

namespace kvblock {

inline void LoadMatrices(uint32_t (&r)[4], uint32_t address) {
  const auto addresses = emulator::Show(address);
  const int lane = threadIdx.x % 32;
  for (int m = 0; m < 4; ++m) {
    const uint32_t row = addresses[m * 8 + lane / 4][0];
    if (row % 16) emulator::Die("ldmatrix reads rows that are not aligned");
    std::memcpy(&r[m], emulator::SharedPointer(row) + lane % 4 * 4, 4);
  }
}

inline void LoadMatricesTransposed(uint32_t (&r)[4], uint32_t address) {
  const auto addresses = emulator::Show(address);
  const int lane = threadIdx.x % 32;
  for (int m = 0; m < 4; ++m) {
    uint16_t element[2];
    for (int i = 0; i < 2; ++i) {
      const uint32_t row = addresses[m * 8 + lane % 4 * 2 + i][0];
      if (row % 16) emulator::Die("ldmatrix reads rows that are not aligned");
      std::memcpy(&element[i], emulator::SharedPointer(row) + lane / 4 * 2, 2);
    }
    r[m] = element[0] | static_cast<uint32_t>(element[1]) << 16;
  }
}

inline uint32_t TransposeMatrix(uint32_t r) {
  const auto shown = emulator::Show(r);
  const int lane = threadIdx.x % 32;
  const auto element = [&](int row, int column) {
    return shown[row * 4 + column / 2][0] >> column % 2 * 16 & 0xffff;
  };
  return element(lane % 4 * 2, lane / 4) | element(lane % 4 * 2 + 1, lane / 4) << 16;
}

}  // namespace kvblock
