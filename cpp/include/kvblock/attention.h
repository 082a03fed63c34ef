/* clang-format off */
/* kvblock/attention.h: the attention launchers, for C, C++, Rust and ctypes.
 *
 * For every batch member b, query head n (key head k = n / (num_heads / num_kv_heads)) and query i:
 *
 *   score(i, j) = scale * dot(q[b, i, n], k[b, j, k])
 *                 softcap > 0:  score = softcap * tanh(score / softcap)
 *                 bias:         score = score + bias[b, n, i, j]
 *   score(i, j) = -inf where i does not attend to j
 *   lse(i)      = log(sum_j exp(score(i, j)) + exp(sink[n]))      (the second term with sinks only)
 *                 less base(i), where that is asked for
 *   o(i)        = sum_j exp(score(i, j) - lse(i)) * v[b, j, k];   0 where lse(i) = -inf
 *                 with dropout over the pairs that are kept, divided by 1 - dropout / 128
 *
 * i attends to j when all of these hold:
 *   i < q_lens[b], j < kv_lens[b]                                 (where given)
 *   i + shift[b] - window_left <= j <= i + shift[b] + window_right   (a side of -1 is open; causal
 *                                                                  is window_right = 0)
 *   q_segments[b, i] == kv_segments[b, j]                         (where given)
 *   the tile (i / tile_q, j / tile_kv) is listed                  (where tiles are given)
 *   the tile's bit for i and j is 1                               (where tile_masks are given)
 *
 * Keys from kv_lens[b] on and queries from q_lens[b] on, and keys in tiles that are not listed, are
 * never read. Outputs are written for every query, also for those from q_lens[b] on (0 and -inf).
 *
 * bias_batch, sink_batch and tile_batch divide B, and batch member b reads row b / (B / bias_batch) of
 * the bias (so 1 is shared by all, and B is one each).
 *
 * Arrays are dense and row-major: q, o, dq [B, T, N, D or Dv]; k, v, dk, dv [B, S, K, D or Dv];
 * lse, delta [B, N, T]; bias [bias_batch, bias_heads, T, S]; sinks [sink_batch, N]. Packed: with
 * cu_q and cu_kv, int32 [B + 1], sequence b owns rows cu_q[b] .. cu_q[b + 1] of q [T, N, D] (T is
 * then the total) and cu_kv[b] .. cu_kv[b + 1] of k and v [S, K, D]; lse and delta are [N, T]; i and
 * j count from the sequence's first row; rows that no sequence owns get 0 and -inf. Packed inputs
 * take neither bias, segments, lengths nor tiles.
 *
 * With dropout, and key = dropout_keys[b, n], a pair is kept where its number is at least `dropout`:
 *
 *   place(p)   = p / 16 * 8 + p % 8
 *   z          = (key[0] + 0x9E3779B9 place(i)) ^ (key[1] + 0x6A09E667 (place(j) / 2))  modulo 2^32
 *   z          = z * 0x7FEB352D;                                        z = z ^ (z >> 15)
 *   z          = z * (place(j) % 2 == 0 ? 0x846CA68B : 0xA54FF53B);     z = z ^ (z >> 16)
 *   number     = z >> (16 (i / 8 % 2) + 8 (j / 8 % 2)) & 127
 *
 * Positions that begin elsewhere are another key: 16 m more of i are 0x9E3779B9 * 8 m more of key[0],
 * 16 m more of j are 0x6A09E667 * 4 m more of key[1].
 *
 * Nothing is allocated and nothing is synchronized; every launch can be captured in a CUDA graph.
 */
/* clang-format on */
#ifndef KVBLOCK_ATTENTION_H_
#define KVBLOCK_ATTENTION_H_

#include <stdint.h>

#include "kvblock/export.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { KVBLOCK_ATTENTION_CHUNK = 64 };        /* positions that one segment range covers */
enum { KVBLOCK_ATTENTION_PARTIAL = 1 << 30 }; /* added to a list's entry: the tile has bits */

typedef enum kvblock_dtype {
  KVBLOCK_BF16 = 0,
  KVBLOCK_F16 = 1,
  KVBLOCK_F32 = 2,  /* of a bias with any dtype; of q, k, v for the generic kernels */
  KVBLOCK_E4M3 = 3, /* of a forward pass, and of caches (paged_attention.h) */
  KVBLOCK_E5M2 = 4, /* of caches only */
  KVBLOCK_I8 = 5,   /* of q and k of a forward pass, and of caches */
} kvblock_dtype;

/* Which kernels compute. The sm_90a kernels run on GPUs of compute capability 9.0 alone; what they
 * do not have (backward_q, backward_bias) the generic ones compute for them. */
typedef enum kvblock_kernels {
  KVBLOCK_KERNELS_GENERIC = 0, /* sm_80 and newer */
  KVBLOCK_KERNELS_SM90 = 1,
} kvblock_kernels;

