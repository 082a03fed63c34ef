"""Kernels of one's own: what a call costs beside one of XLA's own kind, and a graph.

empty        a call of an empty kernel with two arrays, in a chain of 500 in one
             program, beside a handler of XLA's FFI in C++ that launches the same
             (compiled by nvcc here); captured in command buffers, and without
100 scalars  a chain of a kernel with 100 numbers, compiled in and traced, from a clock
             on the GPU before the chain to one behind it
20 kernels   a graph of 20 tiny kernels, from the clock in its first kernel to that
             in its last, beside the same by CuPy in a CUDA graph of its own
nvrtc        from_cuda the first time, and when it is on disk already, in a process
             that has compiled nothing
w4a16        a product of few rows with weights in 4 bits (examples/w4a16.py) beside
             XLA's in bfloat16; 16 weights one after the other, more than L2 holds, and
             20 times round in one program

python benchmarks/bench_kernels.py            on a GPU; elsewhere nvrtc alone
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support import common
from support.common import OURS, Results

from jax_kvblock import kernels
from jax_kvblock.graphs import BlockBuilder, Graph

CHAIN, SCALARS, NODES = 500, 100, 20
NO_CAPTURE = {"xla_gpu_enable_command_buffer": ""}

KERNELS = r"""
extern "C" __global__ void empty(const float* x, float* y) {}
extern "C" __global__ void step(float* x) { x[threadIdx.x] += 1.0f; }
extern "C" __global__ void stamp(float* x, unsigned* clock) {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  if (threadIdx.x == 0) {
    clock[0] = static_cast<unsigned>(now);
    clock[1] = static_cast<unsigned>(now >> 32);
  }
}
"""
NATIVE = r"""
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
__global__ void empty(const float* x, float* y) {}
ffi::Error Launch(cudaStream_t stream, ffi::AnyBuffer x,
                  ffi::Result<ffi::AnyBuffer> y) {
  empty<<<1, 32, 0, stream>>>(static_cast<const float*>(x.untyped_data()),
                              static_cast<float*>(y->untyped_data()));
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Empty, Launch,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});
"""


def bench(options: argparse.Namespace, results: Results) -> None:
    works: dict[str, Callable[[Results, bool], None]] = {"nvrtc": _nvrtc}
    if common.on_gpu():
        works |= {
            "empty": _empty,
            "100 scalars": _scalars,
            "20 kernels": _graph,
            "w4a16": _w4a16,
        }
    for name, work in works.items():
        try:
            work(results, options.quick)
        except Exception as error:
            results.fail(name, OURS, error)
        results.save()


def seconds_of(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Median seconds of each, all in turns, waited for."""
    times: list[list[float]] = [[] for _ in calls]
    for n in range(rounds + 3):
        for call, found in zip(calls, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call())
            if n >= 3:
                found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in times]


def compiled(function: Any, *operands: Any, capture: bool = True) -> Callable[[], Any]:
    options = {} if capture else NO_CAPTURE
    made = jax.jit(function).lower(*operands).compile(compiler_options=options)
    return lambda: made(*operands)


# ---- calls ---------------------------------------------------------------------------


def _chain(call: Callable[[Any], Any], count: int) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        for _ in range(count):
            x = call(x)
        return x

    return run


