// Bulk tensor copies for the emulator: see cpp/device/tensor_copy.cuh. Loads arrive when somebody
// waits for them.
#pragma once

#include <cuda.h>

#include "device/mbarrier.cuh"
#include "device/swizzle.cuh"

namespace kvblock {

inline void BarrierExpect(uint32_t barrier, int bytes) {
  FindBarrier(barrier).bytes += bytes;
  BarrierArrive(barrier);
}
inline void FenceBarrierInit() { emulator::races::Release(emulator::cluster->begun.handover); }
inline void FenceAsync() { emulator::races::Fence(); }
inline void FenceAsyncGlobal() {}
inline void PrefetchTensorMap(const CUtensorMap&) {}

// What a box takes in shared memory; swizzles leave rows of 128 bytes where they are.
inline int ElementBytes(const CUtensorMap& map) { return static_cast<int>(map.strides[0]); }
inline int Bytes(const CUtensorMap& map) {
  int bytes = ElementBytes(map);
  for (int size : map.box) bytes *= size;
  return bytes;
}

// Calls each(address in shared memory, its place in the array or NULL) for each element of a box.
template <typename Each>
void ForBox(const CUtensorMap& map, uint32_t shared, const int (&at)[5], Each each) {
  if (shared % 128 != 0) emulator::Die("a box is not aligned");
  emulator::CheckShared(shared, Bytes(map), "a box goes on beyond shared memory");
  const int bytes = ElementBytes(map), count = Bytes(map) / bytes;
  for (int n = 0; n < count; ++n) {
    const char* from = map.data;
    for (int i = 0, rest = n; i < 5; rest /= map.box[i++]) {
      const int64_t index = at[i] + rest % map.box[i];
      const bool inside = index >= 0 && index < map.sizes[i];
      from = from != nullptr && inside ? from + index * map.strides[i] : nullptr;
    }
    const uint32_t place = shared + n * bytes;  // a row is 128 bytes
    each(place ^ (place >> 7 & 7) << 4, const_cast<char*>(from));
  }
}

inline void LoadBox(uint32_t to, const CUtensorMap& map, uint32_t barrier, const int (&x)[5],
                    emulator::Cta& of = *emulator::cta) {
  const emulator::races::InCta there(of.rank);
  const auto copy =
      emulator::races::StartBulkLoad(barrier, emulator::SharedPointer(to), Bytes(map));
  const auto arrive = [=, x0 = x[0], x1 = x[1], x2 = x[2], x3 = x[3], x4 = x[4]] {
    const int element = ElementBytes(map);
    int bytes = 0;
    ForBox(map, to, {x0, x1, x2, x3, x4}, [&](uint32_t place, char* from) {
      const uint16_t zero = 0;
      std::memcpy(emulator::SharedPointer(place), from ? from : (const char*)&zero, element);
      bytes += element;
    });
    ArriveBytes(barrier, bytes, copy);
  };
  ArriveLate(barrier, arrive, of);
}
inline void LoadBox(uint32_t to, const CUtensorMap& map, uint32_t barrier, int x0, int x1, int x2,
                    int x3) {
  LoadBox(to, map, barrier, {x0, x1, x2, x3, 0});
}
inline void LoadBoxToCtas(uint32_t to, const CUtensorMap& map, uint32_t barrier, int x0, int x1,
                          int x2, int x3, uint16_t mask) {
  for (const auto& of : emulator::cluster->ctas) {
    if (mask >> of->rank & 1) LoadBox(to, map, barrier, {x0, x1, x2, x3, 0}, *of);
  }
}
inline void StoreBox(const CUtensorMap& map, uint32_t from, int x0, int x1, int x2, int x3) {
  using namespace emulator::races;
  Start(Engine::kStores, Access::kRead, emulator::SharedPointer(from), Bytes(map));
  const Unseen unseen;
  ForBox(map, from, {x0, x1, x2, x3, 0}, [&](uint32_t place, char* to) {
    if (to) std::memcpy(to, emulator::SharedPointer(place), ElementBytes(map));
  });
}

// Pieces that follow each other.
inline void CheckPiece(const void* there, uint32_t shared, int bytes) {
  if (reinterpret_cast<uintptr_t>(there) % 16 || shared % 16 || bytes % 16 || bytes <= 0) {
    emulator::Die("a piece is not of whole 16 bytes");
  }
  emulator::CheckShared(shared, bytes, "a piece goes on beyond shared memory");
}
inline void LoadBytes(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  CheckPiece(from, to, bytes);
  const auto copy = emulator::races::StartBulkLoad(barrier, emulator::SharedPointer(to), bytes);
  const auto arrive = [=] {
    std::memcpy(emulator::SharedPointer(to), from, bytes);
    ArriveBytes(barrier, bytes, copy);
  };
  ArriveLate(barrier, arrive, *emulator::cta);
}
inline void StartPiece(const void* to, uint32_t from, int bytes) {
  CheckPiece(to, from, bytes);
  using namespace emulator::races;
  Start(Engine::kStores, Access::kRead, emulator::SharedPointer(from), bytes);
}
inline void StoreBytes(void* to, uint32_t from, int bytes) {
  StartPiece(to, from, bytes);
  const emulator::races::Unseen unseen;
  std::memcpy(to, emulator::SharedPointer(from), bytes);
}
inline void AddBytes(float* to, uint32_t from, int bytes) {
  StartPiece(to, from, bytes);
  const emulator::races::Unseen unseen;
  const float* const values = reinterpret_cast<const float*>(emulator::SharedPointer(from));
  for (int i = 0; i < bytes / 4; ++i) to[i] += values[i];
}
inline void CommitStores() { emulator::races::Commit(emulator::races::Engine::kStores); }
template <int kPending>
inline void WaitStoresRead() {
  emulator::races::Await(emulator::races::Engine::kStores, kPending);
}
template <int kPending>
inline void WaitStores() {
  WaitStoresRead<kPending>();
}

}  // namespace kvblock
