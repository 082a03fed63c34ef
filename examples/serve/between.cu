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
// takes about as long to begin and end a kernel, of which there would be ten. So one kernel stays:
// a CTA has its part of all four weights in shared memory, and asks for them before their rows are
// there, since they wait for nobody: for two as it begins, for the others behind the first product.
// Only the rows are waited for: all CTAs meet before each product, which wants a cooperative
// launch.
//
// Four CTAs are a cluster. A cluster has some columns of each product, in tiles of 8, and each of
// its CTAs a quarter of the inputs: so a CTA reads a quarter of the rows' numbers, not all. Then
// each sends its sums of a quarter of the rows to one of the four, into its shared memory; that one
// adds up what came, always in the same order: the same bits every time. Once all have begun,
// nobody waits for a cluster, but each for what is sent to it.
//
// A norm is a factor of a whole row, which nobody knows before all of x has been added up. So who
// adds up some of x leaves it times the norm's weight, in bfloat16, and the sum of its squares. The
// product is of these, and its sums are multiplied by the factor.
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
__device__ __forceinline__ float LoadFresh(const float* from) {
  float x;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
  return x;
}
// Loads it here, not where it is first used.
__device__ __forceinline__ void Now(int& x) { asm volatile("" : "+r"(x)); }

__device__ __forceinline__ int ClusterRank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
// After the wait every CTA of the cluster has begun, and has made its barriers.
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
      " mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(place),
      "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void ShowBarriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void WaitForBytes(unsigned long long* barrier) {
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
// Where the CTA of this rank has what lies here.
__device__ __forceinline__ unsigned PlaceIn(const void* own, int rank) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(own));
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(rank));
  return there;
}
// Sends four numbers to this place in a CTA of the cluster, and tells its barrier.
__device__ __forceinline__ void Send(const float* own, float4 x, const unsigned long long* barrier,
                                     int rank) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(PlaceIn(own, rank)),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(PlaceIn(barrier, rank))
      : "memory");
}
// One thread copies whole 16 bytes to shared memory, and the barrier is told.
__device__ __forceinline__ void CopyBytes(void* to, const void* from, int bytes,
                                          unsigned long long* barrier) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const unsigned told = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(place),
      "l"(from), "r"(bytes), "r"(told)
      : "memory");
}
// All threads of the grid meet, and see what the others wrote.
__device__ __forceinline__ void GridMeet() { cooperative_groups::this_grid().sync(); }
extern __shared__ uint4 shared[];
#endif

// A weight [kOutputs, kInputs], of which a cluster has some rows and a CTA a quarter of the inputs.
// Rows are dealt out by tiles of 8. Where outputs belong together that lie apart, a cluster has all
// kParts of a tile, side by side: gate and up, or the two halves of a head. A part is a run of kRun
// tiles, and the next part's run follows it: of a head of 64 outputs whose halves are turned
// together, tiles 0 to 3 are the first parts and 4 to 7 the second ones, and so on for each head.
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

  // What rows take, of which a CTA has a quarter of the inputs.
  static constexpr __host__ __device__ int RowFloats(int rows) { return rows * kPitch / 2; }
  // What is sent to a CTA: from each of the cluster, sums of its quarter of the rows. The pitch
  // spreads lanes that send together over the banks, with 64 rows over half of them.
  static constexpr int kSumPitch = (kMost | 1) * kTile;
  static constexpr __host__ __device__ int SumFloats(int rows) { return rows * kSumPitch; }
  static __device__ int BytesSent(int rows, int cluster) {
    constexpr int kOthers = kCtas - 1;
    return rows / kCtas * kOthers * Tiles(cluster) * kTile * static_cast<int>(sizeof(float));
  }

  static __device__ int BytesRead(int cluster) {
    return Tiles(cluster) * kTile * kDepth * static_cast<int>(sizeof(__nv_bfloat16));
  }

  // A thread asks for an output's numbers. A warp issues its bulk copies one lane after the other,
  // so the outputs are dealt out over all warps.
  static __device__ void Load(__nv_bfloat16* to, const __nv_bfloat16* from,
                              unsigned long long* barrier, int cluster, int rank) {
    const int thread = threadIdx.x % 32 * kWarps + threadIdx.x / 32;
#pragma unroll 1
    for (int row = thread; row < Tiles(cluster) * kTile; row += kThreads) {
      const int own = row / kTile, tile = cluster + own / kParts * kClusters;
      const int output = FirstOf(tile) + own % kParts * kApart + row % kTile;
      CopyBytes(to + row * kPitch, from + static_cast<long long>(output) * kInputs + rank * kDepth,
                kDepth * sizeof(__nv_bfloat16), barrier);
    }
  }
  // A CTA's quarter of rows of bfloat16.
  static __device__ void LoadRows(__nv_bfloat16* to, const __nv_bfloat16* from, int rows,
                                  int rank) {
    constexpr int kChunks = kDepth / 8;  // of 16 bytes
    for (int i = threadIdx.x; i < rows * kChunks; i += kThreads) {
      const int row = i / kChunks, at = i % kChunks * 8;
      Copy16(to + row * kPitch + at,
             from + static_cast<long long>(row) * kInputs + rank * kDepth + at);
    }
    EndCopies();
  }
};

