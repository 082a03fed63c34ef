/* clang-format off */
/* kvblock/copy_stream.h: copies between host and device memory beside all other work, for C, C++,
 * Rust and ctypes.
 *
 * A copy is a list of strips, rows of bytes with gaps between them:
 *
 *   for every strip s and row i with 0 <= i < s.rows:
 *     (s.to + i * s.to_pitch)[0 .. s.bytes) = (s.from + i * s.from_pitch)[0 .. s.bytes)
 *
 * A stream has copies run one after the other, apart from every other stream, so that they wait for
 * nobody and nobody waits for them. The caller sees to the order: what a copy reads has to be written
 * before it starts, and nobody may write there, read where it writes, or free either, before its mark
 * says that it has ended.
 *
 * Strips that continue each other on both sides are joined. What a strip writes, no other strip of
 * the copy may read or write.
 *
 * Every number is checked before anything is touched, and so is every pointer that is NULL. Of the
 * first strip's addresses it is asked where they lie: memory that the device cannot reach, or that the
 * host has not pinned, is refused, since such a copy would wait and crawl. All else that the caller
 * says of its memory is believed.
 */
/* clang-format on */
#ifndef KVBLOCK_COPY_STREAM_H_
#define KVBLOCK_COPY_STREAM_H_

#include <stdint.h>

#include "kvblock/export.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvblock_strip {
  void* to;
  const void* from;
  int64_t bytes; /* of a row, at least 1 */
  int64_t rows;  /* at least 1 */
  /* From one row to the next, at least `bytes` and below 2^31; not looked at where rows is 1. */
  int64_t to_pitch, from_pitch;
} kvblock_strip;

typedef struct kvblock_copy_stream kvblock_copy_stream;
typedef struct kvblock_copy_mark kvblock_copy_mark; /* when a copy has ended */

/* Each function returns NULL on success, else a message that lives until this thread's next call.
 */

/* Only checks; the others call it first. */
KVBLOCK_EXPORT const char* kvblock_strips_check(const kvblock_strip* strips, int64_t count);

/* Copies on the CPU, in the calling thread. It has ended when it returns. */
KVBLOCK_EXPORT const char* kvblock_strips_copy_cpu(const kvblock_strip* strips, int64_t count);

/* Makes a stream on a CUDA device, by CUDA's number of it; threads may share it. Closing waits for
 * its copies. Both leave the thread's current device as it was, as all functions here do. */
KVBLOCK_EXPORT const char* kvblock_copy_stream_open(int device, kvblock_copy_stream** stream);
KVBLOCK_EXPORT const char* kvblock_copy_stream_close(kvblock_copy_stream* stream);

/* Enqueues a copy and makes its mark, which the caller frees. Where it returns a message there is
 * no mark, and whatever was enqueued has ended. */
KVBLOCK_EXPORT const char* kvblock_copy_stream_start(kvblock_copy_stream* stream,
                                                     const kvblock_strip* strips, int64_t count,
                                                     kvblock_copy_mark** mark);

/* Whether the copy has ended; sleeps until it has, with the processor free. */
KVBLOCK_EXPORT const char* kvblock_copy_mark_done(kvblock_copy_mark* mark, int* done);
KVBLOCK_EXPORT const char* kvblock_copy_mark_wait(kvblock_copy_mark* mark);

/* Frees the mark alone: the copy goes on. */
KVBLOCK_EXPORT const char* kvblock_copy_mark_free(kvblock_copy_mark* mark);

#ifdef __cplusplus
}
#endif

#endif /* KVBLOCK_COPY_STREAM_H_ */