/* How products of float32 are computed; those of 16 bits are exact, and their sums float32. */
typedef enum kvblock_precision {
  /* Three products on tensor cores for each, of operands in two parts: errors near float32's. */
  KVBLOCK_PRECISION_HIGHEST = 0,
  /* One product of operands rounded to TF32, which has 11 binary digits. */
  KVBLOCK_PRECISION_DEFAULT = 1,
} kvblock_precision;

/* What both passes have. A cleared field is an option that is not used, but for the window's. */
typedef struct kvblock_attention {
  int32_t kernels; /* kvblock_kernels */
  /* Of q, k, v, o, d_o, dq, dk, dv. KVBLOCK_F32 is for the generic kernels, and for gradients with
   * head_dim and value_dim up to 128; KVBLOCK_E4M3 for a forward pass of the sm_90a kernels, whose
   * o is KVBLOCK_BF16; KVBLOCK_I8 for the same, where it is that of q and k alone, and v is
   * KVBLOCK_E4M3. */
  int32_t dtype;
  int32_t batch, num_heads, num_kv_heads;
  int32_t precision;           /* kvblock_precision, of KVBLOCK_F32 */
  int64_t q_len, kv_len;       /* T and S; packed: the totals */
  int32_t head_dim, value_dim; /* multiples of 8, at most 256 */
  float scale, softcap;        /* softcap 0: none; below 1024, scale / softcap is 1e-6 to 1e5 */
  int32_t window_left, window_right;

  const void *q, *k, *v;
  /* Every operand from here on may be NULL. */
  const int32_t *cu_q, *cu_kv;             /* [B + 1], both or none */
  const int32_t *q_lens, *kv_lens;         /* [B] */
  const int32_t* shift;                    /* [B]: q_offset - kv_offset */
  const int32_t *q_segments, *kv_segments; /* [B, T], [B, S], both or none */
  /* The smallest and largest segment of each chunk, [B, ceil(T / 64), 2] and [B, ceil(S / 64), 2];
   * present with segments. Tiles whose ranges do not meet are skipped. */
  const int32_t *q_segment_ranges, *kv_segment_ranges;
  const void* bias;
  int32_t bias_dtype;             /* dtype or KVBLOCK_F32 */
  int32_t bias_batch, bias_heads; /* a divisor of B; 1 or N */
  const float* sinks;             /* forward alone: lse holds them */
  int32_t sink_batch;             /* a divisor of B */
  /* tile_indices [tile_batch, tile_heads, ceil(T / tile_q), max_tiles], tile_counts the same
   * without the last dim. The first `count` entries are visited; an entry outside 0 .. ceil(S /
   * tile_kv) - 1 is skipped, and without tile_masks so is one from KVBLOCK_ATTENTION_PARTIAL on; an
   * entry comes once. tile_q and tile_kv are multiples of 128. In the backward pass over keys the
   * lists are transposed: for each KV tile the query tiles that list it. */
  const int32_t *tile_indices, *tile_counts;
  const int32_t *tile_indices_t, *tile_counts_t; /* [.., ceil(S / tile_kv), max_tiles_t] */
  int32_t tile_batch, tile_heads;                /* a divisor of B; 1 or N */
  int32_t tile_q, tile_kv, max_tiles, max_tiles_t;
  /* Both may be NULL, and go with tile lists whose tile_q and tile_kv are at most 1024. Entries of
   * tiles that have bits are KVBLOCK_ATTENTION_PARTIAL more, in all lists. tile_map [tile_batch,
   * tile_heads, ceil(T / tile_q), ceil(S / tile_kv)] has of a listed tile its row of tile_masks, or
   * a number below 0 where all of the tile attends. tile_masks [num_tile_masks, tile_q, tile_kv /
   * 32]: query r of a tile attends to its key 32 w + c where bit c (of value 2^c) of word
   * [row, r, w] is 1. */
  const int32_t* tile_map;
  const uint32_t* tile_masks;
  int32_t num_tile_masks;
  /* Both or none: of 128 probabilities, how many become 0, 1 to 127; uint32 [B, N, 2], packed too.
   * The same for both passes. delta is of o as it came out, with dropout. The sm_90a kernels have
   * it for 16 bits, a scale above 0, and neither softcap, bias nor tiles. */
  int32_t dropout;
  const uint32_t* dropout_keys;
} kvblock_attention;

enum { KVBLOCK_ATTENTION_SCALE_ROWS = 128 }; /* queries or keys that share a scale */

/* What numbers in 8 bits are to be multiplied by: float32 [batch, heads, blocks], of as many heads
 * as the array has; batch is a divisor of B. There is one block, or, of q and k, one for each
 * KVBLOCK_ATTENTION_SCALE_ROWS rows. A scale is not negative; one that is, or NaN, makes NaN of
 * what it is for. */
