// Paged attention of decode rows over few keys: a CTA for each row of q and key head, and nothing
// to put together.
//
// What takes time here is not to read, but one wait after another, and code that is far away when a
// launch begins. So a CTA does not count what others have to do (schedule/shares.cuh): row i of a
// call is taken for sequence i's, whose length and blocks are asked for beside everything else that
// is. Where that is wrong, the sequence is looked for.
//
//   ask for the sequence's length and blocks, the layer, rows of Q; whether query_start falls
//   all meet
//   a warp, by itself, for every kWarps-th 16 keys, kStages of these ahead:
//     S = Q K^T; scale, softcap; mask; new maxima; O += P V      as in forward/kernel.cuh
//   all meet, join the warps' results, and write O and lse
//
// A tile is as many queries as have 16 packed rows at the most (schedule/packed_rows.cuh), from the
// first of their sequence on; CTAs of other rows have nothing to do.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "device/cp_async.cuh"
#include "device/fast_math.cuh"
#include "device/shared.cuh"
#include "ops/attention/combine/result.cuh"
#include "ops/attention/contract/launch.h"
#include "ops/attention/generic/forward/kernel.cuh"
#include "ops/attention/generic/paged/params.cuh"
#include "ops/attention/generic/split/launch.cuh"
#include "ops/attention/generic/tile.cuh"
#include "ops/attention/mask/forward_scores.cuh"
#include "ops/attention/schedule/packed_rows.cuh"
#include "ops/attention/schedule/pages.cuh"

namespace kvblock::generic {

// Blocks of a table, and sequences of all calls, that a CTA can look at.
constexpr int kShortBlocks = 2048, kShortSequences = 2048;

template <typename T_, int kDim_, int kWarps_, int kCtas_>
struct ShortTraits {
  using T = T_;
  static constexpr int kDim = kDim_, kWarps = kWarps_, kThreads = kWarps * 32, kCtas = kCtas_;
  static constexpr int kRows = 16, kKeys = 16;  // of a warp at a time
  static constexpr int kRowBlocks = 1, kStages = 3;
  static constexpr ForwardShape kShape = {kRows, kKeys, 1, kCtas, true};
  using QTile = SharedTile<kRows, kDim>;
  using KvTile = SharedTile<kKeys, kDim>;
  static constexpr int kStageBytes = 2 * KvTile::kBytes, kWarpBytes = kStages * kStageBytes;
  static constexpr int kSharedBytes = kWarps * kWarpBytes + QTile::kBytes;
  static_assert(kRows * kDim * 4 <= kStageBytes);  // a warp's O
};

template <typename Traits>
class ShortForward {
 public:
  using T = typename Traits::T;
  static constexpr int kDim = Traits::kDim, kKeys = Traits::kKeys, kStages = Traits::kStages;
  static constexpr int kWarps = Traits::kWarps, kThreads = Traits::kThreads;
  using KvTile = typename Traits::KvTile;
  using QTile = typename Traits::QTile;

  __device__ __forceinline__ explicit ShortForward(const PagedParams& p)
      : p_(p),
        kv_head_(static_cast<int>(blockIdx.x)),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        shared_(static_cast<uint32_t>(__cvta_generic_to_shared(DynamicShared())) +
                warp_ * Traits::kWarpBytes),
        rules_(MakeScoreRules(p)) {}

