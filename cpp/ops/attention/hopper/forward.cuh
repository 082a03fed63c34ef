// Attention forward on Hopper's warpgroup products (wgmma, sm_90a), any mask.
//
//   S = Q K^T,  P = exp(scale S - reference),  O = P V / rowsum(P),  lse = reference + log(rowsum)
//
// A CTA has one warpgroup that loads (the producer, of which one warp works) and two or three that
// compute (the consumers), each with 64 query rows of the CTA's query tile. Most registers belong
// to the consumers.
//
// The producer goes through the query tiles that are this CTA's, and for each through the KV tiles
// that it can see (TileWalk). It starts bulk copies of Q, K and V, and writes beside them what the
// consumers must know: the query tile (Item) and, for each KV tile, where it begins, whether it
// needs a mask and whether it is the last (KvTile). Q has one place in shared memory, K and V have
// kStages each, and each place has two barriers: `full` (the producer and the copies arrive) and
// `empty` (every warp of the consumers arrives).
//
//   producer:  K0 Q | K1 V0 | K2 V1 | ... | V(last)    and on with K0 of the next query tile
//
// A consumer multiplies one tile ahead: while it turns the scores of tile j into probabilities, the
// tensor cores work on P V of tile j - 1.
//
//   S = Q K(0), P = Softmax(S)
//   for j = 1, 2, ...:
//     issue S = Q K(j), issue O += P V(j - 1)     IssueScores, IssueValues
//     wait for S;  finish scores, mask            FinishScores (generic/forward.cuh)
//     maxima, exponentials, sums                  Softmax
//     wait for O;  P = S in 16 bits; rescale O    PackProbabilities, Rescale
//   O += P V(last);  write O and lse              Write
//
// With `turns` the consumers issue their products one after the other, in a ring of hardware
// barriers, so that one's softmax runs under the products of the others.
//
// Rows are scaled to a reference that follows their maximum only when the maximum has outgrown it
// by a factor of 2^8: probabilities of up to 2^8 do no harm, and O is hardly ever rescaled.
//
// Keys of a tile that are none of this sequence's (past kv_lens, in the next packed sequence, in an
// unlisted tile) come along with the copy. Their scores are masked, and their rows of V are cleared
// (ClearRows), since a probability of 0 does not cancel a NaN.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "device/fast_math.cuh"
#include "device/mbarrier.cuh"
#include "device/mma.cuh"
#include "device/tensor_copy.cuh"
#include "device/warpgroup.cuh"
#include "device/wgmma.cuh"
#include "ops/attention/generic/forward.cuh"
#include "ops/attention/generic/mask.cuh"
#include "ops/attention/generic/params.cuh"
#include "ops/attention/hopper/forward.h"
#include "ops/attention/hopper/tiles.h"

