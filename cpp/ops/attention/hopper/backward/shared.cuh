// What the roles of the Hopper backward kernel (kernel.cuh) share: the plan, the tiles and the
// barriers in shared memory.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "device/mbarrier.cuh"
#include "ops/attention/hopper/backward/shape.cuh"
#include "ops/attention/hopper/clusters.h"
#include "ops/attention/mask/tile_walk.cuh"

namespace kvblock::hopper {

// Hardware barriers: of both warpgroups that compute; of each with its warp that takes turns; of
// each by itself; of the warps that set up and begin.
constexpr int kWorkersMeet = 1, kTurnTakersMeet = 2, kWarpgroupMeets = 4, kLoaderBegins = 6;

struct BackwardMaps {
  CUtensorMap q, k, v, d_o, dk, dv;
};

// What the loader says of a step's tile of queries.
struct alignas(16) BackwardStep {
  int first, head;
  int flags;
  int end;                             // of its queries
  static constexpr int kMasked = 1;    // some pairs do not attend, or there is a bias
  static constexpr int kPartial = 2;   // the tile has rows that must not be read
  static constexpr int kEnd = 4;       // there is no tile
  static constexpr int kSegments = 8;  // masked, and of several segments
};
constexpr int kHeldSteps = 8;  // a step is looked at again during the next two

// What a CTA owns, and where its walk over the queries stands.
struct alignas(16) BackwardOwned {
  Sequence sequence;
  int first_key, kv_head;
  int begun;                   // steps that were started before the loader runs
  WalkState walk, fresh_walk;  // that of the next head begins as the first one's
};

// What else lies in shared memory depends on how the warpgroups share the work. Of each warpgroup
// that has keys of its own, dQ on its way to dq_accum, and its barriers:
template <typename Shape>
struct DqParts {
  char dq[Shape::kDqParts][Shape::kDqBytes];
};
template <typename Shape>
struct DqBarriers {
  uint64_t full[Shape::kDqParts], free[Shape::kDqParts];  // handed to the warp that adds it; read
};
// P on its way from one warpgroup to the other, not rounded:
template <typename Shape>
struct HandedP {
  float p[Shape::kKeys * Shape::kQueries];
};
// In a cluster, half of the columns of the other CTA's K, and the barriers between the two:
template <typename Shape>
struct PeerKeys {
  char k[Shape::PeerKeyTile::kBytes];
};
template <typename Shape>
struct PeerBarriers {
  uint64_t k_full;                                           // the other CTA's K has landed
  uint64_t ds_full, ds_free;                                 // its dS has come; is multiplied
  uint64_t ds_sent;                                          // this one's dS has come there
  uint64_t q_free[Shape::kStages], do_free[Shape::kStages];  // a stage is free there
};

// A barrier is "full" when copies have landed or a part is written, "free" when whoever looks at it
// has read it.
template <typename Shape>
struct BackwardShared {
  static constexpr bool kSplitsProducts = Shape::kSplitsProducts, kClustered = Shape::kClustered;

  alignas(1024) char k[Shape::KeyTile::kBytes];
  char v[Shape::ValueTile::kBytes];
  char q[Shape::kStages][Shape::QueryTile::kBytes];
  char d_o[Shape::kStages][Shape::GradTile::kBytes];
  // dS of two steps, sequential of one; in a cluster of one step, this CTA's and the other's.
  char ds[Shape::kScoreTiles][Shape::ScoreTile::kBytes];
  std::conditional_t<kClustered, PeerKeys<Shape>,
                     std::conditional_t<kSplitsProducts, HandedP<Shape>, DqParts<Shape>>>
      passed;
  float lse[Shape::kStages * Shape::kQueries], delta[Shape::kStages * Shape::kQueries];
  BackwardStep steps[kHeldSteps];
  BackwardOwned owned;
  uint64_t k_full, v_full;
  uint64_t ds_full[2];  // splitting products, dS of a step is written; sequential, dQ has read it
  uint64_t p_full, p_free;  // splitting products, P is handed over; its place is free
  uint64_t may_add[2];      // it is a warpgroup's turn to add dQ (dq_turns.cuh)
  uint64_t q_full[Shape::kStages], q_free[Shape::kStages];  // Q, lse, delta and the step
  uint64_t do_full[Shape::kStages], do_free[Shape::kStages];
  std::conditional_t<kSplitsProducts, PeerBarriers<Shape>, DqBarriers<Shape>> passing;
};

// The CTA, as each of its roles sees it.
template <typename Shape>
struct BackwardCta {
  static_assert(sizeof(BackwardShared<Shape>) <= kMostSharedBytes);
  using Shared = BackwardShared<Shape>;
  static constexpr int kStages = Shape::kStages;