// What a CTA has for a product: its inputs, and sums, with barriers that count the bytes of the
// weight and those that other CTAs send.
struct Incoming {
  __nv_bfloat16 *weight, *rows;
  float* sums;
  unsigned long long *read, *sent;
};

// Multiplies the rows by the cluster's tiles, both a CTA's quarter of the inputs, and sends the
// sums to who adds them up.
template <typename W, int kRowTiles>
__device__ void Multiply(const Incoming& incoming, int tiles, int rank) {
  constexpr int kTeams = kWarps / kRowTiles;  // warps that have the same rows share the tiles
  constexpr int kOwn = (W::kMost + kTeams - 1) / kTeams, kPairs = (kOwn + 1) / 2;
  constexpr int kSteps = W::kDepth / 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = warp % kRowTiles * 16, team = warp / kRowTiles;
  if (team >= tiles) return;
  // Lanes name rows of two tiles; where there is no tile, of the last one, whose products nobody
  // sends twice.
  const __nv_bfloat16* const a_from =
      incoming.rows + (first_row + lane % 16) * W::kPitch + lane / 16 * 8;
  int b_from[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int tile = team + (i * 2 + lane / 16) * kTeams;
    const int row = (tile < tiles ? tile : tiles - 1) * kTile + lane % 8;
    b_from[i] = row * W::kPitch + lane / 8 % 2 * 8;
  }
  float c[kPairs * 2][4] = {};
  constexpr int kAhead = kPairs == 1   ? 3
                         : kPairs == 2 ? 2
                                       : 1;  // steps on their way, for as many registers
  unsigned a[kAhead + 1][4], b[kAhead + 1][kPairs][4];
  const auto load = [&](int step) {
    LoadMatrices(a[step % (kAhead + 1)], a_from + step * 16);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      LoadMatrices(b[step % (kAhead + 1)][i], incoming.weight + b_from[i] + step * 16);
    }
  };