  __device__ __forceinline__ void Run() {
    const int rows = static_cast<int>(p_.q_len), sequences = static_cast<int>(p_.by_sequences.d);
    const int row = static_cast<int>(blockIdx.y);
    const int call = static_cast<int>(p_.by_rows(static_cast<uint32_t>(row)));
    const int in_call = row - call * rows;
    int member = call * sequences + min(in_call, sequences - 1);
    // Nobody waits for any of this before all of it is on its way.
    AskForBlocks(member);
    AskForQueries(row, rows - in_call);
    CopyAsyncCommit();
    const int32_t* const lens = p_.kv_lens + member;
    const int32_t* const start = p_.query_start != nullptr ? p_.query_start + member + call
                                 : p_.q_lens != nullptr    ? p_.q_lens + call
                                                           : lens;
    const int32_t* const other = StartOf(threadIdx.x, start);
    const int next = p_.query_start != nullptr ? 1 : 0;
    const int kv_len = __ldg(lens), layer = LayerNumber(p_, p_.layer_batch > 1 ? call : 0);
    const int own_start = __ldg(start), own_next = __ldg(start + next);
    const int other_start = __ldg(other), other_next = __ldg(other + next);
    const auto bounded = [&](int at) { return Between(at, 0, rows); };
    const bool falls = bounded(other_next) < bounded(other_start) || LaterFalls(start);
    CopyAsyncWait<0>();
    if (__syncthreads_or(falls)) return WriteNothing(row);
    layer_ = LayerAt(p_, layer);
    int first = 0, end = rows;
    if (p_.query_start != nullptr) {
      first = bounded(own_start);
      end = bounded(own_next);
    } else if (p_.q_lens != nullptr) {
      end = bounded(own_start);
    }
    Sequence s = MakeMember(p_, member, call, first, end, kv_len);
    if (in_call < first || in_call >= end) {
      const int found = CountFrom(call, in_call) - 1;
      if (found < 0) return WriteNothing(row);
      s = MemberSequence(p_, call * sequences + found);
      if (row >= s.q_row + s.q_len) return WriteNothing(row);
      AskForBlocks(s.batch);
      CopyAsyncCommit();
      CopyAsyncWait<0>();
      __syncthreads();
    }
    const int query = row - static_cast<int>(s.q_row), each = QueryOf(p_, Traits::kRows);
    if (query != 0 && query % each != 0) return;
    const int queries = min(each, s.q_len - query);
    FindKeys(s, query, queries);
    Compute();
    Write(s, query, queries * p_.group);
  }

 private:
  // ---- whose row it is -------------------------------------------------------------------

  __device__ __forceinline__ void AskForBlocks(int member) const {
    const int32_t* const table = p_.block_tables + int64_t{member} * p_.table_width;
#pragma unroll 1
    for (int i = threadIdx.x; i < p_.table_width; i += kThreads) {
      CopyAsync<4>(blocks() + i, table + i);
    }
  }
  // Where query_start says where a member begins; `none`: where there is no such member.
  __device__ __forceinline__ const int32_t* StartOf(int member, const int32_t* none) const {
    const int call = static_cast<int>(p_.by_sequences(static_cast<uint32_t>(member)));
    const bool there = p_.query_start != nullptr && member < p_.batch;
    return there ? p_.query_start + member + call : none;
  }
  // Whether a member that is this thread's has less than no rows, its first one apart: then all
  // rows are nobody's.
  __device__ __forceinline__ bool LaterFalls(const int32_t* none) const {
    bool falls = false;
    if (p_.query_start == nullptr) return falls;
#pragma unroll 1
    for (int member = threadIdx.x + kThreads; member < p_.batch; member += kThreads) {
      const int32_t* const start = StartOf(member, none);
      const int rows = static_cast<int>(p_.q_len);
      falls = falls || Between(__ldg(start + 1), 0, rows) < Between(__ldg(start), 0, rows);
    }
    return falls;
  }
  // How many sequences of a call begin at a row or before.
  __device__ __forceinline__ int CountFrom(int call, int row) const {
    const int sequences = static_cast<int>(p_.by_sequences.d);
    int count = 0;
#pragma unroll 1
    for (int some = 0; some < sequences; some += kThreads) {
      const int sequence = some + static_cast<int>(threadIdx.x);
      int first = 0, end;
      if (sequence < sequences) FindRows(p_, call, sequence, &first, &end);
      count += __syncthreads_count(sequence < sequences && first <= row);
    }
    return count;
  }
  // Zeros and -inf: of a row of no sequence.
  __device__ __forceinline__ void WriteNothing(int row) const {
    const int64_t head = int64_t{row} * p_.num_heads + kv_head_ * p_.group;
    uint4* const o = static_cast<uint4*>(p_.o) + head * (p_.value_dim / 8);
#pragma unroll 1
    for (int i = threadIdx.x; i < p_.group * (p_.value_dim / 8); i += kThreads) {
      o[i] = uint4{0, 0, 0, 0};
    }
    if (p_.lse == nullptr) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < p_.group; i += kThreads) p_.lse[head + i] = -INFINITY;
  }