  const typename Shape::Params& p;
  const BackwardMaps& maps;
  char* const memory;   // BackwardShared<Shape>
  const uint32_t base;  // its address in the shared window

// The addresses of members in the shared window, as copies, products and barriers take them: sums
// of 32 bits, or the compiler does not see how the tiles are aligned.
#define KVBLOCK_ADDRESS(Name, member)                         \
  __device__ __forceinline__ uint32_t Name() const {          \
    return base + static_cast<int>(offsetof(Shared, member)); \
  }
#define KVBLOCK_ADDRESSES(Name, member, bytes)                              \
  __device__ __forceinline__ uint32_t Name(int i) const {                   \
    return base + static_cast<int>(offsetof(Shared, member)) + i * (bytes); \
  }
  KVBLOCK_ADDRESS(K, k)
  KVBLOCK_ADDRESS(V, v)
  KVBLOCK_ADDRESS(PeerK, passed.k)
  KVBLOCK_ADDRESSES(Q, q, Shape::QueryTile::kBytes)  // of a stage
  KVBLOCK_ADDRESSES(Grads, d_o, Shape::GradTile::kBytes)
  KVBLOCK_ADDRESSES(Ds, ds, Shape::ScoreTile::kBytes)
  KVBLOCK_ADDRESSES(Dq, passed.dq, Shape::kDqBytes)
  KVBLOCK_ADDRESS(KFull, k_full)
  KVBLOCK_ADDRESS(VFull, v_full)
  KVBLOCK_ADDRESSES(QFull, q_full, 8)
  KVBLOCK_ADDRESSES(QFree, q_free, 8)
  KVBLOCK_ADDRESSES(GradsFull, do_full, 8)
  KVBLOCK_ADDRESSES(GradsFree, do_free, 8)
  KVBLOCK_ADDRESSES(DsFull, ds_full, 8)
  KVBLOCK_ADDRESS(PFull, p_full)
  KVBLOCK_ADDRESS(PFree, p_free)
  KVBLOCK_ADDRESSES(MayAdd, may_add, 8)
  KVBLOCK_ADDRESSES(DqFull, passing.full, 8)
  KVBLOCK_ADDRESSES(DqFree, passing.free, 8)
  KVBLOCK_ADDRESS(PeerKFull, passing.k_full)
  KVBLOCK_ADDRESS(PeerDsFull, passing.ds_full)
  KVBLOCK_ADDRESS(PeerDsFree, passing.ds_free)
  KVBLOCK_ADDRESS(PeerDsSent, passing.ds_sent)
  KVBLOCK_ADDRESSES(PeerQFree, passing.q_free, 8)
  KVBLOCK_ADDRESSES(PeerGradsFree, passing.do_free, 8)
#undef KVBLOCK_ADDRESS
#undef KVBLOCK_ADDRESSES

// Pointers to them.
#define KVBLOCK_POINTER(Type, Name, member, step)                                         \
  __device__ __forceinline__ Type* Name(int i = 0) const {                                \
    return reinterpret_cast<Type*>(memory + static_cast<int>(offsetof(Shared, member))) + \
           i * (step);                                                                    \
  }
  KVBLOCK_POINTER(char, KBytes, k, 0)
  KVBLOCK_POINTER(char, VBytes, v, 0)
  KVBLOCK_POINTER(char, PeerKBytes, passed.k, 0)
  KVBLOCK_POINTER(char, QBytes, q, Shape::QueryTile::kBytes)
  KVBLOCK_POINTER(char, GradsBytes, d_o, Shape::GradTile::kBytes)
  KVBLOCK_POINTER(char, DqBytes, passed.dq, Shape::kDqBytes)
  KVBLOCK_POINTER(float, HandedP, passed.p, 0)
  KVBLOCK_POINTER(float, Lse, lse, Shape::kQueries)
  KVBLOCK_POINTER(float, Delta, delta, Shape::kQueries)
  KVBLOCK_POINTER(BackwardOwned, Owned, owned, 0)
  KVBLOCK_POINTER(BackwardStep, Steps, steps, 1)
#undef KVBLOCK_POINTER
  // What lies at an address.
  __device__ __forceinline__ char* Bytes(uint32_t address) const {
    return memory + (address - base);
  }

  __device__ __forceinline__ BackwardOwned& owned() const { return *Owned(); }
  __device__ __forceinline__ BackwardStep& StepAt(int step) const {
    return *Steps(step % kHeldSteps);
  }
  // Waits until a step is there, with its Q, lse and delta.
  __device__ __forceinline__ void AwaitStep(int step) const {
    BarrierWait(QFull(step % kStages), step / kStages % 2);
  }
  // This thread has read what it needs of them.
  __device__ __forceinline__ void LeaveStep(int stage) const { BarrierArrive(QFree(stage)); }
  __device__ __forceinline__ void AwaitGrads(int stage, int phase) const {
    BarrierWait(GradsFull(stage), phase);
  }
};

}  // namespace kvblock::hopper
