// What lies between the attentions of two layers of a Llama, in one kernel, for up to 64 rows:
//
//   x += attended @ out
//   hidden = silu(norm(x) @ gate) * (norm(x) @ up)
//   x += hidden @ down
//   qkv = norm(x) @ the next layer's q, k and v
//
// x is float32 [rows, width]; all that is multiplied is bfloat16, weights are [outputs, inputs].
//
// The products are small. A GPU reads all weights of a layer of 7 MB in under two microseconds, and
// takes twice as long to begin and end a kernel. So one kernel stays: a CTA has its part of all
// four weights in shared memory, and asks for them as it begins, since they wait for nobody. Only
// the rows are waited for: all CTAs meet before each product, which wants a cooperative launch.
//
// Four CTAs are a cluster. A cluster has some columns of each product, in tiles of 8, and each of
// its CTAs a quarter of the inputs: so a CTA reads a quarter of the rows' numbers, not all. The
// four sums of a column meet through the cluster's shared memory, always in the same order: the
// same bits every time.
//
// A norm is a factor of a whole row, which nobody knows before all of x has been read. So x times
// the norm's weight is multiplied, and the sums are multiplied by the factor.
#include <cuda_bf16.h>

constexpr int kCtas = 4;  // of a cluster
constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kTile = 8;  // columns that the tensor cores have at a time

#ifndef KVBLOCK_EMULATOR
#include <cooperative_groups.h>

// C [16, 8] += A [16, 16] B [16, 8] of a warp.
__device__ __forceinline__ void Mma(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                    unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four matrices of 8 x 8, of which each lane names a row, as the tensor cores want them.
__device__ __forceinline__ void LoadMatrices(unsigned (&r)[4], const __nv_bfloat16* row) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(place)
               : "memory");
}

// 16 bytes to shared memory; this thread's copies form groups, of which it waits for all but kLast.
__device__ __forceinline__ void Copy16(void* to, const void* from) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
}
__device__ __forceinline__ void EndCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLast>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLast) : "memory");
}

// What another multiprocessor may have written in this kernel: from L2.
template <typename T>
__device__ __forceinline__ T LoadFresh(const T* from) {
  return __ldcg(from);
}

__device__ __forceinline__ int ClusterRank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
// All threads of the cluster meet, and see what the others wrote to shared memory.
__device__ __forceinline__ void ClusterMeet() {
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
// What lies at this place in the shared memory of a CTA of the cluster.
__device__ __forceinline__ unsigned PlaceIn(const void* own, int rank) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(own));
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(rank));
  return there;
}
__device__ __forceinline__ float LoadFrom(const float* own, int rank) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(PlaceIn(own, rank)) : "memory");
  return x;
}
__device__ __forceinline__ float2 LoadFrom(const float2* own, int rank) {
  float2 x;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.x), "=f"(x.y)
               : "r"(PlaceIn(own, rank))
               : "memory");
  return x;
}
// All threads of the grid meet, and see what the others wrote.
__device__ __forceinline__ void GridMeet() { cooperative_groups::this_grid().sync(); }
extern __shared__ uint4 shared[];
#endif

// A weight [kOutputs, kInputs], of which a cluster has some rows and a CTA a quarter of the inputs.
// Rows are dealt out by tiles of 8; where it is kParts matrices, one below the other, a cluster has
// the same tiles of each, side by side.
template <int kOutputs, int kInputs_, int kClusters_, int kParts_ = 1>
struct Weight {
  static constexpr int kInputs = kInputs_, kClusters = kClusters_, kParts = kParts_;
  static constexpr int kDepth = kInputs / kCtas, kPitch = kDepth + 8;  // no bank is asked twice
  static constexpr int kAll = kOutputs / kParts / kTile;               // tiles of a part
  static constexpr int kMost = (kAll + kClusters - 1) / kClusters * kParts;  // tiles of a cluster
  static constexpr int kNumbers = kMost * kTile * kPitch;
  static_assert(kOutputs % (kParts * kTile) == 0 && kDepth % 16 == 0);

  // How many tiles this cluster has, and where tile i begins among the outputs.
  static __device__ int Tiles(int cluster) {
    return (kAll - cluster + kClusters - 1) / kClusters * kParts;
  }
  static __device__ int FirstOf(int cluster, int i) {
    return (cluster + i / kParts * kClusters) * kTile + i % kParts * (kAll * kTile);
  }

  // Sums of a row of the rows' tile lie side by side, so that lanes that store together have
  // different banks.
  static constexpr int kSumPitch = (kMost | 1) * kTile;

