/* clang-format off */
/* kvblock/append.h: the append launcher, for C, C++, Rust and ctypes.
 *
 * One launch writes the keys and values of new tokens into the blocks of a cache. On the way it norms
 * and rotates keys (and queries, which come out as an array of their own) and quantizes. For every
 * token i and head h, in float32:
 *
 *   y = x / sqrt(mean(x^2) + norm_eps) * norm      for q and k, where q_norm and k_norm are given
 *   (y[a], y[b]) = (y[a] cos - y[b] sin, y[b] cos + y[a] sin)    for q and k and rotary_dim / 2 pairs
 *       pair j is a = j, b = j + rotary_dim / 2, or interleaved a = 2 j, b = 2 j + 1
 *       its angle is positions[i] * inv_freq[j]; or its cosine and sine are cos_sin[row, j] and
 *       cos_sin[row, j + rotary_dim / 2], row = positions[i] held to 0 .. cos_sin_rows - 1, or i
 *   q_out = y                                      rounded to dtype
 *   stored = y / scale                             rounded to nearest even, held to cache_dtype's range
 *       scale is k_scale or v_scale, or, with k_scales and v_scales, max |y| / 448 (e4m3), / 57344
 *       (e5m2) or / 127 (int8), and is stored there; NaN does not count
 *
 *   address = buffers[layer * layer_table_stride] + layer * layer_stride + (slot / block_size) *
 *             block_stride + outer * outer_stride + (slot % block_size) * token_stride +
 *             h * head_stride + element * dim_stride               outer: 0 for k, 1 for v
 *
 * A slot outside [0, num_blocks * block_size), or a layer outside [0, num_layers), writes nothing. Slots
 * must not repeat. With zero_tail, where the first slot of a block is written, its slots that no token
 * of the call has become zeros, and so do their scales.
 *
 * Every number is checked before anything is touched, every address against buffer_bytes. Nothing is
 * allocated and nothing is synchronized; the launch can be captured in a CUDA graph.
 */
/* clang-format on */
#ifndef KVBLOCK_APPEND_H_
#define KVBLOCK_APPEND_H_

#include <stdint.h>

#include "kvblock/export.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { KVBLOCK_APPEND_MAX_BUFFERS = 256 }; /* their addresses travel as kernel parameters */
enum { KVBLOCK_APPEND_MAX_ROW = 2048 };    /* bytes of a head's row of q, k or v */

typedef enum kvblock_append_dtype {
  KVBLOCK_APPEND_BF16 = 0,
  KVBLOCK_APPEND_F16 = 1,
  KVBLOCK_APPEND_F32 = 2,
  KVBLOCK_APPEND_E4M3 = 3, /* this and what follows: of the cache alone */
  KVBLOCK_APPEND_E5M2 = 4,
  KVBLOCK_APPEND_I8 = 5,
} kvblock_append_dtype;

/* A cleared field is an option that is not used. */
typedef struct kvblock_append {
  int32_t dtype;       /* kvblock_append_dtype, of q, k, v and q_out */
  int32_t cache_dtype; /* dtype, or one of 8 bits, which has scales */
  int64_t tokens;
  int32_t num_heads, num_kv_heads, head_dim; /* num_heads 0: no q */
  int32_t num_outer;                         /* 2, or 1: no v */

  const void *q, *k, *v; /* [tokens, N, D]; [layers, tokens, K, D] */
  void* q_out;           /* [tokens, N, D] */
  const int32_t* slots;  /* [tokens] */
  /* In elements: from a token's first head to the next token's, where q, or k and v, are parts of
   * one array; 0 where they are arrays of their own. From a layer to the next: tokens times that.
   * q_out is never a part of them. */
  int64_t q_token_stride, kv_token_stride;

  /* The cache. All strides in bytes and not negative. */
  void* const* buffers; /* host array of num_buffers base addresses */
  int64_t num_buffers;
  int64_t buffer_bytes; /* the size of the smallest */
  int64_t num_layers, num_blocks, block_size;
  int64_t layer, layers;      /* the first layer that is written, and how many are */
  const int32_t* layer_at;    /* or NULL: one int32 on the GPU in place of `layer` */
  int64_t layer_table_stride; /* 1 where each layer is a buffer, else 0 */
  int64_t layer_stride, block_stride, outer_stride, token_stride, head_stride, dim_stride;

  const float *k_scale, *v_scale;       /* one number each, or one for each KV head */
  int32_t k_scale_heads, v_scale_heads; /* 1 or K */
  float *k_scales, *v_scales; /* [num_layers, num_blocks, block_size, K], or of one layer */
  int32_t scale_layers;       /* num_layers or 1 */

  int32_t rotary_dim, interleaved; /* 0: nothing turns */
  const int32_t* positions;        /* [tokens]; NULL with cos_sin: row i is token i's */
  const float* inv_freq;           /* [rotary_dim / 2] */
  const float* cos_sin;            /* [cos_sin_rows, rotary_dim] */
  int64_t cos_sin_rows;

  const void *q_norm, *k_norm;        /* [D] */
  int32_t q_norm_dtype, k_norm_dtype; /* dtype or KVBLOCK_APPEND_F32 */
  float norm_eps;

  int32_t zero_tail;
} kvblock_append;

/* Each function returns NULL on success, else a message that lives until this thread's next call.
 */

/* Checks every number, and that what the call needs is there. It looks at no array. */
KVBLOCK_EXPORT const char* kvblock_append_check(const kvblock_append* a);

/* Enqueues the append on `stream`, a cudaStream_t. */
KVBLOCK_EXPORT const char* kvblock_append_cuda(const kvblock_append* a, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* KVBLOCK_APPEND_H_ */