namespace kvblock::hopper {

template <typename T_, int kDim_, int kValueDim_, ForwardKind kKind_>
struct ForwardTraits {
  using T = T_;
  static constexpr int kQueryDim = kDim_, kValueDim = kValueDim_;
  static constexpr ForwardKind kKind = kKind_;
  static constexpr ForwardTiles kTiles = ForwardTilesOf(kDim_, kValueDim_, kKind_);
  static constexpr int kConsumers = kTiles.consumers, kStages = kKvStages;
  static constexpr int kQueryStages = kTiles.query_stages;
  static constexpr int kQueries = kConsumers * 64, kKeys = kTiles.keys;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr int kQueryChunks = (kQueryDim + 63) / 64, kValueChunks = (kValueDim + 63) / 64;
  static constexpr int kQBytes = kQueries * kQueryChunks * kChunkRowBytes;
  static constexpr int kKBytes = kKeys * kQueryChunks * kChunkRowBytes;
  static constexpr int kVBytes = kKeys * kValueChunks * kChunkRowBytes;
  // As generic/forward.cuh names them, for a warp's 16 rows.
  static constexpr int kRowBlocks = 1, kDim = kValueDim;
};

// How query tiles are shared out among CTAs.
//
// Tiles are ordered in sections of `heads_apart` (batch member, head) pairs, whose K and V fit in
// L2 together; within a section the pairs take turns, the last tiles first: under a causal mask
// they are the longest.
//
// With a counter, a CTA that is done takes the next tile of this order. Each tile is counted once,
// also the CTAs' first ones, and who counts the last clears the counter for the next launch.
// Without, a round gives each CTA the next tile. With `section_rounds`, for causal masks, sections
// begin with a round, and rounds go back and forth over the CTAs, which shares the work out to a
// few per mille.
struct ForwardParams : AttentionParams {
  int32_t counter;         // index in forward_counters; -1: none
  int32_t section_rounds;  // rounds that a section takes; 0: sections follow each other
};

namespace {
__device__ unsigned forward_counters[kForwardCounters];
}

// A query tile.
struct Item {
  Sequence sequence;
  int head, first;
  int q_row, kv_row, kv_head, batch;       // where its rows begin in the tensor maps
  enum : int { kEnd, kEmpty, kTiles } is;  // no more items; without KV tiles; with some
};

// A step of the plan: a KV tile, or an item that has none, or the end.
struct alignas(16) Step {
  int first;
  int end;  // keys from here on are not to be seen
  int flags;
  int item;  // a place in `items`
  enum : int {
    kMasked = 1,  // a KV tile with hidden keys
    kLast = 2,    // the last of its item
    kDirty = 4,   // rows of V from `end` on hold what must not be seen
    kStarts = 8,  // the first of its item
  };
};

// Steps that the planner is ahead of the consumers, and items, of which three more may be in use:
// consumers write an item after they have left the steps of the next.
constexpr int kSteps = 8, kItems = 16;

template <typename Traits>
struct ForwardShared {
  alignas(1024) char q[Traits::kQueryStages][Traits::kQBytes];
  alignas(1024) char k[Traits::kStages][Traits::kKBytes];
  alignas(1024) char v[Traits::kStages][Traits::kVBytes];
  Step steps[kSteps];
  Item items[kItems];
  ForwardParams params;  // the planner's
  WalkState walk;
  uint64_t step_full[kSteps], step_empty[kSteps];
  uint64_t q_full[Traits::kQueryStages], q_empty[Traits::kQueryStages];
  uint64_t k_full[Traits::kStages], k_empty[Traits::kStages];
  uint64_t v_full[Traits::kStages], v_empty[Traits::kStages];
};

struct ForwardMaps {
  CUtensorMap q, k, v;
};

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A count of tiles that have gone through the stages: which stage is next, and in which phase.
template <int kStages>
struct StageCount {
  int stage = 0, phase = 0;
  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

struct Assignment {
  enum { kTile, kNone, kEnd } is;
  int pair, tile;
};
__device__ __forceinline__ Assignment Assign(const ForwardParams& p, int section, int index) {
  const int pairs = min(p.heads_apart, p.num_pairs - section * p.heads_apart);
  if (index >= pairs * p.tiles) return {Assignment::kNone};
  return {Assignment::kTile, section * p.heads_apart + index % pairs, p.tiles - 1 - index / pairs};
}
// The tile at a place in the order.
__device__ __forceinline__ Assignment AssignInOrder(const ForwardParams& p, int64_t index) {
  if (index >= int64_t{p.tiles} * p.num_pairs) return {Assignment::kEnd};
  const int section = static_cast<int>(index) / (p.heads_apart * p.tiles);
  return Assign(p, section, static_cast<int>(index) - section * p.heads_apart * p.tiles);
}
// This CTA's tile of a round.
__device__ __forceinline__ Assignment AssignInRounds(const ForwardParams& p, int round) {
  const int grid = gridDim.x, cta = blockIdx.x;
  if (p.section_rounds == 0) return AssignInOrder(p, int64_t{round} * grid + cta);
  const int section = round / p.section_rounds;
  if (section * p.heads_apart >= p.num_pairs) return {Assignment::kEnd};
  round -= section * p.section_rounds;
  return Assign(p, section, round * grid + ((section + round) % 2 != 0 ? grid - 1 - cta : cta));
}

// ---- The planner: one warp. ----

template <typename Traits>
class Planner {
 public:
  __device__ __forceinline__ Planner(const ForwardParams& p, ForwardShared<Traits>& shared)
      : p_(p), shared_(shared), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void Run() {
    const bool counted = p_.counter >= 0;
    int64_t index = blockIdx.x;
    for (int round = 0;; ++round) {
      const Assignment at = counted ? AssignInOrder(p_, index) : AssignInRounds(p_, round);
      if (at.is == Assignment::kEnd) break;
      const unsigned count = counted ? Count() : 0;  // under way while the tile is planned
      if (at.is == Assignment::kTile) PlanTile(at);
      index = int64_t{gridDim.x} + __shfl_sync(~0u, count, 0);
    }
    if (lane_ == 0) shared_.items[item_].is = Item::kEnd;
    Emit({0, 0, 0, item_});
  }

