// What lies between the attentions of two layers of a Llama, in one kernel, for up to 64 rows:
//
//   x += attended @ out
//   hidden = silu(norm(x) @ gate) * (norm(x) @ up)
//   x += hidden @ down
//   q, k, v = norm(x) @ the next layer's weights; q and k are turned, k and v go to their slots
//
// x is float32 [rows, width]; all that is multiplied is bfloat16, weights are [outputs, inputs].
//
// The products are small. A GPU reads all weights of a layer of 7 MB in under two microseconds, and
// takes twice as long to begin and end a kernel. So one kernel stays: a CTA has its part of all
// four weights in shared memory, and asks for them as it begins, since they wait for nobody. Only
// the rows are waited for: all CTAs meet before each product, which wants a cooperative launch.
//
// Four CTAs are a cluster. A cluster has some columns of each product, in tiles of 8, and each of
// its CTAs a quarter of the inputs: so a CTA reads a quarter of the rows' numbers, not all. Then
// each sends its sums of a quarter of the rows to one of the four, into its shared memory; that one
// adds up what came, always in the same order: the same bits every time. Nobody waits for a
// cluster, but each for what is sent to it.
//
// A norm is a factor of a whole row, which nobody knows before all of x has been read. So x times
// the norm's weight is multiplied, and the sums are multiplied by the factor.
#include <cuda_bf16.h>

constexpr int kCtas = 4;  // of a cluster
constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kTile = 8;  // columns that the tensor cores have at a time

#ifndef KVBLOCK_EMULATOR
#include <cooperative_groups.h>

#include "instructions.cuh"

// Four matrices of 8 x 8, of which each lane names a row, as the tensor cores want them.
__device__ __forceinline__ void LoadMatrices(unsigned (&r)[4], const __nv_bfloat16* row) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(place)
               : "memory");
}

// What another multiprocessor may have written in this kernel: from L2.
__device__ __forceinline__ float2 LoadFresh(const float2* from) {
  float2 x;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.x), "=f"(x.y)
               : "l"(from)
               : "memory");
  return x;
}
__device__ __forceinline__ float4 LoadFresh(const float4* from) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(from)
               : "memory");
  return x;
}
__device__ __forceinline__ void PrefetchToL2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
// Loads it here, not where it is first used.
__device__ __forceinline__ void Now(int& x) { asm volatile("" : "+r"(x)); }

__device__ __forceinline__ int ClusterRank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
// After the wait all CTAs of the cluster have begun, and made their barriers before they arrived.
__device__ __forceinline__ void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void ClusterWait() {
  asm volatile("barrier.cluster.wait;" ::: "memory");
}
// A barrier of one phase: so many bytes are sent to it.
__device__ __forceinline__ void MakeBarrier(unsigned long long* barrier, int bytes) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
  asm volatile(
      "mbarrier.init.shared.b64 [%0], 1;"
      " fence.mbarrier_init.release.cluster;"
      " mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(place),
      "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void WaitForSent(unsigned long long* barrier) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
  unsigned done;
  do {
    asm volatile(
        "{ .reg .pred p;"
        " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;"
        " selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(place)
        : "memory");
  } while (done == 0);
}
// Sends one number or two to this place in a CTA of the cluster, and tells its barrier.
__device__ __forceinline__ unsigned PlaceIn(const void* own, int rank) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(own));
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(rank));
  return there;
}
__device__ __forceinline__ void Send(const float* own, float x, const unsigned long long* barrier,
                                     int rank) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                   PlaceIn(own, rank)),
               "f"(x), "r"(PlaceIn(barrier, rank))
               : "memory");
}
__device__ __forceinline__ void Send(const float* own, float x, float y,
                                     const unsigned long long* barrier, int rank) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          PlaceIn(own, rank)),
      "f"(x), "f"(y), "r"(PlaceIn(barrier, rank))
      : "memory");
}
// All threads of the grid meet, and see what the others wrote.
__device__ __forceinline__ void GridMeet() { cooperative_groups::this_grid().sync(); }
extern __shared__ uint4 shared[];
#endif

