// The C structures of the DLPack protocol, version 1
// (https://dmlc.github.io/dlpack/latest/c_api.html).
#ifndef KVBLOCK_DLPACK_ABI_H_
#define KVBLOCK_DLPACK_ABI_H_

#include <cstdint>

extern "C" {

typedef struct {
  uint32_t major, minor;
} DLPackVersion;

typedef struct {
  int32_t device_type, device_id;
} DLDevice;

typedef struct {
  uint8_t code, bits;
  uint16_t lanes;
} DLDataType;

typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; NULL for row-major
  uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(struct DLManagedTensor* self);
} DLManagedTensor;

typedef struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned* self);
  uint64_t flags;
  DLTensor dl_tensor;
} DLManagedTensorVersioned;

}  // extern "C"

enum : uint64_t { kDLFlagReadOnly = 1, kDLFlagIsCopied = 2 };
enum : uint32_t { kDLPackMajor = 1, kDLPackMinor = 1 };

#endif  // KVBLOCK_DLPACK_ABI_H_
