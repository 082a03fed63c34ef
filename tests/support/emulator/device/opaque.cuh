// Nothing is opaque to the emulator.
#pragma once

namespace kvblock {

template <typename T>
inline T Opaque(T x) {
  return x;
}
template <typename T>
inline void MakeOpaque(T&) {}

}  // namespace kvblock
