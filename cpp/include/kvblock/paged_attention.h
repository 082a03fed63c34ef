/* clang-format off */
/* kvblock/paged_attention.h: attention over the blocks of a cache, for C, C++, Rust and ctypes.
 *
 * A call has S sequences; C calls are computed together, each with rows of q of its own. Sequence s
 * of call c is number b = c S + s. It has the rows first .. end of q[c], where
 *
 *   first = query_start[c, s], end = query_start[c, s + 1]
 *
 * but between 0 and R; where query_start falls anywhere, no sequence of any call has rows. Without
 * query_start S is 1, first is 0, and end is q_lens[c], or R where that is NULL, too. Its keys are those from 0 to kv_lens[b], at most table_width * block_size of them. Key
 * j lies in slot j % block_size of block block_tables[b, j / block_size]; nobody sees it if there is
 * no such block. Its n = end - first queries are the last positions: query i is at kv_lens[b] - n +
 * i. For its row of q[c], query head h and key head k = h / (num_heads / num_kv_heads):
 *
 *   score(i, j) = scale * dot(q, k[j, k])
 *                 softcap > 0:  score = softcap * tanh(score / softcap)
 *   score(i, j) = -inf where i does not see j
 *   lse(i)      = log(sum_j exp(score(i, j)) + exp(sink[h]))      (the second term with sinks only)
 *   o(i)        = sum_j exp(score(i, j) - lse(i)) * v[j, k];      0 where lse(i) = -inf
 *
 *   position - window_left <= j <= position + window_right   (a side of -1 is open; causal is
 *                                                             window_right = 0)
 *
 * Of these, a row with ranges sees the keys of its own alone, ranges[.., 0] <= j < ranges[.., 1].
 * With tree_mask, bit m % 32 of its word m / 32 says whether it sees the key of its sequence's query
 * m, j = kv_lens[b] - n + m; those beyond its words, and earlier keys, it sees as without.
 *
 * Rows of no sequence get 0 and -inf. Nothing of q, lengths and tables is trusted: what is beyond an
 * array is never read. Keys and values that nobody sees may be anything, also NaN.
 *
 * Arrays are dense and row-major: q, o [C, R, N, D or Dv]; lse [C, R, N]; query_start [C, S + 1];
 * q_lens [C]; kv_lens [C S]; block_tables [C S, table_width]; ranges [C, R, 2]; tree_mask [C, R,
 * tree_words]; sinks [sink_batch, N], of which call c reads row c / (C / sink_batch). Keys and values
 * have strides, so that every layout of a cache is read where it lies.
 *
 * Nothing is allocated and nothing is synchronized; every launch can be captured in a CUDA graph.
 */
/* clang-format on */
#ifndef KVBLOCK_PAGED_ATTENTION_H_
#define KVBLOCK_PAGED_ATTENTION_H_

#include <stdint.h>

#include "kvblock/attention.h"
#include "kvblock/export.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  KVBLOCK_PAGED_MAX_ARRAYS = 128, /* of a cache that has one for each layer */
  KVBLOCK_PAGED_SPLIT = 256       /* keys */
};

/* Where the keys, or the values, of a layer lie: bytes between neighbours, multiples of 16. In a
 * block a row is contiguous. */
typedef struct kvblock_page_strides {
  int64_t block, token, head;
} kvblock_page_strides;

/* A cache of 8 bits holds keys and values divided by scales, float32 on the GPU: one of all, one
 * for each key head (head 1), or with `each` one for each token and head of a block. NULL: 1.
 * Between neighbours lie so many elements. Scales of tokens are not below 0. */
typedef struct kvblock_scales {
  const float* data;
  int64_t layer, block;
  int32_t token, head;
  int32_t each; /* 0 or 1; token, block and layer count where it is 1 */
} kvblock_scales;

