/* clang-format off */
/* kvblock/cast.h: the launcher of casts to 8 bits, for C, C++, Rust and ctypes.
 *
 * A matrix x [rows, columns] becomes codes of 8 bits, in both orders. In float32:
 *
 *   out[i, j] = transposed[j, i] = x[i, j] * scale   rounded to nearest even, held to the format's
 *                                                    largest number (448 or 57344); NaN stays NaN
 *   largest[t] = max |x|                             over the t-th tile of 256 rows and 128 columns,
 *                                                    row by row of tiles; NaN if one is
 *
 * Products of 8 bits want both operands with the contracted axis innermost, so a matrix that takes
 * part in two products is wanted in both orders; and the scale of the next step wants the largest
 * size. This is all of it in one launch that reads x once.
 *
 * Every number is checked before anything is touched. Nothing is allocated and nothing is synchronized;
 * the launch can be captured in a CUDA graph.
 */
/* clang-format on */
#ifndef KVBLOCK_CAST_H_
#define KVBLOCK_CAST_H_

#include <stdint.h>

#include "kvblock/export.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { KVBLOCK_CAST_TILE_ROWS = 256, KVBLOCK_CAST_TILE_COLUMNS = 128 };

typedef enum kvblock_cast_dtype {
  KVBLOCK_CAST_BF16 = 0,
  KVBLOCK_CAST_F16 = 1,
  KVBLOCK_CAST_F32 = 2,
} kvblock_cast_dtype;

typedef enum kvblock_cast_format {
  KVBLOCK_CAST_E4M3 = 0, /* float8_e4m3fn */
  KVBLOCK_CAST_E5M2 = 1,
} kvblock_cast_format;

typedef struct kvblock_cast {
  int32_t dtype;         /* kvblock_cast_dtype, of x */
  int32_t format;        /* kvblock_cast_format, of out and transposed */
  int64_t rows, columns; /* multiples of 16; 0 for nothing */
  const void* x;         /* [rows, columns], aligned to 16 bytes */
  const float* scale;    /* one number */
  void* out;             /* [rows, columns], aligned to 16 bytes, or NULL */
  void* transposed;      /* [columns, rows], aligned to 16 bytes, or NULL */
  float* largest;        /* a number for each tile */
} kvblock_cast;

/* Each of these returns NULL on success, else a message that lives until this thread's next call.
 */

/* Checks every number, and that what the call needs is there. It looks at no array. */
KVBLOCK_EXPORT const char* kvblock_cast_check(const kvblock_cast* a);

/* Enqueues the launch on `stream`, a cudaStream_t. */
KVBLOCK_EXPORT const char* kvblock_cast_cuda(const kvblock_cast* a, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* KVBLOCK_CAST_H_ */