  // ---- queries and keys ------------------------------------------------------------------

  // Starts to copy packed rows from a row of q on, of which there are so many in its call. Whose
  // they are nobody knows yet; nobody reads what comes of others'.
  __device__ __forceinline__ void AskForQueries(int row, int most) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < Traits::kRows * kDim / 8; i += kThreads) {
      const int packed = i / (kDim / 8), column = i % (kDim / 8) * 8, query = QueryOf(p_, packed);
      const int head = kv_head_ * p_.group + packed - query * p_.group;
      const bool there = query < most && column < p_.head_dim;
      const int64_t index = (int64_t{row} + query) * p_.num_heads + head;
      const T* const q = static_cast<const T*>(p_.q) + (there ? index * p_.head_dim + column : 0);
      CopyAsync16(QueryTile() + QTile::Offset(packed, column), q, there);
    }
  }

  // What the tile's queries see, and what this thread's two rows do. Rows that do not exist see
  // every key there is.
  __device__ __forceinline__ void FindKeys(const Sequence& s, int query, int queries) {
    s.VisibleKeys(query, query + queries, &begin_, &end_);
    if (begin_ >= end_ || !layer_.there) begin_ = end_ = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = QueryOf(p_, half * 8 + lane_ / 4);
      const bool there = own < queries;
      first_of_row_[half] = there ? s.FirstKey(query + own) : 0;
      end_of_row_[half] = there ? s.EndKey(query + own) : INT32_MAX;
    }
  }

  // The first of this warp's keys number `step`.
  __device__ __forceinline__ int KeyOf(int step) const {
    return begin_ / kKeys * kKeys + (step * kWarps + warp_) * kKeys;
  }

  // Starts to copy this warp's keys number `step`, if there are any, to a stage. A lane finds one;
  // eight of them copy 128 bytes of a row.
  __device__ __forceinline__ void Load(int step, int stage) {
    const int key = KeyOf(step);
    if (key < end_) {
      const int own = key + lane_ % kKeys;
      PagedKey at = {-1, 0};
      if (own >= begin_ && own < end_) {
        const int page = static_cast<int>(p_.block_size(static_cast<uint32_t>(own)));
        at = {blocks()[page], own - page * static_cast<int>(p_.block_size.d)};
      }
      const bool has = HasBlock(p_, at);
      const uint32_t there = __ballot_sync(~0u, has);
      if (lane_ == 0) there_[stage] = there;
      const uint32_t k_row = has ? PageRow(p_.k_strides, at) : 0;
      const uint32_t v_row = has ? PageRow(p_.v_strides, at) : 0;
      const auto bytes = [&](uint32_t units) { return static_cast<uint64_t>(units) * p_.unit; };
      const int chunk = lane_ % 8;
      const char* const k = layer_.k + bytes(p_.k_strides.head * kv_head_) + chunk * 16;
      const char* const v = layer_.v + bytes(p_.v_strides.head * kv_head_) + chunk * 16;
      const uint32_t k_tile = shared_ + stage * Traits::kStageBytes;
#pragma unroll
      for (int i = 0; i < kKeys; i += 4) {
        const int row = i + lane_ / 8;
        const char* const k_from = StepFrom(k, __shfl_sync(~0u, k_row, row), p_.unit);
        const char* const v_from = StepFrom(v, __shfl_sync(~0u, v_row, row), p_.unit);
        const bool valid = (there >> row & 1) != 0;
#pragma unroll
        for (int c = 0; c < kDim / 8; c += 8) {
          const int column = (c + chunk) * 8;
          const uint32_t to = k_tile + KvTile::ChunkOffset(row, c + chunk);
          CopyAsync16(to, k_from + c * 16, valid && column < p_.head_dim);
          CopyAsync16(to + KvTile::kBytes, v_from + c * 16, valid && column < p_.value_dim);
        }
      }
    }
    CopyAsyncCommit();
  }

  __device__ __forceinline__ void Compute() {
    there_ = there_of_warps()[warp_];
    BeginRows(rows_);
    const LaneBlock<QTile::kRowBytes / 2, BlockOrder::kRowsFirst> at(lane_);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      LoadQueries<Traits>(queries_.held[step], QueryTile(), 0, step, at);
    }
    int stage = 0;
    // Code is as far away as keys when a launch begins: there is one copy of it, and the first
    // rounds only load.
