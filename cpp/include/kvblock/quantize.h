/* clang-format off */
/* kvblock/quantize.h: the quantization launcher, for C, C++, Rust and ctypes.
 *
 * Arrays of 16 bits, [batch, rows, heads, dim], become float8_e4m3fn or int8, with scales, several in one call
 * (queries, keys and values). For each row and head of each array, in float32:
 *
 *   y = x                          0 in rows from lens[batch] on
 *   y = y - mean                   with `mean`: of the head's rows below lens[batch], which is stored there
 *   y = y * M                      with `turns`: M is orthogonal, the same for all arrays of one dim
 *   scale = max |y| * (1 / 448)    over what shares it, at least 2^-126; 1 where all are 0; NaN if one is
 *   out = y / scale                rounded to nearest even, held to -448 .. 448
 *
 * With `integers` 127 takes the place of 448, and out, y * (1 / scale), is int8. NaN has no code there: the
 * scale tells.
 *
 * What shares a scale: 128 rows of a head, a head, or all heads of a batch member. Rows from lens[batch]
 * on count for nothing.
 *
 * M is signs, and then a Hadamard matrix: with dim = r * p, p a power of 2 and r odd,
 *
 *   M[i, j] = s(i) R[i / p, j / p] (-1)^popcount((i % p) & (j % p)) / sqrt(p)
 *   R[a, b] = (cos(2 pi a b / r) + sin(2 pi a b / r)) / sqrt(r)
 *
 * s(i) is -1 where bit i % 32 of word i / 32 is set, of 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344
 * (digits of pi), else 1.
 *
 * Every number is checked before anything is touched. Nothing is allocated and nothing is synchronized;
 * the launches, one to three, can be captured in a CUDA graph. The same arrays give the same bits.
 */
/* clang-format on */
#ifndef KVBLOCK_QUANTIZE_H_
#define KVBLOCK_QUANTIZE_H_

#include <stdint.h>

#include "kvblock/export.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { KVBLOCK_QUANTIZE_MAX_ARRAYS = 4 }; /* of a call */
enum { KVBLOCK_QUANTIZE_ROWS = 128 };     /* that share a scale of blocks */
enum { KVBLOCK_QUANTIZE_MAX_DIM = 128 };

typedef enum kvblock_quantize_dtype {
  KVBLOCK_QUANTIZE_BF16 = 0,
  KVBLOCK_QUANTIZE_F16 = 1,
} kvblock_quantize_dtype;

typedef enum kvblock_quantize_shared {
  KVBLOCK_QUANTIZE_BLOCK = 0,  /* KVBLOCK_QUANTIZE_ROWS rows of a head */
  KVBLOCK_QUANTIZE_HEAD = 1,   /* a head of a batch member */
  KVBLOCK_QUANTIZE_TENSOR = 2, /* all heads of a batch member */
} kvblock_quantize_shared;

/* Strides are in bytes and not negative; the elements of a row follow each other. x and its strides
 * are multiples of 16 bytes, out and its strides of 8. */
typedef struct kvblock_quantize_array {
  const void* x; /* [batch, rows, heads, dim] */
  void* out;     /* the same in e4m3, or int8 */
  float* scales; /* [batch, heads, blocks], blocks = max(1, ceil(rows / 128)); else [batch, heads,
                    1] */
  float* mean;   /* [batch, heads, dim], or NULL: nothing is taken away */
  const int32_t* lens; /* [batch], or NULL: all rows count */
  int64_t rows;
  int32_t heads, dim; /* dim: a multiple of 16, at most KVBLOCK_QUANTIZE_MAX_DIM */
  int64_t batch_stride, row_stride, head_stride;             /* of x */
  int64_t out_batch_stride, out_row_stride, out_head_stride; /* of out */
  int32_t shared;                                            /* kvblock_quantize_shared */
  int32_t turns, integers;                                   /* 0 or 1 */
} kvblock_quantize_array;

typedef struct kvblock_quantize {
  int32_t dtype; /* kvblock_quantize_dtype, of every x */
  int32_t num_arrays;
  int64_t batch;
  kvblock_quantize_array arrays[KVBLOCK_QUANTIZE_MAX_ARRAYS];
  void* workspace; /* of at least kvblock_quantize_workspace bytes, aligned to 4 */
  int64_t workspace_bytes;
} kvblock_quantize;

/* The bytes of workspace of a call, 0 for none, or -1 where the check says something. It looks at
 * no pointer but whether there is a mean. */
KVBLOCK_EXPORT int64_t kvblock_quantize_workspace(const kvblock_quantize* a);

/* Each of these returns NULL on success, else a message that lives until this thread's next call.
 */

/* Checks every number, and that what the call needs is there. It looks at no array. */
KVBLOCK_EXPORT const char* kvblock_quantize_check(const kvblock_quantize* a);

/* Enqueues the launches on `stream`, a cudaStream_t. */
KVBLOCK_EXPORT const char* kvblock_quantize_cuda(const kvblock_quantize* a, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* KVBLOCK_QUANTIZE_H_ */