#pragma unroll
  for (int step = 0; step < kSteps + kAhead; ++step) {
    if (step < kSteps) load(step);
    if (step < kAhead) continue;
    const int now = (step - kAhead) % (kAhead + 1);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const unsigned (&own_b)[4] = b[now][i];
      Mma(c[i * 2], a[now], own_b[0], own_b[1]);
      if (i * 2 + 1 < kOwn) Mma(c[i * 2 + 1], a[now], own_b[2], own_b[3]);
    }
  }
  // A lane has two columns of two rows that are 8 apart. Neighbours trade: four of one row.
  const bool odd = lane % 2 != 0;
  const int row = first_row + lane / 4 + (odd ? 8 : 0);
  constexpr int kQuarter = kRowTiles * 16 / kCtas;
  const int place = (rank * kQuarter + row % kQuarter) * W::kSumPitch + lane % 4 / 2 * 4;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int tile = team + i * kTeams;
    if (tile >= tiles) break;
    const float (&own)[4] = c[i];
    const float x = __shfl_xor_sync(0xffffffffu, odd ? own[0] : own[2], 1);
    const float y = __shfl_xor_sync(0xffffffffu, odd ? own[1] : own[3], 1);
    const float4 four = odd ? make_float4(x, y, own[2], own[3]) : make_float4(own[0], own[1], x, y);
    float* const to = incoming.sums + place + tile * kTile;
    if (row / kQuarter == rank) {
      *reinterpret_cast<float4*>(to) = four;
    } else {
      Send(to, four, incoming.sent, row / kQuarter);
    }
  }
}

// How a CTA's threads share the sums of its quarter of the rows: neighbours have a row's columns,
// two of each part, turn by turn, and then those of further rows.
template <typename W, int kRows>
struct Share {
  static constexpr int kQuarter = kRows / kCtas, kGroups = W::kMost / W::kParts;
  static constexpr int kPairs = kGroups * kTile / 2;
  static constexpr int kLanes = kPairs > 16 ? 32 : kPairs > 8 ? 16 : 8;  // that have a row
  static constexpr int kAtOnce = kThreads / kLanes;                      // rows
  static constexpr int kRowTurns = (kQuarter + kAtOnce - 1) / kAtOnce;
  static constexpr int kRowPairs = (kPairs + kLanes - 1) / kLanes;  // a lane's, of a row
  static constexpr int kTurns = kRowTurns * kRowPairs;

  static __device__ int Lane() { return threadIdx.x % kLanes; }
  static __device__ int Row(int row_turn) { return row_turn * kAtOnce + threadIdx.x / kLanes; }
  static __device__ bool Has(int row, int rows) { return row < kQuarter && row < rows; }

  // each(turn, row, column, place): of a thread's columns, and the first of their sums.
  template <typename Each>
  static __device__ void ForEach(int cluster, int rows, Each each) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int row = Row(turn / kRowPairs), pair = turn % kRowPairs * kLanes + Lane();
      const int group = pair / (kTile / 2), at = pair % (kTile / 2) * 2;
      const int tile = cluster + group * W::kClusters;
      if (!Has(row, rows) || pair >= kPairs || tile >= W::kAll) continue;
      each(turn, row, W::FirstOf(tile) + at, row * W::kSumPitch + group * W::kParts * kTile + at);
    }
  }

  // Of all lanes that have the row.
  static __device__ float Sum(float x) {
#pragma unroll
    for (int far = kLanes / 2; far > 0; far /= 2) x += __shfl_xor_sync(0xffffffffu, x, far);
    return x;
  }
};

// A product of rows and a weight that have been asked for.
template <typename W, int kRowTiles>
__device__ void BeginProduct(const Incoming& incoming, int cluster, int rank) {
  WaitForCopies<0>();
  __syncthreads();  // rows are there
  WaitForBytes(incoming.read);
  Multiply<W, kRowTiles>(incoming, W::Tiles(cluster), rank);
}
// finish(turn, row, column, sums of each part). `row` counts from the quarter's first on.
template <typename W, int kRowTiles, typename Finish>
__device__ void EndProduct(const Incoming& incoming, int cluster, int rows, Finish finish) {
  using Own = Share<W, kRowTiles * 16>;
  WaitForBytes(incoming.sent);
  __syncthreads();  // this CTA's own sums are there, too
  Own::ForEach(cluster, rows, [&](int turn, int row, int column, int place) {
    float2 sums[W::kParts];
#pragma unroll
    for (int part = 0; part < W::kParts; ++part) {
      sums[part] = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int from = 0; from < kCtas; ++from) {
        const float2 sum = *reinterpret_cast<const float2*>(
            incoming.sums + from * Own::kQuarter * W::kSumPitch + place + part * kTile);
        sums[part].x += sum.x, sums[part].y += sum.y;
      }
    }
    finish(turn, row, column, sums);
  });
}