#pragma unroll 1
    for (int step = -kStages; KeyOf(step) < end_; ++step) {
      if (step >= 0) {
        CopyAsyncWait<kStages - 1>();
        __syncwarp();  // these keys have arrived for all lanes
        ComputeKeys(KeyOf(step), stage);
        __syncwarp();  // all lanes are done with them
      }
      Load(step + kStages, stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    CopyAsyncWait<0>();
    __syncwarp();
  }

  __device__ __forceinline__ void ComputeKeys(int key, int stage) {
    const uint32_t k_tile = shared_ + stage * Traits::kStageBytes;
    Multiply<Traits>(rows_, queries_, 0, k_tile, 0, lane_);
    if (rules_.finish) ScaleScores<Traits>(p_, rows_);
    constexpr uint32_t kAll = (uint64_t{1} << kKeys) - 1;
    const uint32_t there = there_[stage];
    const bool whole = (there & kAll) == kAll && max(first_of_row_[0], first_of_row_[1]) <= key &&
                       min(end_of_row_[0], end_of_row_[1]) >= key + kKeys;
    if (!__all_sync(~0u, whole)) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int in_tile = n * 8 + lane_ % 4 * 2 + e % 2, j = key + in_tile;
          if (j < first_of_row_[e / 2] || j >= end_of_row_[e / 2] || (there >> in_tile & 1) == 0) {
            rows_.s[0][n][e] = -INFINITY;
          }
        }
      }
    }
    Rescale<Traits>(p_, rows_, rules_.to_log2);
    Accumulate<Traits>(p_, rows_, rules_.to_log2, k_tile + KvTile::kBytes, lane_);
  }

  // ---- results ---------------------------------------------------------------------------

  // Joins what the warps have, of so many packed rows from a query on, and writes it. A warp leaves
  // its O where its keys were, columns of a row swapped in pieces of 8 against bank conflicts.
  __device__ __forceinline__ void Write(const Sequence& s, int query, int rows) {
    __shared__ PartialSum sums[kWarps][Traits::kRows];
    float* const of_warps = reinterpret_cast<float*>(DynamicShared());
    constexpr int kApart = Traits::kWarpBytes / 4;  // floats from a warp to the next
    const float own_sums[2] = {RowSum(rows_.sum[0][0]), RowSum(rows_.sum[0][1])};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + lane_ / 4;
      if (row >= rows) continue;
      if (lane_ % 4 == 0) sums[warp_][row] = {rows_.max[0][half] * rules_.to_log2, own_sums[half]};
      float* const to = of_warps + warp_ * kApart + row * kDim + lane_ % 4 * 2;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        *reinterpret_cast<float2*>(to + Swapped(n, row) * 8) =
            make_float2(rows_.o[0][n][half * 2], rows_.o[0][n][half * 2 + 1]);
      }
    }
    __syncthreads();
    // Four columns a thread, kDim / 4 threads a row.
    constexpr int kAcross = kDim / 4;
    const PackedRows packed(p_, kv_head_, s.q_rows);
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * kAcross; i += kThreads) {
      const int row = i / kAcross, column = i % kAcross * 4;
      if (column >= p_.value_dim) continue;
      float top = -INFINITY;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) top = fmaxf(top, sums[warp][row].max);
      const float reference = Reference(top, 1.0f);
      PartialRow result = {{top, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        const float factor = Exp2(sums[warp][row].max - reference);
        result.sums.sum += sums[warp][row].sum * factor;
        result.Add(*reinterpret_cast<const float4*>(of_warps + warp * kApart + row * kDim +
                                                    Swapped(column / 8, row) * 8 + column % 8),
                   factor);
      }
      ResultRow<T>(p_, s, packed, query * p_.group + row, column).Write(result);
    }
  }
  __device__ __forceinline__ static int Swapped(int n, int row) { return n ^ (row % 8); }

  // Behind the stages of all warps.
  __device__ __forceinline__ static uint32_t QueryTile() {
    return static_cast<uint32_t>(__cvta_generic_to_shared(DynamicShared())) +
           kWarps * Traits::kWarpBytes;
  }
  __device__ __forceinline__ static auto& blocks() {
    __shared__ int32_t blocks[kShortBlocks];
    return blocks;
  }
  // Of each stage, which of its keys there are, a bit each.
  __device__ __forceinline__ static auto& there_of_warps() {
    __shared__ uint32_t there[kWarps][kStages];
    return there;
  }

  const PagedParams& p_;
  const int kv_head_, lane_, warp_;
  const uint32_t shared_;  // this warp's stages
  const ScoreRules rules_;
  PagedLayer layer_;
  int begin_, end_;  // of the keys that some row of the tile sees
  int first_of_row_[2], end_of_row_[2];
  uint32_t* there_;
  QueryFragments<Traits> queries_;
  ForwardRows<Traits> rows_;
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtas)
    AttentionShort(const __grid_constant__ PagedParams p) {
  ShortForward<Traits>(p).Run();
}