// A weight [kOutputs, kInputs], of which a cluster has some rows and a CTA a quarter of the inputs.
// Rows are dealt out by tiles of 8. Where tiles belong together, kRun tiles and kParts - 1 times as
// many below them, a cluster has all parts of a tile, side by side: gate and up, or the two halves
// of a head.
template <int kOutputs, int kInputs_, int kClusters_, int kParts_ = 1,
          int kRun = kOutputs / kParts_ / kTile>
struct Weight {
  static constexpr int kInputs = kInputs_, kClusters = kClusters_, kParts = kParts_;
  static constexpr int kDepth = kInputs / kCtas, kPitch = kDepth + 8;  // no bank is asked twice
  static constexpr int kAll = kOutputs / kParts / kTile;               // tiles, each of all parts
  static constexpr int kMost = (kAll + kClusters - 1) / kClusters * kParts;  // of a cluster
  static constexpr int kNumbers = kMost * kTile * kPitch;
  static constexpr int kApart = kRun * kTile;  // outputs, of a part from the next one
  static_assert(kOutputs % (kParts * kRun * kTile) == 0 && kDepth % 16 == 0);

  // How many tiles a cluster has, all parts counted, and which output the first part of one begins
  // with.
  static __device__ int Tiles(int cluster) {
    return (kAll - cluster + kClusters - 1) / kClusters * kParts;
  }
  static __device__ int FirstOf(int tile) {
    return tile / kRun * (kParts * kApart) + tile % kRun * kTile;
  }

  // What is sent to a CTA: from each of the cluster, sums of its quarter of the rows. Lanes that
  // send together meet different banks.
  static constexpr int kSumPitch = (kMost | 1) * kTile;
  static constexpr __host__ __device__ int SumsOf(int rows) { return rows * kSumPitch; }
  // What rows take.
  static constexpr __host__ __device__ int FloatsOf(int rows) { return rows * kPitch / 2; }
  static __device__ int BytesSent(int rows, int cluster) {
    return rows * Tiles(cluster) * kTile * static_cast<int>(sizeof(float));
  }

  static __device__ void Load(__nv_bfloat16* to, const __nv_bfloat16* from, int cluster, int rank) {
    constexpr int kChunks = kDepth / 8;  // of 16 bytes
    const int rows = Tiles(cluster) * kTile;
    for (int i = threadIdx.x; i < rows * kChunks; i += kThreads) {
      const int row = i / kChunks, at = i % kChunks * 8;
      const int own = row / kTile;
      const int output =
          FirstOf(cluster + own / kParts * kClusters) + own % kParts * kApart + row % kTile;
      Copy16(to + row * kPitch + at,
             from + static_cast<long long>(output) * kInputs + rank * kDepth + at);
    }
  }
};

// A CTA's quarter of rows of bfloat16.
template <typename W>
__device__ void LoadRows(__nv_bfloat16* to, const __nv_bfloat16* from, int rows, int rank) {
  constexpr int kChunks = W::kDepth / 8;
  for (int i = threadIdx.x; i < rows * kChunks; i += kThreads) {
    const int row = i / kChunks, at = i % kChunks * 8;
    Copy16(to + row * W::kPitch + at,
           from + static_cast<long long>(row) * W::kInputs + rank * W::kDepth + at);
  }
}

// What comes to a CTA for a product: numbers, a barrier that counts them, and of each CTA of the
// cluster the squares of its quarter of the rows.
struct Incoming {
  float* sums;
  unsigned long long* barrier;
  float* squares;
};