 private:
  using Walk = TileWalk<Along::kKeys, Traits::kKeys>;

  // How many tiles were counted before this one; in lane 0.
  __device__ __forceinline__ unsigned Count() {
    if (lane_ != 0) return 0;
    unsigned* const counter = forward_counters + p_.counter;
    const unsigned count = atomicAdd(counter, 1);
    if (count + 1 == static_cast<unsigned>(p_.tiles) * p_.num_pairs) *counter = 0;
    return count;
  }

  __device__ __forceinline__ void PlanTile(const Assignment& at) {
    Sequence found;
    int first;
    const int batch = at.pair / p_.num_heads, head = at.pair - batch * p_.num_heads;
    if (!FindTile<Along::kQueries, Traits::kQueries>(p_, batch, at.tile, &found, &first)) return;
    Item& item = shared_.items[item_];
    if (lane_ == 0) {
      const bool packed = p_.cu_q != nullptr;  // the maps have one batch member
      item.sequence = found;
      item.head = head;
      item.first = first;
      item.q_row = first + (packed ? static_cast<int>(found.q_row) : 0);
      item.kv_row = packed ? static_cast<int>(found.kv_row) : 0;
      item.kv_head = head / p_.group;
      item.batch = packed ? 0 : found.batch;
    }
    __syncwarp();
    const Sequence& s = item.sequence;
    Park(Walk(p_, s, head, first, min(first + Traits::kQueries, s.q_len)));
    Step step, next;
    for (bool any = false, more = true; more; any = true) {  // a step behind: is it the last?
      more = Next(s, &next);
      if (!any) {
        if (lane_ == 0) item.is = more ? Item::kTiles : Item::kEmpty;
        if (!more) Emit({0, 0, 0, item_});
        if (more) next.flags |= Step::kStarts;
      } else {
        const int rows = static_cast<int>(p_.kv_len) - item.kv_row;  // beyond them come zeros
        const bool dirty = step.end < min(step.first + Traits::kKeys, rows);
        step.flags |= (more ? 0 : Step::kLast) | (dirty ? Step::kDirty : 0);
        Emit(step);
      }
      step = next;
    }
    item_ = (item_ + 1) % kItems;
  }

  // Moves the walk, which is parked in shared memory, to the next tile.
  __device__ __forceinline__ bool Next(const Sequence& s, Step* step) {
    Walk walk(p_, s, shared_.walk);
    const bool found = walk.Next();
    if (found) *step = {walk.first(), walk.limit(), walk.all_visible() ? 0 : Step::kMasked, item_};
    Park(walk);
    return found;
  }
  __device__ __forceinline__ void Park(const Walk& walk) {
    __syncwarp();  // all lanes have read it
    if (lane_ == 0) shared_.walk = walk.state();
    __syncwarp();
  }

  __device__ __forceinline__ void Emit(const Step& step) {
    const int at = steps_.stage;
    BarrierWait(SharedAddress(&shared_.step_empty[at]), steps_.phase ^ 1);
    if (lane_ == 0) {
      shared_.steps[at] = step;
      BarrierArrive(SharedAddress(&shared_.step_full[at]));
    }
    __syncwarp();
    steps_.Advance();
  }

  const ForwardParams& p_;
  ForwardShared<Traits>& shared_;
  const int lane_;
  int item_ = 0;
  StageCount<kSteps> steps_;
};

// ---- The loader: one thread. ----

template <typename Traits>
class Loader {
 public:
  __device__ __forceinline__ Loader(const ForwardMaps& maps, ForwardShared<Traits>& shared)
      : maps_(maps), shared_(shared) {}

