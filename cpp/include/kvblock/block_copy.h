/* clang-format off */
/* kvblock/block_copy.h: the block-copy launchers, for C, C++, Rust and ctypes.
 *
 * One call copies a strided box of elements between two sets of buffers. Each side says by strides
 * how it lies in memory, so one engine serves every layout:
 *
 *   for every coordinate c with 0 <= c[k] < dims[k]:
 *     dst.address(c)[0 .. unit) = src.address(c)[0 .. unit)
 *
 *   side.address(c) = side.buffers[table] + bytes, with
 *
 *     table = sum_k c[k] * table_strides[k] + s * start_table_stride
 *     bytes = offset + sum_k c[k] * strides[k] + s * start_stride
 *             + (i / id_inner) * id_outer_stride + (i % id_inner) * id_inner_stride
 *
 *   where i = ids[c[0]] (0 without ids) and s = *start (0 without a start).
 *
 * A source id outside [0, id_limit), or a source start outside [0, start_limit), reads zeros; the
 * same on the destination side writes nothing. Nothing is allocated and nothing is synchronized.
 * All strides and offsets are in bytes and not negative. Source and destination must not overlap.
 *
 * Every number is checked before anything is touched, and so is every pointer that is NULL. What the
 * caller says of its memory is believed: that `buffers` has num_buffers entries of buffer_bytes bytes
 * each, and `ids` dims[0] entries.
 */
/* clang-format on */
#ifndef KVBLOCK_BLOCK_COPY_H_
#define KVBLOCK_BLOCK_COPY_H_

#include <stdint.h>

#include "kvblock/export.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { KVBLOCK_MAX_RANK = 8 };

typedef struct kvblock_side {
  void* const* buffers; /* host array of num_buffers base addresses; NULL where buffer_bytes is 0 */
  int64_t num_buffers;
  int64_t buffer_bytes; /* the size of the smallest buffer: every address is checked against it */
  int64_t offset;
  int64_t strides[KVBLOCK_MAX_RANK];
  int64_t table_strides[KVBLOCK_MAX_RANK];
  const int32_t* ids; /* dims[0] ids where the launcher's device can read them, or NULL */
  int64_t id_limit;
  int64_t id_inner; /* 1 for block ids; the block size for token slots */
  int64_t id_outer_stride;
  int64_t id_inner_stride;
  const int32_t* start; /* one int32 where the launcher's device can read it, or NULL */
  int64_t start_limit;
  int64_t start_stride;
  int64_t start_table_stride;
} kvblock_side;

typedef struct kvblock_copy {
  int64_t rank; /* 1 .. KVBLOCK_MAX_RANK */
  int64_t dims[KVBLOCK_MAX_RANK];
  int64_t unit; /* bytes that one coordinate stands for: 1, 2, 4, 8 or 16 */
  kvblock_side src;
  kvblock_side dst;
} kvblock_copy;

/* How the CUDA launcher moves the bytes. KERNEL serves every copy and can be captured in a CUDA
 * graph. BATCH (one cudaMemcpyBatchAsync, CUDA 12.8 and newer, not on the legacy default stream,
 * not under capture) and ASYNC (one cudaMemcpyAsync a run) enumerate the contiguous runs on the
 * host, so they take no ids and no start. */
typedef enum kvblock_backend {
  KVBLOCK_KERNEL = 0,
  KVBLOCK_BATCH = 1,
  KVBLOCK_ASYNC = 2,
} kvblock_backend;

/* Each function returns NULL on success, else a message that lives until this thread's next call.
 */

/* Checks that every address the copy can reach lies inside its buffer. The launchers call it. */
KVBLOCK_EXPORT const char* kvblock_copy_check(const kvblock_copy* copy);

/* Enqueues the copy on `stream` (a cudaStream_t). Buffers: device memory or pinned host memory. */
KVBLOCK_EXPORT const char* kvblock_copy_cuda(const kvblock_copy* copy, kvblock_backend backend,
                                             void* stream);

/* Enqueues a copy of bytes between places of the GPU; none where both are one place. Handlers that
 * write into operands call it first: XLA may give a result other memory than the operand's that it
 * is to update, as where a loop stacks results. */
KVBLOCK_EXPORT const char* kvblock_copy_bytes_cuda(void* to, const void* from, int64_t bytes,
                                                   void* stream);

/* Copies on the CPU, in this thread and in those that `schedule(context, task, data)` lends. It may
 * be NULL; then this thread copies alone. A task that is run after the copy has ended does nothing.
 */
typedef void (*kvblock_task)(void* data);
typedef void (*kvblock_schedule)(void* context, kvblock_task task, void* data);
KVBLOCK_EXPORT const char* kvblock_copy_cpu(const kvblock_copy* copy, int64_t num_threads,
                                            kvblock_schedule schedule, void* context);

/* 1 when this library was built with the CUDA launchers. */
KVBLOCK_EXPORT int kvblock_has_cuda(void);

#ifdef __cplusplus
}
#endif

#endif /* KVBLOCK_BLOCK_COPY_H_ */