typedef struct kvblock_block_scales {
  const float* scales;
  int32_t batch, blocks;
} kvblock_block_scales;

typedef struct kvblock_forward {
  kvblock_attention call;
  void* o;
  float* lse; /* may be NULL */
  /* [B, N, T], with a bias; may be NULL. lse is then relative to it. Beside a bias of -1e9 over a
   * whole row float32 has no digits left for the sum of the exponentials; this keeps it. Finite
   * and near the row's largest score, which is at most 8 above it. */
  float* base;
  /* May be NULL: memory on the GPU of kvblock_attention_workspace bytes, aligned to 16; what it
   * holds does not matter. With it the keys of a few queries of 16 bits are shared out over the
   * whole GPU, and
   * where lengths, segments or lists make tiles uneven, who is done takes the next one. */
  void* workspace;
  /* Not 0: o and lse hold the attention of these queries to other keys, and are joined with that to
   * the call's: afterwards they are those to all of these keys. Rows that attend to none of the
   * call's keep what they have. For the sm_90a kernels, with lse, head dims up to 128, a scale
   * above 0, and neither softcap, bias, sinks, tiles nor dropout. */
  int32_t joins;
  /* With dtype KVBLOCK_E4M3 or KVBLOCK_I8, for the sm_90a kernels: q, k and v are products of these
   * and what the arrays hold, and o is in bfloat16. Probabilities are rounded to e4m3, too. The
   * call has a workspace, head dims that are multiples of 16 up to 128, a scale above 0, and
   * neither cu_q, softcap, bias, tiles nor dropout. */
  kvblock_block_scales q_scales, k_scales, v_scales;
} kvblock_forward;

typedef struct kvblock_backward {
  kvblock_attention call;
  const float* lse;  /* as the forward pass wrote it */
  const float* base; /* the same; NULL where it wrote none */
  const void* d_o;
  const float* delta; /* [B, N, T]: rowsum(d_o * o) - d_lse */
  /* The generic kernels' sums: float32, dq / scale, added atomically, 8 rows of q by 8 columns
   * together: [N, ceil(R / 8), D / 8, 8, 8], where R = B T, packed T, and batch member b's query i
   * is row b T + i. What pads the rows is 0. */
  float* dq_accum;
  void *dq, *dk, *dv;
  void* dbias; /* [bias_batch, bias_heads, T, S] in bias_dtype */
  /* For backward_kv of the sm_90a kernels with dq: memory on the GPU of
   * kvblock_attention_workspace bytes, aligned to 16; what it holds does not matter. */
  void* workspace;
  /* Not 0, for the same and calls without segments and tiles: keys add to dq in turns, so that it
   * comes out with the same bits every time. */
  int32_t deterministic;
  /* Not 0, for backward_kv of the sm_90a kernels with dq: dq is added to what dq holds, in float32,
   * and the sum is rounded. */
  int32_t joins;
} kvblock_backward;

/* What a launcher computes, for kvblock_attention_check_backward. */
typedef enum kvblock_backward_pass {
  KVBLOCK_BACKWARD_KV = 1,
  KVBLOCK_BACKWARD_Q = 2,
  KVBLOCK_BACKWARD_BIAS = 3,
} kvblock_backward_pass;

/* Each function returns NULL on success, else a message that lives until this thread's next call.
 */

/* Check sizes, options that do not go together, alignment, and that the operands and outputs of the
 * pass are there. They look at no array. The launchers call them first. */
KVBLOCK_EXPORT const char* kvblock_attention_check_forward(const kvblock_forward* a);
KVBLOCK_EXPORT const char* kvblock_attention_check_backward(const kvblock_backward* a,
                                                            kvblock_backward_pass pass);

/* Writes o and, if it is asked for, lse. */
KVBLOCK_EXPORT const char* kvblock_attention_forward(const kvblock_forward* a, void* stream);

/* Bytes of the workspace of a forward call, or, if `backward` is not 0, of a call of backward_kv
 * that computes dq; 0 where it has no use for one. Of arrays only whether they are there counts. */
KVBLOCK_EXPORT int64_t kvblock_attention_workspace(const kvblock_attention* a, int32_t backward);

/* Writes dk and dv. The generic kernels sum up dq / scale in dq_accum, if it is given, in an order
 * that differs from run to run; the sm_90a kernels write dq, if that is given, and a workspace. */
KVBLOCK_EXPORT const char* kvblock_attention_backward_kv(const kvblock_backward* a, void* stream);

/* Writes dq, the same bits every time. */
KVBLOCK_EXPORT const char* kvblock_attention_backward_q(const kvblock_backward* a, void* stream);

/* Writes dbias, summed over the batch and the heads that share it; the same bits every time. */
KVBLOCK_EXPORT const char* kvblock_attention_backward_bias(const kvblock_backward* a, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* KVBLOCK_ATTENTION_H_ */