  __device__ __forceinline__ void Run() {
    for (;; steps_.Advance()) {
      BarrierWait(SharedAddress(&shared_.step_full[steps_.stage]), steps_.phase);
      const Step& step = shared_.steps[steps_.stage];
      const Item& item = shared_.items[step.item];
      if (item.is != Item::kTiles) {
        LoadValues();
        LoadQueries(item);
        if (item.is == Item::kEnd) return;
        continue;
      }
      const bool starts = step.flags & Step::kStarts;
      const int first = item.kv_row + step.first;
      BarrierWait(SharedAddress(&shared_.k_empty[keys_.stage]), keys_.phase ^ 1);
      Load<Traits::kQueryChunks, Traits::kKeys>(maps_.k, shared_.k[keys_.stage],
                                                &shared_.k_full[keys_.stage], item.kv_head, first,
                                                item.batch);
      keys_.Advance();
      // With one place for Q, the consumers need the last V to be done with it.
      if (starts && Traits::kQueryStages > 1) LoadQueries(item);
      LoadValues();
      if (starts && Traits::kQueryStages == 1) LoadQueries(item);
      pending_ = {first, item.kv_head, item.batch, true};
    }
  }

 private:
  // V of the tile before, if there is one: its K came first, and so does the next tile's.
  __device__ __forceinline__ void LoadValues() {
    if (!pending_.any) return;
    BarrierWait(SharedAddress(&shared_.v_empty[values_.stage]), values_.phase ^ 1);
    Load<Traits::kValueChunks, Traits::kKeys>(maps_.v, shared_.v[values_.stage],
                                              &shared_.v_full[values_.stage], pending_.head,
                                              pending_.row, pending_.batch);
    values_.Advance();
    pending_.any = false;
  }

  // Tells the consumers of the item, and loads its Q where there is anything to compute.
  __device__ __forceinline__ void LoadQueries(const Item& item) {
    uint64_t* const full = &shared_.q_full[queries_.stage];
    BarrierWait(SharedAddress(&shared_.q_empty[queries_.stage]), queries_.phase ^ 1);
    if (item.is == Item::kTiles) {
      Load<Traits::kQueryChunks, Traits::kQueries>(maps_.q, shared_.q[queries_.stage], full,
                                                   item.head, item.q_row, item.batch);
    } else {
      BarrierArrive(SharedAddress(full));
    }
    queries_.Advance();
  }

  template <int kChunks, int kRows>
  __device__ __forceinline__ void Load(const CUtensorMap& map, char* to, uint64_t* full, int head,
                                       int row, int batch) {
    const uint32_t barrier = SharedAddress(full), address = SharedAddress(to);
    BarrierExpect(barrier, kChunks * kRows * kChunkRowBytes);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      LoadBox(address + c * kRows * kChunkRowBytes, map, barrier, c * kChunkColumns, head, row,
              batch);
    }
  }

  const ForwardMaps& maps_;
  ForwardShared<Traits>& shared_;
  struct {
    int row, head, batch;
    bool any;
  } pending_ = {};  // the tile whose V is to be loaded
  StageCount<kSteps> steps_;
  StageCount<Traits::kQueryStages> queries_;
  StageCount<Traits::kStages> keys_, values_;
};

// ---- The consumers. ----

// Of a thread's two rows, g and g + 8 of its warp's 16 (device/mma.cuh).
struct RowSums {
  float reference[2] = {-INFINITY, -INFINITY};  // log2 of what they are relative to; -inf: nothing
  float sum[2] = {0.0f, 0.0f};                  // this thread's columns only
};

// A thread's part of its warp's rows.
template <typename Traits>
struct Rows {
  // kvblock::ForwardRows gives FinishScores its view: rows.s[0][column / 8][4].
  kvblock::ForwardRows<Traits> state;
  uint32_t p[Traits::kKeys / 16][4];  // probabilities in 16 bits: the A operand
  RowSums sums;