// The squares of x: each cluster leaves the sums of its columns.
template <typename W, int kRows>
__device__ void StoreSquares(float* squares, const float (&own)[Share<W, kRows>::kRowTurns],
                             int cluster, int first, int rows) {
  using Own = Share<W, kRows>;
#pragma unroll
  for (int i = 0; i < Own::kRowTurns; ++i) {
    const float sum = Own::Sum(own[i]);
    const int row = Own::Row(i);
    if (Own::Lane() == 0 && Own::Has(row, rows)) {
      squares[(first + row) * W::kClusters + cluster] = sum;
    }
  }
}
// A row's sums, of which each lane reads some; then what the row is multiplied by: 1 / the root of
// the mean.
template <typename W, int kRows>
__device__ void LoadSquares(float (&own)[Share<W, kRows>::kRowTurns], const float* squares,
                            int first, int rows) {
  using Own = Share<W, kRows>;
#pragma unroll
  for (int i = 0; i < Own::kRowTurns; ++i) {
    const int row = Own::Row(i);
    own[i] = 0.0f;
#pragma unroll
    for (int at = 0; at < W::kClusters; at += Own::kLanes) {
      const int from = at + Own::Lane();
      if (Own::Has(row, rows) && from < W::kClusters) {
        own[i] += LoadFresh(squares + (first + row) * W::kClusters + from);
      }
    }
  }
}

template <typename W, int kRows>
__device__ void TurnIntoFactors(float (&own)[Share<W, kRows>::kRowTurns], float eps) {
#pragma unroll
  for (float& x : own) x = rsqrtf(Share<W, kRows>::Sum(x) * (1.0f / W::kInputs) + eps);
}