// A CTA's quarter of the inputs of rows of x, times the norm's weight. The sums of their squares go
// to who adds up these rows.
template <typename W, int kRows>
__device__ void LoadNormed(__nv_bfloat16* to, const Incoming& incoming, const float* x,
                           const float* norm, int rows, int rank) {
  constexpr int kLanes = kThreads / kRows;  // that share a row
  constexpr int kPieces = (W::kDepth / 4 + kLanes - 1) / kLanes;
  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const float* const from = x + static_cast<long long>(row) * W::kInputs + rank * W::kDepth;
  float4 numbers[kPieces] = {}, factors[kPieces] = {};
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int at = (lane + i * kLanes) * 4;
    if (row >= rows || at >= W::kDepth) continue;
    numbers[i] = LoadFresh(reinterpret_cast<const float4*>(from + at));
    factors[i] = *reinterpret_cast<const float4*>(norm + rank * W::kDepth + at);
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int at = (lane + i * kLanes) * 4;
    const float4 v = numbers[i], g = factors[i];
    sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    if (at >= W::kDepth) continue;
    const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(v.x * g.x, v.y * g.y),
                                     __floats2bfloat162_rn(v.z * g.z, v.w * g.w)};
    *reinterpret_cast<uint2*>(to + row * W::kPitch + at) = *reinterpret_cast<const uint2*>(pairs);
  }
#pragma unroll
  for (int far = kLanes / 2; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, far);
  if (lane == 0) {
    constexpr int kQuarter = kRows / kCtas;
    Send(incoming.squares + rank * kQuarter + row % kQuarter, sum, incoming.barrier,
         row / kQuarter);
  }
}

// Multiplies the rows by the cluster's tiles, both a CTA's quarter of the inputs, and sends the
// sums to who adds them up.
template <typename W, int kRowTiles>
__device__ void Multiply(const __nv_bfloat16* rows, const __nv_bfloat16* weight,
                         const Incoming& incoming, int tiles, int rank) {
  constexpr int kTeams = kWarps / kRowTiles;  // warps that have the same rows share the tiles
  constexpr int kOwn = (W::kMost + kTeams - 1) / kTeams, kPairs = (kOwn + 1) / 2;
  constexpr int kSteps = W::kDepth / 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = warp % kRowTiles * 16, team = warp / kRowTiles;
  if (team >= tiles) return;
  // Lanes name rows of two tiles; where there is no tile, of the last one, whose products nobody
  // sends twice.
  const __nv_bfloat16* const a_from = rows + (first_row + lane % 16) * W::kPitch + lane / 16 * 8;
  const __nv_bfloat16* b_from[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int tile = team + (i * 2 + lane / 16) * kTeams;
    const int row = (tile < tiles ? tile : tiles - 1) * kTile + lane % 8;
    b_from[i] = weight + row * W::kPitch + lane / 8 % 2 * 8;
  }
  float c[kPairs * 2][4] = {};
  unsigned a[2][4], b[2][kPairs][4];  // of this step and the next one
  const auto load = [&](int step) {
    LoadMatrices(a[step % 2], a_from + step * 16);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) LoadMatrices(b[step % 2][i], b_from[i] + step * 16);
  };
  load(0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) load(step + 1);
    const unsigned (&own_a)[4] = a[step % 2];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const unsigned (&own_b)[4] = b[step % 2][i];
      Mma(c[i * 2], own_a, own_b[0], own_b[1]);
      if (i * 2 + 1 < kOwn) Mma(c[i * 2 + 1], own_a, own_b[2], own_b[3]);
    }
  }
  constexpr int kQuarter = kRowTiles * 16 / kCtas;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int tile = team + i * kTeams;
    if (tile >= tiles) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + half * 8 + lane / 4;
      const int place = (rank * kQuarter + row % kQuarter) * W::kSumPitch + tile * kTile;
      Send(incoming.sums + place + lane % 4 * 2, c[i][half * 2], c[i][half * 2 + 1],
           incoming.barrier, row / kQuarter);
    }
  }
}

