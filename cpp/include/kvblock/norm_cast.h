/* clang-format off */
/* kvblock/norm_cast.h: the launcher of norms that end in 8 bits, for C, C++, Rust and ctypes.
 *
 * A matrix x [rows, columns], or the sum of it and a residual, is normed row by row (RMSNorm) and
 * becomes codes of 8 bits, in both orders. In float32:
 *
 *   sum[i, j] = x[i, j] + residual[i, j]     rounded to dtype, to nearest even; x without a residual
 *   inverse_rms[i] = 1 / sqrt(mean of sum[i, j]^2 over j + eps)
 *   normed[i, j] = sum[i, j] * inverse_rms[i] * gamma[j]
 *   out[i, j] = transposed[j, i] = normed[i, j] * scale   rounded to nearest even, held to the format's
 *                                                    largest number (448 or 57344); NaN stays NaN
 *   largest[r, c] = max |normed|                     over rows 32 r to 32 r + 31 and the c-th part of
 *                                                    the columns; NaN if one is
 *
 * This is one launch that reads x and the residual once. A thread block cluster has 32 rows, each of
 * its thread blocks a part of their columns: GPUs of compute capability 9.0 run it, in a build with
 * 90a among its architectures.
 *
 * Every number is checked before anything is touched. Nothing is allocated and nothing is synchronized;
 * the launch can be captured in a CUDA graph.
 */
/* clang-format on */
#ifndef KVBLOCK_NORM_CAST_H_
#define KVBLOCK_NORM_CAST_H_

#include <stdint.h>

#include "kvblock/cast.h"
#include "kvblock/export.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  KVBLOCK_NORM_CAST_ROWS = 32,     /* of a number in `largest` */
  KVBLOCK_NORM_CAST_COLUMNS = 512, /* of one, at least */
  KVBLOCK_NORM_CAST_PARTS = 16,    /* of a row, at most */
};

typedef struct kvblock_norm_cast {
  int32_t dtype;       /* kvblock_cast_dtype, of x, residual and sum */
  int32_t gamma_dtype; /* dtype, or KVBLOCK_CAST_F32 */
  int32_t format;      /* kvblock_cast_format, of out and transposed */
  float eps;           /* not negative */
  int64_t rows,
      columns;          /* multiples of 16, 0 for nothing; columns up to 16384, of F32 up to 8192 */
  const void* x;        /* [rows, columns], aligned to 16 bytes, as all matrices and gamma are */
  const void* residual; /* [rows, columns], or NULL */
  const void* gamma;    /* [columns] */
  const float* scale;   /* one number */
  void* sum;            /* [rows, columns]; may be x or residual; NULL without a residual alone */
  void* out;            /* [rows, columns], or NULL */
  void* transposed;     /* [columns, rows], or NULL */
  float* largest;       /* [ceil(rows / 32), ceil(columns / part)] */
  float* inverse_rms;   /* [rows], or NULL */
} kvblock_norm_cast;

/* How many columns a part has: 512, and twice as many until there are at most 16 parts. */
KVBLOCK_EXPORT int64_t kvblock_norm_cast_part(int64_t columns);

/* Each of these returns NULL on success, else a message that lives until this thread's next call.
 */

/* Checks every number, and that what the call needs is there. It looks at no array. */
KVBLOCK_EXPORT const char* kvblock_norm_cast_check(const kvblock_norm_cast* a);

/* Enqueues the launch on `stream`, a cudaStream_t. */
KVBLOCK_EXPORT const char* kvblock_norm_cast_cuda(const kvblock_norm_cast* a, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* KVBLOCK_NORM_CAST_H_ */