  static __device__ void Load(__nv_bfloat16* to, const __nv_bfloat16* from, int cluster, int rank) {
    constexpr int kChunks = kDepth / 8;  // of 16 bytes
    const int rows = Tiles(cluster) * kTile;
    for (int i = threadIdx.x; i < rows * kChunks; i += kThreads) {
      const int row = i / kChunks, at = i % kChunks * 8;
      const int output = FirstOf(cluster, row / kTile) + row % kTile;
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

// A CTA's quarter of rows of x, times the norm's weight, and of each row the sum of squares.
template <typename W, int kRows>
__device__ void LoadNormed(__nv_bfloat16* to, float* squares, const float* x, const float* norm,
                           int rows, int rank) {
  constexpr int kLanes = kThreads / kRows;  // that share a row
  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  float sum = 0.0f;
  if (row < rows) {
    const float* const from = x + static_cast<long long>(row) * W::kInputs + rank * W::kDepth;
#pragma unroll
    for (int i = lane * 4; i < W::kDepth; i += kLanes * 4) {
      const float4 v = LoadFresh(reinterpret_cast<const float4*>(from + i));
      const float4 g = *reinterpret_cast<const float4*>(norm + rank * W::kDepth + i);
      sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
      __nv_bfloat16* const place = to + row * W::kPitch + i;
      reinterpret_cast<__nv_bfloat162*>(place)[0] = __floats2bfloat162_rn(v.x * g.x, v.y * g.y);
      reinterpret_cast<__nv_bfloat162*>(place)[1] = __floats2bfloat162_rn(v.z * g.z, v.w * g.w);
    }
  }
#pragma unroll
  for (int far = kLanes / 2; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, far);
  if (lane == 0) squares[row] = sum;
}

// Multiplies the rows by the cluster's tiles, both a CTA's quarter, and tells the cluster the sums.
// They lie where the rows lay.
template <typename W, int kRowTiles>
__device__ void Multiply(__nv_bfloat16* rows, const __nv_bfloat16* weight, float* sums, int tiles) {
  constexpr int kTeams = kWarps / kRowTiles;  // warps that have the same rows share the tiles
  constexpr int kOwn = (W::kMost + kTeams - 1) / kTeams;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = warp % kRowTiles * 16, team = warp / kRowTiles;
  float c[kOwn][4] = {};
  const __nv_bfloat16* const a_from = rows + (first_row + lane % 16) * W::kPitch + lane / 16 * 8;
#pragma unroll 3
  for (int k = 0; k < W::kDepth; k += 16) {
    unsigned a[4];
    LoadMatrices(a, a_from + k);
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) {
      // Two tiles at a time; where there is no second one, the first one again.
      const int tile = team + i * kTeams, next = tile + kTeams;
      if (tile >= tiles) break;
      const int of_lane = lane < 16 || next >= tiles ? tile : next;
      unsigned b[4];
      LoadMatrices(b, weight + (of_lane * kTile + lane % 8) * W::kPitch + k + lane / 8 % 2 * 8);
      Mma(c[i], a, b[0], b[1]);
      if (i + 1 < kOwn && next < tiles) Mma(c[i + 1], a, b[2], b[3]);
    }
  }
  __syncthreads();  // all are done with the rows
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int tile = team + i * kTeams;
    if (tile >= tiles) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + half * 8 + lane / 4;
      *reinterpret_cast<float2*>(sums + row * W::kSumPitch + tile * kTile + lane % 4 * 2) =
          make_float2(c[i][half * 2], c[i][half * 2 + 1]);
    }
  }
  ClusterMeet();
}

// The sum of two neighbours over the cluster.
__device__ __forceinline__ float2 SumOf(const float* sums) {
  float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int rank = 0; rank < kCtas; ++rank) {
    const float2 part = LoadFrom(reinterpret_cast<const float2*>(sums), rank);
    total.x += part.x, total.y += part.y;
  }
  return total;
}

// Calls finish(row, column, sums of each part) for a CTA's quarter of the rows: two columns a time.
template <typename W, int kRows, typename Finish>
__device__ void ForEachSum(const float* sums, int cluster, int rank, int rows, Finish finish) {
  constexpr int kQuarter = kRows / kCtas, kGroups = W::kMost / W::kParts, kPairs = kTile / 2;
  for (int i = threadIdx.x; i < kQuarter * kGroups * kPairs; i += kThreads) {
    const int row = rank * kQuarter + i / (kGroups * kPairs), group = i / kPairs % kGroups;
    const int tile = cluster + group * W::kClusters;
    if (row >= rows || tile >= W::kAll) continue;
    const float* const place =
        sums + row * W::kSumPitch + group * W::kParts * kTile + i % kPairs * 2;
    float2 found[W::kParts];
#pragma unroll
    for (int part = 0; part < W::kParts; ++part) found[part] = SumOf(place + part * kTile);
    finish(row, tile * kTile + i % kPairs * 2, found);
  }
}

__device__ __forceinline__ float Silu(float x) { return x / (1.0f + __expf(-x)); }

