// Tensor maps for the emulator: what the driver's would hold.
#pragma once

#include <cstdint>

struct CUtensorMap {
  const char* data;
  int64_t sizes[5], strides[5];  // elements; bytes, of which the first are an element's
  int box[5];
};