__device__ __forceinline__ float Silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// kHeads, kKv: heads and KV heads times kDim, the head dim. kInterleaved: the two coordinates of a
// rotation are neighbours, or half a head apart.
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
            __nv_bfloat16* normed,          // [rows, kWidth]: but for the rows' factors
            float* squares,                 // [rows, kClusters]
            int layer, int rows, float eps, int layers, int blocks, int block_size) {
  using Out = Weight<kWidth, kHeads, kClusters>;
  using GateUp = Weight<2 * kInner, kWidth, kClusters, 2>;
  using Down = Weight<kWidth, kInner, kClusters>;
  constexpr int kHalves = kInterleaved ? 1 : 2, kRun = kDim / kHalves / kTile;
  using Qkv = Weight<kHeads + 2 * kKv, kWidth, kClusters, kHalves, kRun>;
  constexpr int kRows = kRowTiles * 16, kQuarter = kRows / kCtas;
  const int rank = ClusterRank(), cluster = blockIdx.x / kCtas;

  __nv_bfloat16* const own_gate_up = reinterpret_cast<__nv_bfloat16*>(shared);
  __nv_bfloat16* const own_down = own_gate_up + GateUp::kNumbers;
  __nv_bfloat16* const own_qkv = own_down + Down::kNumbers;
  unsigned long long* const barriers =
      reinterpret_cast<unsigned long long*>(own_qkv + Qkv::kNumbers);  // two of each product
  // `out` is multiplied by first. Then its place is free: the rows of the other products lie there,
  // and behind them what is sent to these.
  __nv_bfloat16* const own_out = reinterpret_cast<__nv_bfloat16*>(barriers + 8);
  __nv_bfloat16* const rows_of_out = own_out + Out::kNumbers;
  float* const reused = reinterpret_cast<float*>(own_out);
  // Nobody multiplies by gate and up any more when sums of down come.
  static_assert(Down::SumFloats(kRows) * sizeof(float) <= GateUp::kNumbers * sizeof(__nv_bfloat16));
  const Incoming of_out{own_out, rows_of_out,
                        reinterpret_cast<float*>(rows_of_out) + Out::RowFloats(kRows), barriers,
                        barriers + 1};
  const Incoming of_gate_up{own_gate_up, own_out, reused + GateUp::RowFloats(kRows), barriers + 2,
                            barriers + 3};
  const Incoming of_down{own_down, own_out, reinterpret_cast<float*>(own_gate_up), barriers + 4,
                         barriers + 5};
  const Incoming of_qkv{own_qkv, own_out, reused + Qkv::RowFloats(kRows), barriers + 6,
                        barriers + 7};

  if (threadIdx.x == 0) {
    MakeBarrier(of_out.read, Out::BytesRead(cluster));
    MakeBarrier(of_out.sent, Out::BytesSent(kRows, cluster));
    MakeBarrier(of_gate_up.read, GateUp::BytesRead(cluster));
    MakeBarrier(of_gate_up.sent, GateUp::BytesSent(kRows, cluster));
    MakeBarrier(of_down.read, Down::BytesRead(cluster));
    MakeBarrier(of_down.sent, Down::BytesSent(kRows, cluster));
    MakeBarrier(of_qkv.read, Qkv::BytesRead(cluster));
    MakeBarrier(of_qkv.sent, Qkv::BytesSent(kRows, cluster));
    ShowBarriers();
  }
  __syncthreads();
  ClusterArrive();
  Out::Load(own_out, out, of_out.read, cluster, rank);
  Out::LoadRows(of_out.rows, attended, rows, rank);
  GateUp::Load(own_gate_up, gate_up, of_gate_up.read, cluster, rank);

  const int first = rank * kQuarter, own = rows - first;  // rows that this CTA adds up
  // A thread adds up the same numbers of x behind `out` and `down`, and keeps them in registers.
  using OfX = Share<Out, kRows>;
  struct {
    float2 x, norm;
  } has[OfX::kTurns];
  const auto place_in_x = [&](int row, int column) {
    return static_cast<long long>(first + row) * kWidth + column;
  };
  OfX::ForEach(cluster, own, [&](int turn, int row, int column, int) {
    has[turn].x = *reinterpret_cast<const float2*>(x + place_in_x(row, column));
    has[turn].norm = *reinterpret_cast<const float2*>(mlp_norm + column);
  });
  Now(layer);  // a traced scalar comes from memory, too, and would be waited for later

  const auto store = [](__nv_bfloat16* to, float a, float b) {
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(a, b);
  };
  float of_rows[OfX::kRowTurns] = {};  // squares
  const auto add_to_x = [&](int turn, int row, int column, float2 sum) {
    float2& now = has[turn].x;
    const float2 norm = has[turn].norm;
    now.x += sum.x, now.y += sum.y;
    of_rows[turn / OfX::kRowPairs] += now.x * now.x + now.y * now.y;
    store(normed + place_in_x(row, column), now.x * norm.x, now.y * norm.y);
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

  ClusterWait();
  BeginProduct<Out, kRowTiles>(of_out, cluster, rank);
  Down::Load(own_down, down, of_down.read, cluster, rank);
  Qkv::Load(own_qkv, next_qkv, of_qkv.read, cluster, rank);
  EndProduct<Out, kRowTiles>(of_out, cluster, own,
                             [&](int turn, int row, int column, const float2(&sum)[1]) {
                               add_to_x(turn, row, column, sum[0]);
                             });
  StoreSquares<Out, kRows>(squares, of_rows, cluster, first, own);
  GridMeet();

  GateUp::LoadRows(of_gate_up.rows, normed, rows, rank);
  using OfHidden = Share<GateUp, kRows>;
  float factors[OfHidden::kRowTurns];
  LoadSquares<GateUp, kRows>(factors, squares, first, own);
  BeginProduct<GateUp, kRowTiles>(of_gate_up, cluster, rank);
  TurnIntoFactors<GateUp, kRows>(factors, eps);
  EndProduct<GateUp, kRowTiles>(
      of_gate_up, cluster, own, [&](int turn, int row, int column, const float2(&sum)[2]) {
        const float factor = factors[turn / OfHidden::kRowPairs];
        const float2 gate = sum[0], up = sum[1];
        store(hidden + static_cast<long long>(first + row) * kInner + column,
              Silu(gate.x * factor) * (up.x * factor), Silu(gate.y * factor) * (up.y * factor));
      });
  GridMeet();

  Down::LoadRows(of_down.rows, hidden, rows, rank);
  OfX::ForEach(cluster, own, [&](int turn, int, int column, int) {
    has[turn].norm = *reinterpret_cast<const float2*>(next_norm + column);
  });
#pragma unroll
  for (float& sum : of_rows) sum = 0.0f;
  BeginProduct<Down, kRowTiles>(of_down, cluster, rank);
  EndProduct<Down, kRowTiles>(
      of_down, cluster, own, [&](int turn, int row, int column, const float2(&sum)[1]) {
        add_to_x(turn, row, column, sum[0]);
        *reinterpret_cast<float2*>(x + place_in_x(row, column)) = has[turn].x;
      });
  StoreSquares<Down, kRows>(squares, of_rows, cluster, first, own);
  GridMeet();

  Qkv::LoadRows(of_qkv.rows, normed, rows, rank);
  // Slots and angles are read while the product is on its way.
  using OfHeads = Share<Qkv, kRows>;
  struct Angle {
    int slot;
    float2 cosine, sine;
  } angles[OfHeads::kTurns];
  OfHeads::ForEach(cluster, own, [&](int turn, int row, int column, int) {
    const int in_batch = first + row, in_head = column % kDim;
    angles[turn] = {slots[in_batch], {}, {}};
    if (column >= kHeads + kKv) return;  // values are not turned
    const float* const angle =
        cos_sin + static_cast<long long>(in_batch) * kDim + (kInterleaved ? in_head / 2 : in_head);
    constexpr int kNext = kInterleaved ? 0 : 1;  // interleaved, two columns are one pair
    const float* const of_sine = angle + kDim / 2;
    angles[turn].cosine = {angle[0], angle[kNext]};
    angles[turn].sine = {of_sine[0], of_sine[kNext]};
  });
  float head_factors[OfHeads::kRowTurns];
  LoadSquares<Qkv, kRows>(head_factors, squares, first, own);
  BeginProduct<Qkv, kRowTiles>(of_qkv, cluster, rank);
  TurnIntoFactors<Qkv, kRows>(head_factors, eps);
  EndProduct<Qkv, kRowTiles>(
      of_qkv, cluster, own, [&](int turn, int row, int column, const float2(&sum)[kHalves]) {
        const float factor = head_factors[turn / OfHeads::kRowPairs];
        const Angle& of = angles[turn];
        const bool turned = column < kHeads + kKv;
        const auto rotate = [&](float cosine, float sine, float& a, float& b) {
          const float before = a * factor, other = b * factor;
          a = turned ? before * cosine - other * sine : before;
          b = turned ? other * cosine + before * sine : other;
        };
        if constexpr (kInterleaved) {
          float2 pair = sum[0];
          rotate(of.cosine.x, of.sine.x, pair.x, pair.y);
          put(row, column, of.slot, pair.x, pair.y);
        } else {
          float2 low = sum[0], high = sum[1];
          rotate(of.cosine.x, of.sine.x, low.x, high.x);
          rotate(of.cosine.y, of.sine.y, low.y, high.y);
          put(row, column, of.slot, low.x, low.y);
          put(row, column + kDim / 2, of.slot, high.x, high.y);
        }
      });
}