def _empty(results: Results, quick: bool) -> None:
    native = _native()
    own = kernels.from_cuda(KERNELS, "empty")
    x = jnp.zeros(32)

    def by_us(x: Any) -> Any:
        return kernels.kernel_call(own, x, out=x, grid=1, block=32)

    def by_ffi(x: Any) -> Any:
        return jax.ffi.ffi_call(native, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    count = 20 if quick else CHAIN
    for way in ("captured", "launched"):
        runs = [
            compiled(_chain(call, count), x, capture=way == "captured")
            for call in (by_us, by_ffi)
        ]
        times = seconds_of(runs, 3 if quick else 60)
        ours, theirs = (seconds / count * 1e6 for seconds in times)
        results.add(f"empty / {way}", OURS, "time", ours, "us")
        results.add(f"empty / {way}", "xla ffi", "time", theirs, "us")
        results.add(f"empty / {way}", OURS, "over xla ffi", ours - theirs, "us")


def _native() -> str:
    """The name of a target of FFI that launches an empty kernel."""
    folder = Path(tempfile.mkdtemp())
    source, library = folder / "native.cu", folder / "native.so"
    source.write_text(NATIVE)
    command = ["nvcc", "-std=c++17", "-O2", "-shared", "-Xcompiler", "-fPIC"]
    command += [f"-I{jax.ffi.include_dir()}", "-arch=native"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    handler = ctypes.CDLL(str(library)).Empty
    jax.ffi.register_ffi_target(
        "kvblock_bench_empty", jax.ffi.pycapsule(handler), platform="CUDA"
    )
    return "kvblock_bench_empty"


def _scalars(results: Results, quick: bool) -> None:
    names = [f"a{i}" for i in range(SCALARS)]
    source = (
        'extern "C" __global__ void add_all(float* x, '
        + ", ".join(f"float {name}" for name in names)
        + f") {{ x[threadIdx.x] += {' + '.join(names)}; }}"
    )
    own = kernels.from_cuda(source, "add_all")
    x, values = jnp.zeros(32), [jnp.float32(i) for i in range(SCALARS)]

    def call(x: Any, scalars: Any) -> Any:
        return kernels.kernel_call(
            own, x, out=x, aliases={0: 0}, scalars=scalars, grid=1, block=32
        )

    count = 20 if quick else CHAIN
    stamp = kernels.from_cuda(KERNELS, "stamp")
    clock = jax.ShapeDtypeStruct((2,), jnp.uint32)

    def stamped(x: Any) -> Any:
        return kernels.kernel_call(
            stamp, x, out=(x, clock), aliases={0: 0}, grid=1, block=32
        )

    def chain(x: Any, scalars: Any) -> Any:
        x, start = stamped(x)
        x = _chain(lambda x: call(x, scalars), count)(x)
        return (*stamped(x), start)

    runs = [
        compiled(lambda x: chain(x, list(range(SCALARS))), x),
        compiled(lambda x, *scalars: chain(x, scalars), x, *values),
    ]
    assert np.array_equal(runs[0]()[0], runs[1]()[0])
    found: list[list[int]] = [[], []]
    for n in range(5 if quick else 60):
        for run, times in zip(runs, found, strict=True):
            _, end, start = run()
            if n >= 3:
                times.append(_nanoseconds(start, end))
    static, traced = (statistics.median(times) / count / 1e3 for times in found)
    results.add("100 scalars / static", OURS, "time", static, "us")
    results.add("100 scalars / traced", OURS, "time", traced, "us")
    results.add("100 scalars / traced", OURS, "over static", traced - static, "us")


# ---- a graph -------------------------------------------------------------------------


def many_kernels() -> Graph:
    """The clock, 20 tiny kernels in a row, the clock."""
    builder = BlockBuilder("Twenty")
    stamp, step = (kernels.from_cuda(KERNELS, name) for name in ("stamp", "step"))
    first = builder.add_kernel(stamp, block=32, grid=1)
    builder.input("X", first.in_("x"), "float32[32]")
    builder.output("Start", first.out("clock"), "uint32[2]")
    before = first
    for _ in range(NODES):
        node = builder.add_kernel(step, block=32, grid=1)
        builder.connect(before.out("x"), node.in_("x"))
        before = node
    last = builder.add_kernel(stamp, block=32, grid=1)
    builder.connect(before.out("x"), last.in_("x"))
    builder.output("End", last.out("clock"), "uint32[2]")
    builder.output("Y", last.out("x"))
    return builder.commit()


def _nanoseconds(start: Any, end: Any) -> int:
    both = (np.asarray(x, np.uint64) for x in (start, end))
    a, b = (int(x[0]) + (int(x[1]) << 32) for x in both)
    return b - a


def _graph(results: Results, quick: bool) -> None:
    graph, x = many_kernels(), jnp.zeros(32)
    made = jax.jit(graph).lower(x).compile()
    captured = _by_cupy()
    ours: list[int] = []
    theirs: list[int] = []
    for n in range(10 if quick else 300):
        got = made(x)
        assert float(got["Y"][0]) == NODES
        if n >= 5:
            ours.append(_nanoseconds(got["Start"], got["End"]))
            theirs.append(captured())
    case = "20 kernels / first to last"
    results.add(case, OURS, "time", statistics.median(ours) / 1e3, "us")
    results.add(case, "cuda graph", "time", statistics.median(theirs) / 1e3, "us")


def _by_cupy() -> Callable[[], int]:
    """The same launches, captured by hand."""
    import cupy

    module = cupy.RawModule(code=KERNELS)
    stamp, step = module.get_function("stamp"), module.get_function("step")
    x = cupy.zeros(32, cupy.float32)
    start, end = cupy.zeros(2, cupy.uint32), cupy.zeros(2, cupy.uint32)
    stream = cupy.cuda.Stream(non_blocking=True)

    def launch() -> None:
        stamp((1,), (32,), (x, start))
        for _ in range(NODES):
            step((1,), (32,), (x,))
        stamp((1,), (32,), (x, end))

    with stream:
        launch()  # loads the code
        stream.synchronize()
        stream.begin_capture()
        launch()
        graph = stream.end_capture()

    def run() -> int:
        graph.launch(stream)
        stream.synchronize()
        return _nanoseconds(start.get(), end.get())

    return run


# ---- compilation ---------------------------------------------------------------------

ONCE = """
import time
from jax_kvblock import kernels
import cuda.bindings.nvrtc
source = open({path!r}).read()
start = time.perf_counter()
kernels.from_cuda(source, "empty", arch="80")
print(time.perf_counter() - start)
"""


def _nvrtc(results: Results, quick: bool) -> None:
    """Two processes and a folder of their own: what is on disk is all they share."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cu"
        path.write_text(KERNELS)
        here = str(Path(kernels.__file__).parents[2])
        paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"JAX_KVBLOCK_CACHE_DIR": folder, "PYTHONPATH": os.pathsep.join(paths)}
        program = ONCE.format(path=str(path))

        def once() -> float:
            done = subprocess.run(
                [sys.executable, "-P", "-c", program],
                env={**os.environ, **own},
                capture_output=True,
                text=True,
                check=True,
            )
            return float(done.stdout) * 1e3

        first = once()
        again = statistics.median(once() for _ in range(1 if quick else 5))
    results.add("nvrtc / compiled", OURS, "time", first, "ms")
    results.add("nvrtc / on disk", OURS, "time", again, "ms")


# ---- weights in 4 bits ---------------------------------------------------------------


def _w4a16(results: Results, quick: bool) -> None:
    path = common.ROOT / "examples" / "w4a16.py"
    w4a16 = common.load_module("kvblock_example_w4a16", path)
    k, n, count, rounds = (1024, 1024, 2, 2) if quick else (8192, 8192, 16, 20)
    keys = jax.random.split(jax.random.key(0), count)
    plain = [jax.random.normal(key, (k, n), jnp.bfloat16) / k**0.5 for key in keys]
    small = [w4a16.quantize(w) for w in plain]
    for m in (1, 4, 8, 16):
        x = jax.random.normal(jax.random.key(m), (m, k), jnp.bfloat16)
        runs = [
            compiled(
                lambda x, ws: w4a16.in_a_row(w4a16.product, x, ws, rounds), x, small
            ),
            compiled(lambda x, ws: w4a16.in_a_row(jnp.dot, x, ws, rounds), x, plain),
        ]
        case = f"{k}x{n} / {m} rows"
        for who, seconds in zip(
            (OURS, "xla, bfloat16"), seconds_of(runs, 3 if quick else 30), strict=True
        ):
            each = seconds / count / rounds
            results.add(case, who, "time", each * 1e6, "us")


if __name__ == "__main__":
    common.main("kernels", bench, __doc__)