// Adds up a CTA's quarter of the rows, two columns at a time: finish(row, column, sums of each
// part, what begin(row, column) returned before the sums came). `row` counts from the quarter's
// first on.
template <typename W, int kRows, typename Begin, typename Finish>
__device__ void ForEachSum(const Incoming& incoming, int cluster, int rows, Begin begin,
                           Finish finish) {
  constexpr int kQuarter = kRows / kCtas, kGroups = W::kMost / W::kParts, kPairs = kTile / 2;
  constexpr int kAll = kQuarter * kGroups * kPairs, kTurns = (kAll + kThreads - 1) / kThreads;
  struct Place {
    int row, group, tile, column;
    bool within;
  };
  const auto place_of = [&](int turn) {
    const int i = turn * kThreads + static_cast<int>(threadIdx.x);
    const int row = i / (kGroups * kPairs), group = i / kPairs % kGroups;
    const int tile = cluster + group * W::kClusters;
    const bool within = i < kAll && row < rows && tile < W::kAll;
    return Place{row, group, tile, W::FirstOf(tile) + i % kPairs * 2, within};
  };
  decltype(begin(0, 0)) begun[kTurns] = {};
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const Place at = place_of(turn);
    if (at.within) begun[turn] = begin(at.row, at.column);
  }
  WaitForSent(incoming.barrier);
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const Place at = place_of(turn);
    if (!at.within) continue;
    float2 sums[W::kParts];
#pragma unroll
    for (int part = 0; part < W::kParts; ++part) {
      sums[part] = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int from = 0; from < kCtas; ++from) {
        const float2 sum = *reinterpret_cast<const float2*>(
            incoming.sums + (from * kQuarter + at.row) * W::kSumPitch +
            (at.group * W::kParts + part) * kTile + at.column % kTile);
        sums[part].x += sum.x, sums[part].y += sum.y;
      }
    }
    finish(at.row, at.column, sums, begun[turn]);
  }
}

// A product of rows that are in shared memory: Multiply and ForEachSum.
template <typename W, int kRowTiles, typename Begin, typename Finish>
__device__ void Product(const __nv_bfloat16* here, const __nv_bfloat16* weight,
                        const Incoming& incoming, int cluster, int rank, int rows, Begin begin,
                        Finish finish) {
  __syncthreads();  // the rows are there, and this CTA's part of the weight
  Multiply<W, kRowTiles>(here, weight, incoming, W::Tiles(cluster), rank);
  ForEachSum<W, kRowTiles * 16>(incoming, cluster, rows, begin, finish);
}

__device__ __forceinline__ float Silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// kKv: KV heads times kDim, the head dim. kInterleaved: the two coordinates of a rotation are
// neighbours, or half a head apart.
template <int kRowTiles, int kClusters, int kWidth, int kHeads, int kInner, int kKv, int kDim,
          bool kInterleaved>