  using ScoreArray = float[Traits::kKeys / 2];
  using OutputArray = float[Traits::kValueDim / 2];
  __device__ __forceinline__ ScoreArray& s() { return reinterpret_cast<ScoreArray&>(state.s); }
  __device__ __forceinline__ OutputArray& o() { return reinterpret_cast<OutputArray&>(state.o); }
};

// S = Q K^T for this warpgroup's rows.
template <typename Traits>
__device__ __forceinline__ void IssueScores(Rows<Traits>& rows, uint64_t q, uint64_t k) {
#pragma unroll
  for (int step = 0; step < Traits::kQueryDim / 16; ++step) {
    const int chunk = step / 4, in_row = step % 4 * 32;
    Wgmma<Traits::kKeys>::template Shared<typename Traits::T>(
        rows.s(), Advance(q, chunk * Traits::kQueries * kChunkRowBytes + in_row),
        Advance(k, chunk * Traits::kKeys * kChunkRowBytes + in_row), step > 0);
  }
}

// O += P V.
template <typename Traits>
__device__ __forceinline__ void IssueValues(Rows<Traits>& rows, uint64_t v) {
#pragma unroll
  for (int step = 0; step < Traits::kKeys / 16; ++step) {
    Wgmma<Traits::kValueDim>::template Registers<typename Traits::T, OperandLies::kDown>(
        rows.o(), rows.p[step], Advance(v, step * 16 * kChunkRowBytes));
  }
}

// Scores become probabilities, and join the sums. True: some row of this warp has a new reference,
// and what came before is to be scaled by `factor`.
template <typename Traits>
__device__ __forceinline__ bool Softmax(Rows<Traits>& rows, float to_log2, float (&factor)[2]) {
  constexpr int kColumns = Traits::kKeys / 8;
  constexpr float kOutgrown = 8.0f;
  auto& s = rows.state.s[0];
  bool moved = false;
  float reference[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float max[2] = {s[0][half * 2], s[0][half * 2 + 1]};
#pragma unroll
    for (int n = 1; n < kColumns; ++n) {
      max[0] = fmaxf(max[0], s[n][half * 2]);
      max[1] = fmaxf(max[1], s[n][half * 2 + 1]);
    }
    const float before = rows.sums.reference[half];
    const float tile = RowMax(fmaxf(max[0], max[1])) * to_log2;
    const bool outgrown = tile > before + kOutgrown;
    moved |= outgrown;
    const float now = outgrown ? tile : before;
    factor[half] = outgrown ? Exp2(before - now) : 1.0f;
    rows.sums.reference[half] = now;
    reference[half] = Reference(now, 1.0f);
  }
  float sum[2][2] = {};
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[n][e] = Exp2(fmaf(s[n][e], to_log2, -reference[e / 2]));
      sum[e / 2][e % 2] += s[n][e];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float& total = rows.sums.sum[half];
    total = fmaf(total, factor[half], sum[half][0] + sum[half][1]);
  }
  KeepAfter(rows.sums.sum);  // summed here, not where the sums are needed
  return __any_sync(~0u, moved);
}

template <typename Traits>
__device__ __forceinline__ void PackProbabilities(Rows<Traits>& rows) {
  auto& s = rows.state.s[0];
#pragma unroll
  for (int n = 0; n < Traits::kKeys / 8; ++n) {
    rows.p[n / 2][n % 2 * 2] = Pack<typename Traits::T>(s[n][0], s[n][1]);
    rows.p[n / 2][n % 2 * 2 + 1] = Pack<typename Traits::T>(s[n][2], s[n][3]);
  }
}

template <typename Traits>
__device__ __forceinline__ void Rescale(Rows<Traits>& rows, const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < Traits::kValueDim / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) rows.state.o[0][n][e] *= factor[e / 2];
  }
}

// Clears the rows of a V tile from `from` on, for this warpgroup's products. The other consumers do
// the same for theirs; all write zeros.
template <typename Traits>
__device__ __forceinline__ void ClearRows(char* v, int from, int thread, int barrier) {
  constexpr int kPieces = kChunkRowBytes / 16;  // of 16 bytes in a row
#pragma unroll 1
  for (int c = 0; c < Traits::kValueChunks; ++c) {
    uint4* chunk = reinterpret_cast<uint4*>(v + c * Traits::kKeys * kChunkRowBytes);
#pragma unroll 1
    for (int i = from * kPieces + thread; i < Traits::kKeys * kPieces; i += kWarpgroup) {
      chunk[i] = uint4{};
    }
  }
  FenceAsync();
  BarrierMeet(barrier, kWarpgroup);
}

// Lane t of four holds columns 2 t, 2 t + 1 of four blocks of 8 columns, a word each; it comes to
// hold all 8 columns of block t.
__device__ __forceinline__ uint4 GatherColumns(uint32_t (&w)[4], int t) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = (t & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t got = __shfl_xor_sync(~0u, upper ? w[i] : w[i + step], step);
      (upper ? w[i] : w[i + step]) = got;
    }
  }
  return {w[0], w[1], w[2], w[3]};
}

