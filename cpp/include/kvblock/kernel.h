/* kvblock/kernel.h: kernels that are not this library's own, launched through the driver.
 *
 * A kernel is an image, PTX, cubin or fatbin, and the name of an entry in it. It is loaded once in
 * a process; for each GPU when it is prepared there, which takes as long as the driver compiles
 * PTX. A launch allocates nothing and does not synchronize, so it can be captured in a CUDA graph.
 *
 * The driver, libcuda.so.1, is looked up when it is first needed and not linked.
 */
#ifndef KVBLOCK_KERNEL_H_
#define KVBLOCK_KERNEL_H_

#include <stddef.h>
#include <stdint.h>

#include "kvblock/export.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvblock_kernel kvblock_kernel;

/* How a kernel is launched, whatever its parameters are. */
typedef struct kvblock_kernel_shape {
  uint32_t grid[3], block[3];
  uint32_t cluster[3];   /* zeros: no clusters */
  uint32_t shared_bytes; /* dynamic shared memory of a block */
  int32_t cooperative;   /* all blocks run at once, and may meet */
} kvblock_kernel_shape;

/* A tensor map, which travels by value: 128 bytes. The words are the driver's, and so are the
 * numbers of its enumerations (cuTensorMapEncodeTiled). Sizes and box come with the innermost dim
 * first. */
typedef struct kvblock_kernel_map {
  int32_t dtype, rank;
  uint64_t sizes[5], strides[4]; /* strides in bytes, of all but the innermost dim */
  uint32_t box[5], steps[5];
  int32_t interleave, swizzle, l2_promotion, fill;
} kvblock_kernel_map;

/* Makes a kernel of an image, which is copied. `shown` is what messages call it. Nothing is loaded.
 */
KVBLOCK_EXPORT kvblock_kernel* kvblock_kernel_create(const void* image, size_t bytes,
                                                     const char* entry, const char* shown);
KVBLOCK_EXPORT void kvblock_kernel_destroy(kvblock_kernel* kernel);

/* Loads the kernel for the current context, if it is not yet, and lets it have so much shared
 * memory. Every function returns NULL, or a message that lives until the thread's next call. */
KVBLOCK_EXPORT const char* kvblock_kernel_prepare(kvblock_kernel* kernel,
                                                  const kvblock_kernel_shape* shape);

/* Launches a prepared kernel on a stream. `parameters`: the address of each parameter's value. */
KVBLOCK_EXPORT const char* kvblock_kernel_launch(kvblock_kernel* kernel,
                                                 const kvblock_kernel_shape* shape,
                                                 void** parameters, void* stream);

/* Waits for the stream, and says which kernel ran where it failed. Not where work is captured. */
KVBLOCK_EXPORT const char* kvblock_kernel_wait(kvblock_kernel* kernel, void* stream);

KVBLOCK_EXPORT const char* kvblock_kernel_encode(kvblock_kernel* kernel,
                                                 const kvblock_kernel_map* map, void* address,
                                                 void* to_128_bytes);

/* On the stream, like a launch. */
KVBLOCK_EXPORT const char* kvblock_kernel_zero(void* memory, size_t bytes, void* stream);
KVBLOCK_EXPORT const char* kvblock_kernel_copy(void* to, const void* from, size_t bytes,
                                               void* stream);

#ifdef __cplusplus
}
#endif

#endif /* KVBLOCK_KERNEL_H_ */
