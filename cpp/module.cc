// The Python module: FFI handlers as capsules, how this build was made, DLPack views, free lists.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "dlpack/export.h"
#include "kvblock/block_copy.h"
#include "objects/free_list.h"
#include "objects/tree.h"
#include "ops/after/after_ffi.h"
#include "ops/append/append_ffi.h"
#include "ops/attention/attention_ffi.h"
#include "ops/attention/paged_ffi.h"
#include "ops/block_copy/block_copy_ffi.h"
#include "ops/cast/cast_ffi.h"
#include "ops/kernel_call/kernel_call_ffi.h"
#include "ops/quantize/quantize_ffi.h"
#include "ops/select/select_ffi.h"

namespace nb = nanobind;

namespace {

nb::capsule Handler(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// A call of a kernel has stages: execute is either of two.
nb::dict KernelCall(XLA_FFI_Handler* execute) {
  nb::dict stages;
  stages["instantiate"] = Handler(KvblockKernelInstantiate);
  stages["prepare"] = Handler(KvblockKernelPrepare);
  stages["execute"] = Handler(execute);
  return stages;
}

// {platform: {target name: handler, or {stage: handler}}}
nb::dict Handlers() {
  nb::dict cpu, cuda, all;
  cpu["kvblock_copy"] = Handler(KvblockCopyCpu);
  if (kvblock_has_cuda()) {
    cuda["kvblock_copy"] = Handler(KvblockCopyCuda);
    cuda["kvblock_copy_runs"] = Handler(KvblockCopyCudaRuns);
    cuda["kvblock_after"] = Handler(KvblockAfter);
    cuda["kvblock_append"] = Handler(KvblockAppend);
    cuda["kvblock_attention_forward"] = Handler(KvblockAttentionForward);
    cuda["kvblock_attention_backward_kv"] = Handler(KvblockAttentionBackwardKv);
    cuda["kvblock_attention_backward_q"] = Handler(KvblockAttentionBackwardQ);
    cuda["kvblock_attention_backward_bias"] = Handler(KvblockAttentionBackwardBias);
    cuda["kvblock_paged_attention"] = Handler(KvblockPagedAttention);
    cuda["kvblock_cast"] = Handler(KvblockCast);
    cuda["kvblock_norm_cast"] = Handler(KvblockNormCast);
    cuda["kvblock_quantize"] = Handler(KvblockQuantize);
    cuda["kvblock_pool_pieces"] = Handler(KvblockPoolPieces);
    cuda["kvblock_weigh_tiles"] = Handler(KvblockWeighTiles);
    cuda["kvblock_keep_tiles"] = Handler(KvblockKeepTiles);
    cuda["kvblock_list_tiles"] = Handler(KvblockListTiles);
  }
  // The driver alone is needed.
  cuda["kvblock_kernel_call"] = KernelCall(KvblockKernelExecute);
  cuda["kvblock_kernel_call_debug"] = KernelCall(KvblockKernelExecuteAndWait);
  all["cpu"] = cpu;
  all["CUDA"] = cuda;
  return all;
}

// {name: {"type_id": …, "type_info": …}}, of what is kept between stages.
nb::dict StateTypes() {
  nb::dict kernel, all;
  kernel["type_id"] = nb::capsule(kvblock::KernelStateId());
  kernel["type_info"] = nb::capsule(kvblock::KernelStateInfo());
  all["kvblock_kernel_call"] = kernel;
  return all;
}

nb::dict BuildInfo() {
  nb::dict info;
  info["version"] = KVBLOCK_VERSION;
  info["compiler"] = KVBLOCK_COMPILER;
  info["cuda"] = kvblock_has_cuda() != 0;
  info["cuda_version"] = KVBLOCK_CUDA_VERSION;
  info["cuda_architectures"] = KVBLOCK_CUDA_ARCHITECTURES;
  return info;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "XLA FFI handlers, DLPack views and free lists of jax_kvblock.";
  m.def("handlers", &Handlers, nb::sig("def handlers() -> dict[str, dict[str, object]]"),
        "The FFI handlers as capsules: {platform: {target: capsule, or {stage: capsule}}}.");
  m.def("state_types", &StateTypes, nb::sig("def state_types() -> dict[str, dict[str, object]]"),
        "What handlers keep between stages, as XLA knows types: {name: {part: capsule}}.");
  m.def("build_info", &BuildInfo, nb::sig("def build_info() -> dict[str, str | bool]"),
        "How this module was built.");
  m.def("attention_workspace", &AttentionWorkspace, nb::arg("kernels"), nb::arg("dtype"),
        nb::arg("batch"), nb::arg("q_len"), nb::arg("kv_len"), nb::arg("num_heads"),
        nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("value_dim"), nb::arg("present"),
        nb::arg("backward"),
        "Bytes of workspace of a call of the attention kernels, forward or backward_kv.");
  m.def("paged_attention_workspace", &PagedAttentionWorkspace, nb::arg("calls"),
        nb::arg("sequences"), nb::arg("rows"), nb::arg("num_heads"), nb::arg("num_kv_heads"),
        nb::arg("value_dim"), nb::arg("narrow"), nb::arg("split_size"), nb::arg("table_width"),
        nb::arg("block_size"), nb::arg("head_dim"), nb::arg("narrow_queries"),
        "Bytes of workspace of a call of paged attention's kernels.");
  RegisterDLPack(m);
  RegisterFreeList(m);
  RegisterBlockTable(m);
  RegisterTree(m);
}