template <int kRowTiles, int kClusters, int kWidth, int kHeads, int kInner, int kQkv>
__global__ void __launch_bounds__(kThreads, 2)
    between(const __nv_bfloat16* attended,  // [rows, kHeads]
            float* x,                       // [rows, kWidth]
            const __nv_bfloat16* out,       // [kWidth, kHeads]
            const float* mlp_norm,          // [kWidth]
            const __nv_bfloat16* gate_up,   // [2 kInner, kWidth]
            const __nv_bfloat16* down,      // [kWidth, kInner]
            const float* next_norm,         // [kWidth]
            const __nv_bfloat16* next_qkv,  // [kQkv, kWidth]
            __nv_bfloat16* hidden,          // [rows, kInner]
            __nv_bfloat16* qkv,             // [rows, kQkv]
            int rows, float eps) {
  using Out = Weight<kWidth, kHeads, kClusters>;
  using GateUp = Weight<2 * kInner, kWidth, kClusters, 2>;
  using Down = Weight<kWidth, kInner, kClusters>;
  using Qkv = Weight<kQkv, kWidth, kClusters>;
  constexpr int kRows = kRowTiles * 16;
  const int rank = ClusterRank(), cluster = blockIdx.x / kCtas;

  __nv_bfloat16* const own_out = reinterpret_cast<__nv_bfloat16*>(shared);
  __nv_bfloat16* const own_gate_up = own_out + Out::kNumbers;
  __nv_bfloat16* const own_down = own_gate_up + GateUp::kNumbers;
  __nv_bfloat16* const own_qkv = own_down + Down::kNumbers;
  float* const squares = reinterpret_cast<float*>(own_qkv + Qkv::kNumbers);  // of each row
  float* const sums = squares + kRows;  // of a product; until it is done, its rows lie there
  __nv_bfloat16* const own_rows = reinterpret_cast<__nv_bfloat16*>(sums);

  LoadRows<Out>(own_rows, attended, rows, rank);
  Out::Load(own_out, out, cluster, rank);
  EndCopies();
  GateUp::Load(own_gate_up, gate_up, cluster, rank);
  EndCopies();
  Down::Load(own_down, down, cluster, rank);
  EndCopies();
  Qkv::Load(own_qkv, next_qkv, cluster, rank);
  EndCopies();

  const auto add_to_x = [&](int row, int column, const float2(&sum)[1]) {
    float2* const place =
        reinterpret_cast<float2*>(x + static_cast<long long>(row) * kWidth + column);
    const float2 before = LoadFresh(place);
    *place = make_float2(before.x + sum[0].x, before.y + sum[0].y);
  };
  // 1 / the root of the mean of squares.
  const auto factor_of = [&](int row) {
    float total = 0.0f;
#pragma unroll
    for (int from = 0; from < kCtas; ++from) total += LoadFrom(squares + row, from);
    return rsqrtf(total / kWidth + eps);
  };
  const auto store = [](__nv_bfloat16* to, float a, float b) {
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(a, b);
  };

  WaitForCopies<3>();
  __syncthreads();
  Multiply<Out, kRowTiles>(own_rows, own_out, sums, Out::Tiles(cluster));
  ForEachSum<Out, kRows>(sums, cluster, rank, rows, add_to_x);
  GridMeet();

  LoadNormed<GateUp, kRows>(own_rows, squares, x, mlp_norm, rows, rank);
  WaitForCopies<2>();
  __syncthreads();
  Multiply<GateUp, kRowTiles>(own_rows, own_gate_up, sums, GateUp::Tiles(cluster));
  ForEachSum<GateUp, kRows>(
      sums, cluster, rank, rows, [&](int row, int column, const float2(&sum)[2]) {
        const float factor = factor_of(row);
        const float2 gate = sum[0], up = sum[1];
        store(hidden + static_cast<long long>(row) * kInner + column,
              Silu(gate.x * factor) * (up.x * factor), Silu(gate.y * factor) * (up.y * factor));
      });
  GridMeet();

  LoadRows<Down>(own_rows, hidden, rows, rank);
  EndCopies();
  WaitForCopies<0>();
  __syncthreads();
  Multiply<Down, kRowTiles>(own_rows, own_down, sums, Down::Tiles(cluster));
  ForEachSum<Down, kRows>(sums, cluster, rank, rows, add_to_x);
  GridMeet();

  LoadNormed<Qkv, kRows>(own_rows, squares, x, next_norm, rows, rank);
  __syncthreads();
  Multiply<Qkv, kRowTiles>(own_rows, own_qkv, sums, Qkv::Tiles(cluster));
  ForEachSum<Qkv, kRows>(sums, cluster, rank, rows,
                         [&](int row, int column, const float2(&sum)[1]) {
                           const float factor = factor_of(row);
                           store(qkv + static_cast<long long>(row) * kQkv + column,
                                 sum[0].x * factor, sum[0].y * factor);
                         });
  ClusterMeet();  // nobody ends while others read what it has
}
