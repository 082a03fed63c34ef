"""The driver's functions as the launcher declares them are those of cuda.h."""

from __future__ import annotations

import subprocess
from pathlib import Path

from cpp_programs import compiler
from cuda.pathfinder import find_nvidia_header_directory

ROOT = Path(__file__).parents[2]
PROGRAM = """
#include <cuda.h>
#include <cstddef>
#include <type_traits>
#include "ops/kernel_call/driver.h"
namespace own = kvblock::driver;

// Arguments of the same number and sizes, in the same order.
template <typename... A> struct Sizes {};
template <typename F> struct Of;
template <typename R, typename... A> struct Of<R (*)(A...)> {
  static constexpr size_t count = sizeof...(A);
  static constexpr size_t sizes[sizeof...(A) + 1] = {sizeof(A)..., 0};
};
template <typename F, typename G> constexpr bool Same() {
  if (Of<F>::count != Of<G>::count) return false;
  for (size_t i = 0; i < Of<F>::count; ++i) {
    if (Of<F>::sizes[i] != Of<G>::sizes[i]) return false;
  }
  return true;
}
#define CHECK(name, symbol, parameters) \\
  static_assert(Same<decltype(own::Driver::name), decltype(&symbol)>(), #symbol);
KVBLOCK_DRIVER_FUNCTIONS(CHECK)

#define SAME(a, b) static_assert(static_cast<int>(a) == static_cast<int>(b), #b)
using Attribute = CUlaunchAttribute;
using Config = CUlaunchConfig;
SAME(sizeof(own::LaunchAttribute), sizeof(Attribute));
SAME(offsetof(own::LaunchAttribute, value), offsetof(Attribute, value));
SAME(sizeof(own::LaunchConfig), sizeof(Config));
SAME(offsetof(own::LaunchConfig, block), offsetof(Config, blockDimX));
SAME(offsetof(own::LaunchConfig, shared_bytes), offsetof(Config, sharedMemBytes));
SAME(offsetof(own::LaunchConfig, stream), offsetof(Config, hStream));
SAME(offsetof(own::LaunchConfig, attributes), offsetof(Config, attrs));
SAME(offsetof(own::LaunchConfig, count), offsetof(Config, numAttrs));
SAME(own::kErrorLog, CU_JIT_ERROR_LOG_BUFFER);
SAME(own::kErrorLogBytes, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES);
SAME(own::kMaxThreads, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
SAME(own::kStaticShared, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
SAME(own::kMaxDynamicShared, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME(own::kNonPortableCluster, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
SAME(own::kMaxSharedOfBlock, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
SAME(own::kCooperative, CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
SAME(own::kCluster, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME(own::kRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(own::kNoCapture, CU_STREAM_CAPTURE_STATUS_NONE);
"""


def test_it_is_that_of_the_header(tmp_path):
    folder = find_nvidia_header_directory("cudart")
    assert folder, "nvidia-cuda-runtime, of the test extra, has cuda.h"
    program = tmp_path / "abi.cc"
    program.write_text(PROGRAM)
    include = (f"-I{folder}", f"-I{ROOT / 'cpp'}")
    subprocess.run(
        [compiler(), "-std=c++17", "-fsyntax-only", *include, str(program)], check=True
    )