typedef struct kvblock_paged_attention {
  int32_t dtype;       /* kvblock_dtype, of q and o */
  int32_t cache_dtype; /* of keys and values: dtype, or KVBLOCK_E4M3, KVBLOCK_E5M2, KVBLOCK_I8 */
  int32_t calls, sequences; /* C and S */
  int64_t rows;             /* R */
  int32_t num_heads, num_kv_heads;
  int32_t head_dim, value_dim; /* multiples of 8, of a cache of 8 bits of 16; at most 256 (of
                                * values_in_keys it says below) */
  float scale, softcap;        /* as in attention.h */
  int32_t window_left, window_right;

  const void* q;
  const int32_t *query_start, *q_lens; /* one of them or none */
  const int32_t *kv_lens, *block_tables;
  /* NULL, or int32 [C S]: then block_tables is [table_width], the tables of all sequences one after
   * the other, and that of a sequence begins there, from 0 to table_width. */
  const int32_t* table_first;
  int32_t table_width, block_size;
  const float* sinks; /* may be NULL */
  int32_t sink_batch; /* a divisor of C */

  const int32_t* ranges;     /* may be NULL; any values are safe */
  const uint32_t* tree_mask; /* may be NULL */
  int32_t tree_words;        /* of a row; not 0 with tree_mask */

  /* k and v are arrays of num_arrays addresses, of where layer 0, or the one that an array holds,
   * has its first key and value. `layer` chooses: the array, if there are several, and layer_stride
   * bytes times it further on. It lies on the GPU: int32 [1], or [C] with a layer for each call;
   * NULL is layer 0. Of a layer that is not one of num_layers nobody sees a key. */
  const void *const *k, *const *v;
  int32_t num_arrays, num_layers;
  const int32_t* layer;
  int32_t layer_batch; /* 1 or C */
  int64_t layer_stride;
  int64_t num_blocks;
  kvblock_page_strides k_strides, v_strides;
  kvblock_scales k_scale, v_scale; /* cleared, unless cache_dtype is one of 8 bits */

  /* 0, or keys of a piece, rounded up to KVBLOCK_PAGED_SPLIT: what a sequence's queries see is cut
   * after so many keys and nowhere else, so that the bits of its rows are the same in any call of
   * the same sizes of heads. The workspace grows with table_width / split_size. */
  int32_t split_size;

  /* 0 or 1. A latent cache: a value is the first value_dim elements of its key; v and v_strides are
   * not looked at. num_kv_heads is 1, cache_dtype is dtype, and head_dim and value_dim are 576 and
   * 512, or 192 and 128. 576 needs 152 KiB of shared memory for a thread block, as compute
   * capability 8.0, 9.0 and 10.0 have. */
  int32_t values_in_keys;

  void* o;
  float* lse; /* may be NULL */
  /* Memory on the GPU of kvblock_paged_attention_workspace bytes, aligned to 16; what it holds does
   * not matter. */
  void* workspace;

  /* 0 or 1. Sequences with many queries are computed in 8 bits, on Hopper: where rows is more than
   * sequences, or split_size is not 0, those with more packed rows (queries times num_heads /
   * num_kv_heads) than the larger of 64 and 16 num_heads / num_kv_heads. Their queries are rounded
   * to e4m3, with a scale for each tile: 128 / p queries of a sequence, of p heads that share a key
   * head. p is the largest divisor of num_heads / num_kv_heads that leaves at most a tenth of the
   * 128 rows without a query. Probabilities are rounded to e4m3, too. What is not finite in q
   * becomes NaN, and with a k_scale below 0 these sequences do. It needs dtype KVBLOCK_BF16,
   * cache_dtype KVBLOCK_E4M3, scales of all or of key heads, head dims up to 128, and a scale above
   * 0; it has no softcap, ranges, tree_mask or table_first. The workspace holds the values of all
   * tables once more. */
  int32_t narrow_queries;
} kvblock_paged_attention;

/* Each function returns NULL on success, else a message that lives until this thread's next call.
 */

/* Checks sizes, options that do not go together, alignment, and that the arrays are there; it looks
 * at none of those on the GPU. The launcher calls it first. */
KVBLOCK_EXPORT const char* kvblock_paged_attention_check(const kvblock_paged_attention* a);

/* Writes o and, if it is asked for, lse. */
KVBLOCK_EXPORT const char* kvblock_paged_attention_forward(const kvblock_paged_attention* a,
                                                           void* stream);

/* Bytes of the workspace of a call; of arrays only whether they are there counts. */
KVBLOCK_EXPORT int64_t kvblock_paged_attention_workspace(const kvblock_paged_attention* a);

#ifdef __cplusplus
}
#endif

#endif /* KVBLOCK_PAGED_ATTENTION_H_ */