// Joins the sink, divides by the sums, and writes O and lse for the rows that exist.
template <typename Traits>
__device__ __forceinline__ void Write(const AttentionParams& p, const Item& item,
                                      const RowSums& sums, Rows<Traits>& rows, int row, int lane) {
  using T = typename Traits::T;
  const Sequence& s = item.sequence;
  const bool sinks = p.sinks != nullptr;
  const float sink =
      sinks
          ? __ldg(p.sinks + int64_t{BatchRow(p, p.sink_batch, s.batch)} * p.num_heads + item.head) *
                kLog2E
          : -INFINITY;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = item.first + row + half * 8 + lane / 4;
    float sum = RowSum(sums.sum[half]), max = sums.reference[half], factor = 1.0f;
    if (sinks) {  // one more score, with no value
      const float joint = fmaxf(max, sink);
      factor = Exp2(max - Reference(joint, 1.0f));
      sum = sum * factor + (sink == joint ? 1.0f : Exp2(sink - Reference(joint, 1.0f)));
      if (joint == -INFINITY) sum = 0.0f;
      max = joint;
    }
    const bool exists = query < s.q_rows, nothing = sum == 0.0f || query >= s.q_len;
    if (lane % 4 == 0 && exists) {
      p.lse[s.LseRow(p, item.head) + query] = nothing ? -INFINITY : max * kLn2 + logf(sum);
    }
    factor /= sum;
    T* const o = static_cast<T*>(p.o) +
                 ((s.q_row + query) * p.num_heads + item.head) * static_cast<int64_t>(p.value_dim);
#pragma unroll
    for (int n = 0; n < Traits::kValueDim / 8; n += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = rows.state.o[0][n + i][half * 2] * factor;
        const float high = rows.state.o[0][n + i][half * 2 + 1] * factor;
        words[i] = nothing ? 0 : Pack<T>(low, high);
      }
      const uint4 columns = GatherColumns(words, lane % 4);
      const int column = (n + lane % 4) * 8;
      if (exists && column < p.value_dim) *reinterpret_cast<uint4*>(o + column) = columns;
    }
  }
}

