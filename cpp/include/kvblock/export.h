/* clang-format off */
/* kvblock/export.h: what the headers of libkvblock.so share. */
/* clang-format on */
#ifndef KVBLOCK_EXPORT_H_
#define KVBLOCK_EXPORT_H_

#if defined(__GNUC__)
#define KVBLOCK_EXPORT __attribute__((visibility("default")))
#else
#define KVBLOCK_EXPORT
#endif

#endif /* KVBLOCK_EXPORT_H_ */
