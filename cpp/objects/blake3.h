// BLAKE3, a cryptographic hash, after its specification
// (https://github.com/BLAKE3-team/BLAKE3-specs).
#ifndef KVBLOCK_OBJECTS_BLAKE3_H_
#define KVBLOCK_OBJECTS_BLAKE3_H_

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvblock {

using Digest = std::array<uint8_t, 32>;

// The hash of `size` bytes; with a key, the keyed hash.
Digest Blake3(const void* data, size_t size, const Digest* key = nullptr);

}  // namespace kvblock

#endif  // KVBLOCK_OBJECTS_BLAKE3_H_