// ---- launching ----------------------------------------------------------------------

// Bytes of keys and values that a multiprocessor may have more than its part of all, so that no
// unit is cut: about what it reads while the pieces of units would be put together, and while what
// the other kernels do before their first load takes longer.
constexpr int64_t kShortExtraBytes = 320 << 10;

// Whether a call is worth it, of whose units a multiprocessor may have kCtas at a time.
template <typename Traits>
bool ServesShort(const kvblock_paged_attention& a, const Gpu& gpu) {
  constexpr int kBesides = kShortBlocks * 4 + 4096, kBytes = Traits::kSharedBytes + kBesides;
  const int64_t members = int64_t{a.calls} * a.sequences, units = a.calls * a.rows * a.num_kv_heads;
  const int64_t group = a.num_heads / a.num_kv_heads;
  const int64_t tile_rows = (a.query_start != nullptr ? 1 : a.rows) * group;
  const bool decodes = a.query_start == nullptr || a.rows <= a.sequences;
  if (!decodes || tile_rows > Traits::kRows || a.split_size > 0 || RowsDiffer(a) ||
      a.table_first != nullptr || a.table_width > kShortBlocks || members > kShortSequences ||
      kBytes > gpu.cta_shared || kBytes * Traits::kCtas > gpu.multiprocessor_shared ||
      units > gpu.multiprocessors * Traits::kCtas) {
    return false;
  }
  const int64_t bytes = PagedKeysOfTable(a) * (a.head_dim + a.value_dim) * 2;  // of a unit
  const int64_t most = (units + gpu.multiprocessors - 1) / gpu.multiprocessors;
  return most * bytes - units * bytes / gpu.multiprocessors <= kShortExtraBytes;
}

template <typename Traits>
const char* LaunchShort(const kvblock_paged_attention& a, const Gpu& gpu, cudaStream_t stream) {
  static PerDevice<bool> prepared;
  bool done = false;
  cudaError_t status = prepared.Get(gpu.device, &done, [](bool* done) {
    *done = true;
    const cudaError_t status = cudaFuncSetAttribute(
        AttentionShort<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes);
    return status == cudaSuccess ? PreferShared(AttentionShort<Traits>) : status;
  });
  if (status != cudaSuccess) return CudaResult(status);
  const SplitWork work = {Traits::kRows, Traits::kRows, 1, true, false};
  const PagedParams p = MakePagedParams(a, work, Cut{1, 1, 1, false}, INT32_MAX);
  const dim3 ctas(static_cast<unsigned>(a.num_kv_heads), static_cast<unsigned>(a.calls * a.rows));
  return CudaResult(
      LaunchGrid(AttentionShort<Traits>, ctas, Traits::kThreads, Traits::kSharedBytes, stream, p));
}

}  // namespace kvblock::generic
