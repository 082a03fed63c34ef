// The loader of Hopper's forward kernel (kernel.cuh), a thread: bulk copies of Q, K and V.
#pragma once

#include <cstdint>

#include "device/cluster.cuh"
#include "device/mbarrier.cuh"
#include "device/tensor_copy.cuh"
#include "ops/attention/hopper/forward/shared.cuh"

namespace kvblock::hopper {

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
      LoadKeys<Traits::kQueryChunks>(maps_.k, shared_.k[keys_.stage], &shared_.k_full[keys_.stage],
                                     item.kv_head, first, item.batch);
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
    if constexpr (Traits::kNarrow) {
      LoadTransposed();
    } else {
      LoadKeys<Traits::kValueChunks>(maps_.v, shared_.v[values_.stage],
                                     &shared_.v_full[values_.stage], pending_.head, pending_.row,
                                     pending_.batch);
    }
    values_.Advance();
    pending_.any = false;
  }

  // The same of 8 bits: rows are columns of V, and every CTA of a cluster loads its part of them.
  __device__ __forceinline__ void LoadTransposed() {
    static_assert(Traits::kValueChunks == 1);
    const uint32_t barrier = SharedAddress(&shared_.v_full[values_.stage]);
    const int from = Traits::kCluster == 1 ? 0 : ClusterRank() * Traits::kLoadedValueRows;
    const uint32_t to = SharedAddress(shared_.v[values_.stage]) + from * kChunkRowBytes;
    BarrierExpect(barrier, (Traits::kValueRows - Traits::kOnes) * kChunkRowBytes);
    if constexpr (Traits::kCluster == 1) {
      LoadBox(to, maps_.v, barrier, pending_.row, from, pending_.head, pending_.batch);
    } else {
      LoadBoxToCtas(to, maps_.v, barrier, pending_.row, from, pending_.head, pending_.batch,
                    (1 << Traits::kCluster) - 1);
    }
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
      LoadBox(address + c * kRows * kChunkRowBytes, map, barrier, c * kColumns, head, row, batch);
    }
  }

  // A tile of K or V. In a cluster every CTA loads its part of the rows, for all.
  template <int kChunks>
  __device__ __forceinline__ void LoadKeys(const CUtensorMap& map, char* to, uint64_t* full,
                                           int head, int row, int batch) {
    if constexpr (Traits::kCluster == 1) {
      Load<kChunks, Traits::kKeys>(map, to, full, head, row, batch);
    } else {
      const uint32_t barrier = SharedAddress(full);
      const int from = ClusterRank() * Traits::kLoadedKeys;
      const uint32_t address = SharedAddress(to) + from * kChunkRowBytes;
      BarrierExpect(barrier, kChunks * Traits::kKeys * kChunkRowBytes);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        LoadBoxToCtas(address + c * Traits::kKeys * kChunkRowBytes, map, barrier, c * kColumns,
                      head, row + from, batch, (1 << Traits::kCluster) - 1);
      }
    }
  }

  static constexpr int kColumns = kChunkRowBytes / Traits::kElementBytes;  // of a chunk

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

}  // namespace kvblock::hopper