template <typename Traits>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const AttentionParams& p, ForwardShared<Traits>& shared,
                                      int group)
      : p_(p), shared_(shared), group_(group) {
    const bool finish = Traits::kKind == ForwardKind::kGeneral &&
                        (p.softcap > 0.0f || p.bias != nullptr || !(p.scale > 0.0f));
    rules_ = {finish, finish ? kLog2E : p.scale * kLog2E};
  }

  __device__ __forceinline__ void Run() {
    if (Traits::kTiles.turns && group_ == Traits::kConsumers - 1) PassTurn();
    const Item* item = NextItem();
    while (item->is != Item::kEnd) {
      Rows<Traits> rows;
      Clear(rows);
      if (item->is == Item::kEmpty) {
        LeaveStep();
        Leave(&shared_.q_empty[queries_.stage]);
        WriteItem(*item, rows.sums, rows);
        item = NextItem();
      } else {
        item = Compute(item, rows);
      }
    }
  }

 private:
  // Waits for the next item. Its Q is in queries_.stage.
  __device__ __forceinline__ const Item* NextItem() {
    if (items_ > 0) queries_.Advance();
    BarrierWait(SharedAddress(&shared_.q_full[queries_.stage]), queries_.phase);
    return &shared_.items[items_++ % kItems];
  }

  // Computes and writes an item, and those after it while each has KV tiles: with two places for Q,
  // the first product of an item is issued with the last of the one before. Returns the first item
  // that is not computed.
  __device__ __forceinline__ const Item* Compute(const Item* item, Rows<Traits>& rows) {
    float factor[2];
    BarrierWait(SharedAddress(&shared_.k_full[keys_.stage]), keys_.phase);
    WgmmaFence();
    IssueScores<Traits>(rows, QueriesOperand(), KeysOperand());
    WgmmaCommit();
    int flags = shared_.steps[steps_.stage].flags;
    WgmmaWait<0>();
    KeepAfter(rows.s());
    Finish(*item, flags, rows);
    Softmax<Traits>(rows, rules_.to_log2, factor);  // O is 0: nothing to scale
    PackProbabilities<Traits>(rows);

    const Item* next = item;
#pragma unroll 1
    for (;;) {
      const bool ends = flags & Step::kLast;  // the pending product ends its item
      if (ends) {
        if (Traits::kQueryStages == 1) break;
        next = NextItem();
        if (next->is != Item::kTiles) break;
      }
      BarrierWait(SharedAddress(&shared_.k_full[keys_.stage]), keys_.phase);
      if (Traits::kTiles.turns) WaitTurn();
      Pin(rows);
      WgmmaFence();
      IssueScores<Traits>(rows, QueriesOperand(), KeysOperand());
      WgmmaCommit();
      TakeValues();
      WgmmaFence();
      IssueValues<Traits>(rows, ValuesOperand());
      WgmmaCommit();
      if (Traits::kTiles.turns) PassTurn();
      flags = shared_.steps[steps_.stage].flags;
      WgmmaWait<1>();
      KeepAfter(rows.s());
      Finish(*next, flags, rows);
      const RowSums before = rows.sums;
      if (Traits::kQueryStages > 1 && ends) rows.sums = RowSums();
      // The wait for the product is in both branches, since the assembler moves it up as far as it
      // can: not above a branch, so the softmax runs under the product.
      if (Softmax<Traits>(rows, rules_.to_log2, factor)) {
        WgmmaWait<0>();
        KeepAfter(rows.o());
        if (!ends) Rescale<Traits>(rows, factor);
      } else {
        asm volatile("wgmma.wait_group.sync.aligned 0; // no row has moved" ::: "memory");
        KeepAfter(rows.o());
      }
      LeaveValues();
      PackProbabilities<Traits>(rows);
      if (Traits::kQueryStages > 1 && ends) {
        WriteItem(*item, before, rows);
        ClearOutput(rows);
        item = next;
      }
    }
    TakeValues();
    Pin(rows);
    WgmmaFence();
    IssueValues<Traits>(rows, ValuesOperand());
    WgmmaCommit();
    WgmmaWait<0>();
    KeepAfter(rows.o());
    LeaveValues();
    WriteItem(*item, rows.sums, rows);
    return Traits::kQueryStages == 1 ? NextItem() : next;
  }

  // Scores have arrived: K is free (and Q, after the last), and the scores are finished.
  __device__ __forceinline__ void Finish(const Item& item, int flags, Rows<Traits>& rows) {
    const bool masked = flags & Step::kMasked;
    int first = 0, end = 0;
    clear_from_ = Traits::kKeys;
    if (rules_.finish || masked) {
      const Step& step = shared_.steps[steps_.stage];
      first = step.first;
      end = step.end;
      if (flags & Step::kDirty) clear_from_ = end - first;
    }
    LeaveStep();
    Leave(&shared_.k_empty[keys_.stage]);
    if (flags & Step::kLast) Leave(&shared_.q_empty[queries_.stage]);
    keys_.Advance();
    if (rules_.finish || masked) {
      Sequence s = item.sequence;
      s.kv_len = min(s.kv_len, end);
      const int query = item.first + FirstRow();
      if (Traits::kKind == ForwardKind::kGeneral) {
        FinishScores<Traits>(p_, s, rules_, masked, item.head, rows.state, query, first, Lane());
      } else {
        MaskPositions<Traits>(s, rows.state, query + Lane() / 4, first + Lane() % 4 * 2);
      }
    }
  }

  __device__ __forceinline__ void Clear(Rows<Traits>& rows) {
    rows.sums = RowSums();
    ClearOutput(rows);
  }
  __device__ __forceinline__ void ClearOutput(Rows<Traits>& rows) {
#pragma unroll
    for (int i = 0; i < Traits::kValueDim / 2; ++i) rows.o()[i] = 0.0f;
  }
  __device__ __forceinline__ void WriteItem(const Item& item, const RowSums& sums,
                                            Rows<Traits>& rows) {
    Write<Traits>(p_, item, sums, rows, FirstRow(), Lane());
  }

  // V of the tile before has arrived, with all its rows in order.
  __device__ __forceinline__ void TakeValues() {
    BarrierWait(SharedAddress(&shared_.v_full[values_.stage]), values_.phase);
    if (clear_from_ < Traits::kKeys) {
      ClearRows<Traits>(shared_.v[values_.stage], clear_from_, Thread(),
                        1 + Traits::kConsumers + group_);
    }
  }
  __device__ __forceinline__ void LeaveValues() {
    Leave(&shared_.v_empty[values_.stage]);
    values_.Advance();
  }

  __device__ __forceinline__ void LeaveStep() {
    Leave(&shared_.step_empty[steps_.stage]);
    steps_.Advance();
  }

  // This warp is done with a place.
  __device__ __forceinline__ void Leave(uint64_t* empty) {
    if (Lane() == 0) BarrierArrive(SharedAddress(empty));
  }

  // Turns at the tensor cores: hardware barrier 1 + g lets consumer g in; the one before it in the
  // ring arrives there when its products are issued.
  __device__ __forceinline__ void WaitTurn() { BarrierMeet(1 + group_, 2 * kWarpgroup); }
  __device__ __forceinline__ void PassTurn() {
    BarrierPass(group_ == Traits::kConsumers - 1 ? 1 : 2 + group_, 2 * kWarpgroup);
  }

  // This warp's first row in the query tile.
  __device__ __forceinline__ int FirstRow() const { return group_ * 64 + Thread() / 32 * 16; }

  // What the products read and add to is computed before this point.
  __device__ __forceinline__ void Pin(Rows<Traits>& rows) {
    KeepAfter(rows.o());
#pragma unroll
    for (int step = 0; step < Traits::kKeys / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(rows.p[step][i])::"memory");
    }
  }

  __device__ __forceinline__ uint64_t QueriesOperand() const {
    return SharedOperand(SharedAddress(shared_.q[queries_.stage]) + group_ * 64 * kChunkRowBytes);
  }
  __device__ __forceinline__ uint64_t KeysOperand() const {
    return SharedOperand(SharedAddress(shared_.k[keys_.stage]));
  }
  __device__ __forceinline__ uint64_t ValuesOperand() const {
    return SharedOperand(SharedAddress(shared_.v[values_.stage]), Traits::kKeys * kChunkRowBytes);
  }
  __device__ __forceinline__ static int Thread() { return threadIdx.x % kWarpgroup; }
  __device__ __forceinline__ static int Lane() { return threadIdx.x % 32; }

  const AttentionParams& p_;
  ForwardShared<Traits>& shared_;
  const int group_;
  ScoreRules rules_;
  int clear_from_ = Traits::kKeys;  // rows of V from here on are not to be seen
  int items_ = 0;
  StageCount<kSteps> steps_;
  StageCount<Traits::kQueryStages> queries_;
  StageCount<Traits::kStages> keys_, values_;
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    AttentionForward(const __grid_constant__ ForwardParams p,
                     const __grid_constant__ ForwardMaps maps) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char raw[];
  auto& shared = *reinterpret_cast<ForwardShared<Traits>*>(raw);
  constexpr int kWarps = Traits::kConsumers * 4;
  if (threadIdx.x == 0) {
    PrefetchTensorMap(maps.q);
    PrefetchTensorMap(maps.k);
    PrefetchTensorMap(maps.v);
#pragma unroll
    for (int stage = 0; stage < Traits::kQueryStages; ++stage) {
      BarrierInit(SharedAddress(&shared.q_full[stage]), 1);
      BarrierInit(SharedAddress(&shared.q_empty[stage]), kWarps);
    }
#pragma unroll
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      BarrierInit(SharedAddress(&shared.k_full[stage]), 1);
      BarrierInit(SharedAddress(&shared.k_empty[stage]), kWarps);
      BarrierInit(SharedAddress(&shared.v_full[stage]), 1);
      BarrierInit(SharedAddress(&shared.v_empty[stage]), kWarps);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      BarrierInit(SharedAddress(&shared.step_full[step]), 1);
      BarrierInit(SharedAddress(&shared.step_empty[step]), kWarps);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  // The same for all lanes of a warp, which the compiler must see.
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (group == 0) {
    GiveRegisters<Traits::kTiles.producer_registers>();
    if (threadIdx.x < 32) {
      Planner<Traits>(p, shared).Run();
    } else if (threadIdx.x == 32) {
      Loader<Traits>(maps, shared).Run();
    }
  } else {
    TakeRegisters<Traits::kTiles.consumer_registers>();
    Consumer<Traits>(p, shared, group - 1).Run();
  }
#endif
}

}  // namespace kvblock::hopper