__global__ void __cluster_dims__(kCtas, 1, 1) __launch_bounds__(kThreads, 2)
    between(const __nv_bfloat16* attended,  // [rows, kHeads]
            float* x,                       // [rows, kWidth]
            const __nv_bfloat16* out,       // [kWidth, kHeads]
            const float* mlp_norm,          // [kWidth]
            const __nv_bfloat16* gate_up,   // [2 kInner, kWidth]
            const __nv_bfloat16* down,      // [kWidth, kInner]
            const float* next_norm,         // [kWidth]
            const __nv_bfloat16* next_qkv,  // [kHeads + 2 kKv, kWidth]
            const float* cos_sin,           // [rows, kDim]: cosines, then sines
            const int* slots,               // [rows]
            __nv_bfloat16* pool,            // [blocks, layers, 2, block_size, kKv]
            __nv_bfloat16* hidden,          // [rows, kInner]
            __nv_bfloat16* q,               // [rows, kHeads]
            int layer, int rows, float eps, int layers, int blocks, int block_size) {
  using Out = Weight<kWidth, kHeads, kClusters>;
  using GateUp = Weight<2 * kInner, kWidth, kClusters, 2>;
  using Down = Weight<kWidth, kInner, kClusters>;
  constexpr int kHalves = kInterleaved ? 1 : 2, kRun = kDim / kHalves / kTile;
  using Qkv = Weight<kHeads + 2 * kKv, kWidth, kClusters, kHalves, kRun>;
  constexpr int kRows = kRowTiles * 16, kQuarter = kRows / kCtas;
  const int rank = ClusterRank(), cluster = blockIdx.x / kCtas;

  __nv_bfloat16* const own_out = reinterpret_cast<__nv_bfloat16*>(shared);
  __nv_bfloat16* const own_gate_up = own_out + Out::kNumbers;
  __nv_bfloat16* const own_down = own_gate_up + GateUp::kNumbers;
  __nv_bfloat16* const own_qkv = own_down + Down::kNumbers;
  unsigned long long* const barriers =
      reinterpret_cast<unsigned long long*>(own_qkv + Qkv::kNumbers);  // of each product
  float* const squares = reinterpret_cast<float*>(barriers + 4);       // of a norm
  float* const own_rows = squares + kRows;  // of a product, and behind them what is sent to it
  // Nobody multiplies by gate and up any more when sums of down come.
  static_assert(Down::SumsOf(kRows) * sizeof(float) <= GateUp::kNumbers * sizeof(__nv_bfloat16));
  const Incoming of_out{own_rows + Out::FloatsOf(kRows), barriers, nullptr};
  const Incoming of_gate_up{own_rows + GateUp::FloatsOf(kRows), barriers + 1, squares};
  const Incoming of_down{reinterpret_cast<float*>(own_gate_up), barriers + 2, nullptr};
  const Incoming of_qkv{own_rows + Qkv::FloatsOf(kRows), barriers + 3, squares};

  if (threadIdx.x == 0) {
    constexpr int kSquares = kRows * static_cast<int>(sizeof(float));
    MakeBarrier(of_out.barrier, Out::BytesSent(kRows, cluster));
    MakeBarrier(of_gate_up.barrier, GateUp::BytesSent(kRows, cluster) + kSquares);
    MakeBarrier(of_down.barrier, Down::BytesSent(kRows, cluster));
    MakeBarrier(of_qkv.barrier, Qkv::BytesSent(kRows, cluster) + kSquares);
  }
  ClusterArrive();
  __nv_bfloat16* const here = reinterpret_cast<__nv_bfloat16*>(own_rows);
  LoadRows<Out>(here, attended, rows, rank);
  Out::Load(own_out, out, cluster, rank);
  EndCopies();
  GateUp::Load(own_gate_up, gate_up, cluster, rank);
  EndCopies();
  Down::Load(own_down, down, cluster, rank);
  EndCopies();
  Qkv::Load(own_qkv, next_qkv, cluster, rank);
  EndCopies();
  // What is small comes from afar, too, and would be waited for later.
  Now(layer);
  constexpr int kLine = 32;  // numbers
  if (const int at = threadIdx.x * kLine; at < GateUp::kDepth + kLine) {
    const int near = rank * GateUp::kDepth + (at < GateUp::kDepth ? at : GateUp::kDepth - 1);
    PrefetchToL2(mlp_norm + near);
    PrefetchToL2(next_norm + near);
  }
  ClusterWait();

  const int first = rank * kQuarter, own = rows - first;  // rows that this CTA adds up
  const auto place_in_x = [&](int row, int column) {
    return reinterpret_cast<float2*>(x + static_cast<long long>(first + row) * kWidth + column);
  };
  const auto load_x = [&](int row, int column) { return LoadFresh(place_in_x(row, column)); };
  const auto add_to_x = [&](int row, int column, const float2(&sum)[1], float2 before) {
    *place_in_x(row, column) = make_float2(before.x + sum[0].x, before.y + sum[0].y);
  };
  const auto nothing = [](int, int) { return 0; };
  // 1 / the root of the mean of squares.
  const auto factor_of = [&](const Incoming& incoming, int row) {
    float total = 0.0f;
#pragma unroll
    for (int from = 0; from < kCtas; ++from) total += incoming.squares[from * kQuarter + row];
    return rsqrtf(total * (1.0f / kWidth) + eps);
  };
  const auto store = [](__nv_bfloat16* to, float a, float b) {
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(a, b);
  };

  const auto gate = [&](int row, int column, const float2(&sum)[2], int) {
    const float factor = factor_of(of_gate_up, row);
    const float2 gate = sum[0], up = sum[1];
    store(hidden + static_cast<long long>(first + row) * kInner + column,
          Silu(gate.x * factor) * (up.x * factor), Silu(gate.y * factor) * (up.y * factor));
  };
  struct Begun {
    int slot;
    float2 cosine, sine;
  };
  const auto begin = [&](int row, int column) {
    const int in_batch = first + row, in_head = column % kDim;
    const int slot = slots[in_batch];
    if (column >= kHeads + kKv) return Begun{slot, {}, {}};  // values are not turned
    const float* const angle =
        cos_sin + static_cast<long long>(in_batch) * kDim + (kInterleaved ? in_head / 2 : in_head);
    constexpr int kNext = kInterleaved ? 0 : 1;  // interleaved, two columns are one pair
    const float* const of_sine = angle + kDim / 2;
    return Begun{slot, {angle[0], angle[kNext]}, {of_sine[0], of_sine[kNext]}};
  };
  const auto put = [&](int row, int column, int slot, float a, float b) {
    if (column < kHeads) {
      return store(q + static_cast<long long>(first + row) * kHeads + column, a, b);
    }
    const int kv = (column - kHeads) / kKv;
    if (slot < 0 || slot / block_size >= blocks) return;
    const long long part = (static_cast<long long>(slot / block_size) * layers + layer) * 2 + kv;
    store(pool + (part * block_size + slot % block_size) * kKv + (column - kHeads) % kKv, a, b);
  };
  const auto turn_and_put = [&](int row, int column, const float2(&sum)[kHalves],
                                const Begun& begun) {
    const float factor = factor_of(of_qkv, row);
    const bool turns = column < kHeads + kKv;
    const auto turn = [&](float cosine, float sine, float& a, float& b) {
      const float before = a * factor, other = b * factor;
      a = turns ? before * cosine - other * sine : before;
      b = turns ? other * cosine + before * sine : other;
    };
    if constexpr (kInterleaved) {
      float2 pair = sum[0];
      turn(begun.cosine.x, begun.sine.x, pair.x, pair.y);
      put(row, column, begun.slot, pair.x, pair.y);
    } else {
      float2 low = sum[0], high = sum[1];
      turn(begun.cosine.x, begun.sine.x, low.x, high.x);
      turn(begun.cosine.y, begun.sine.y, low.y, high.y);
      put(row, column, begun.slot, low.x, low.y);
      put(row, column + kDim / 2, begun.slot, high.x, high.y);
    }
  };

  WaitForCopies<3>();
  Product<Out, kRowTiles>(here, own_out, of_out, cluster, rank, own, load_x, add_to_x);
  GridMeet();

  LoadNormed<GateUp, kRows>(here, of_gate_up, x, mlp_norm, rows, rank);
  WaitForCopies<2>();
  Product<GateUp, kRowTiles>(here, own_gate_up, of_gate_up, cluster, rank, own, nothing, gate);
  GridMeet();

  LoadRows<Down>(here, hidden, rows, rank);
  EndCopies();
  WaitForCopies<0>();
  Product<Down, kRowTiles>(here, own_down, of_down, cluster, rank, own, load_x, add_to_x);
  GridMeet();

  LoadNormed<Qkv, kRows>(here, of_qkv, x, next_norm, rows, rank);
  Product<Qkv, kRowTiles>(here, own_qkv, of_qkv, cluster, rank, own, begin, turn_and_put);
}
