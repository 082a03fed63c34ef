"""The ceilings of the machine: how fast plain copies of large buffers are.

GPU: `cudaMemcpyAsync` from device to device (read + write counted, as everywhere), and
to and from pinned host memory (one way counted). CPU: `np.copyto` on 1 and 2 threads.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from support import common, cuda_runtime
from support.common import GIB, MIB, Results

DEVICE_COPY = "ceiling / device copy"
TO_HOST = "ceiling / device to pinned host"
TO_DEVICE = "ceiling / pinned host to device"


def device_unit() -> str:
    """Unit of every rate in device memory."""
    return "TB/s" if common.on_gpu() else "GB/s"


def in_unit(bytes_per_second: float, unit: str) -> float:
    return bytes_per_second / {"TB/s": 1e12, "GB/s": 1e9}[unit]


def add_device_copy(results: Results, quick: bool, when: str = "") -> None:
    """The copy rate of device memory; `when` tells repeated measurements apart.

    A card slows down while it warms up, so a benchmark measures this before and after
    itself, and is judged by the faster of the two.
    """
    suffix = f", {when}" if when else ""
    if common.on_gpu():
        # The best of three sizes is the ceiling: a peer gets no lucky size for itself.
        sizes = (16 * MIB,) if quick else (GIB, 2 * GIB, 4 * GIB)
        for size in sizes:
            name, seconds = _gpu_copy(size)
            label = f"{name}, {size / GIB:g} GiB{suffix}"
            rate = in_unit(2 * size / seconds, "TB/s")
            results.add(DEVICE_COPY, label, "bandwidth", rate, "TB/s")
        return
    size = (8 if quick else 256) * MIB
    for threads in (1, 2):
        rate = in_unit(2 * size / _cpu_copy(size, threads), "GB/s")
        label = f"np.copyto, threads: {threads}{suffix}"
        results.add(DEVICE_COPY, label, "bandwidth", rate, "GB/s")


def add_host_link(results: Results, quick: bool) -> None:
    """The rate between device memory and pinned host memory, each way."""
    size = (16 * MIB) if quick else GIB
    if not common.on_gpu():
        # Host and "device" are the same memory here: one way of a copy bounds both.
        seconds = min(_cpu_copy(min(size, 128 * MIB), n) for n in (1, 2))
        rate = in_unit(min(size, 128 * MIB) / seconds, "GB/s")
        for case in (TO_HOST, TO_DEVICE):
            results.add(case, "np.copyto", "bandwidth", rate, "GB/s")
        return
    cuda = cuda_runtime.runtime()
    for case, kind in (
        (TO_HOST, cuda_runtime.DEVICE_TO_HOST),
        (TO_DEVICE, cuda_runtime.HOST_TO_DEVICE),
    ):
        if cuda is None:
            name, seconds = "torch copy_", _torch_seconds(size, kind)
        else:
            name, seconds = "cudaMemcpyAsync", _memcpy_seconds(cuda, size, kind, 3)
        rate = in_unit(size / seconds, "GB/s")
        results.add(case, name, "bandwidth", rate, "GB/s")


# ---- one copy ------------------------------------------------------------------------


def _gpu_copy(size: int) -> tuple[str, float]:
    cuda = cuda_runtime.runtime()
    kind = cuda_runtime.DEVICE_TO_DEVICE
    if cuda is None:
        return "torch copy_", _torch_seconds(size, kind)
    return "cudaMemcpyAsync", _memcpy_seconds(cuda, size, kind, 10)


def _memcpy_seconds(cuda: Any, size: int, kind: int, calls: int) -> float:
    """Seconds of one cudaMemcpyAsync, by events around `calls` of them."""
    to_host = kind == cuda_runtime.DEVICE_TO_HOST
    from_host = kind == cuda_runtime.HOST_TO_DEVICE
    jax.block_until_ready(jax.numpy.zeros(()))  # jax's context is the one we share
    stream = cuda.streamCreate()
    events = [cuda.eventCreate(), cuda.eventCreate()]
    src = cuda.hostAlloc(size, 0) if from_host else cuda.malloc(size)
    dst = cuda.hostAlloc(size, 0) if to_host else cuda.malloc(size)
    try:
        if from_host:
            noise = _noise(size)
            ctypes.memmove(src, noise.ctypes.data, size)
        else:
            _fill(cuda, src, size, stream)
        times = []
        for _ in range(8):  # the first one also warms up and is dropped
            cuda.eventRecord(events[0], stream)
            for _ in range(calls):
                cuda.memcpyAsync(dst, src, size, kind, stream)
            cuda.eventRecord(events[1], stream)
            cuda.eventSynchronize(events[1])
            times.append(cuda.eventElapsedTime(*events) / 1e3 / calls)
        return statistics.median(times[1:])
    finally:
        (cuda.freeHost if from_host else cuda.free)(src)
        (cuda.freeHost if to_host else cuda.free)(dst)
        for event in events:
            cuda.eventDestroy(event)
        cuda.streamDestroy(stream)


def _noise(size: int) -> np.ndarray:
    """Random bytes; memory can be faster on zeros."""
    tile = np.random.default_rng(0).integers(0, 256, min(size, 64 * MIB), np.uint8)
    return np.resize(tile, size)


def _fill(cuda: Any, pointer: int, size: int, stream: int) -> None:
    step = min(size, 64 * MIB)
    noise = _noise(step)
    end = cuda.eventCreate()
    for offset in range(0, size, step):
        part, kind = min(step, size - offset), cuda_runtime.HOST_TO_DEVICE
        cuda.memcpyAsync(pointer + offset, noise.ctypes.data, part, kind, stream)
    cuda.eventRecord(end, stream)
    cuda.eventSynchronize(end)
    cuda.eventDestroy(end)


def _torch_seconds(size: int, kind: int) -> float:
    """The same by torch, which calls cudaMemcpyAsync too."""
    import torch

    def tensor(host: bool) -> Any:
        if host:
            made = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        else:
            made = torch.empty(size, dtype=torch.uint8, device="cuda")
        return made.random_(0, 256)

    src = tensor(kind == cuda_runtime.HOST_TO_DEVICE)
    dst = tensor(kind == cuda_runtime.DEVICE_TO_HOST)
    times = []
    for _ in range(8):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(3):
            dst.copy_(src, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 3e3)
    return statistics.median(times[1:])


def _cpu_copy(size: int, threads: int) -> float:
    src = _noise(size)
    dst = np.zeros_like(src)  # touched, so that no page fault is timed
    parts = list(
        zip(np.array_split(src, threads), np.array_split(dst, threads), strict=True)
    )
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(9):
            start = time.perf_counter()
            list(pool.map(lambda part: np.copyto(part[1], part[0]), parts))
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def bench(options: argparse.Namespace, results: Results) -> None:
    add_device_copy(results, options.quick)
    add_host_link(results, options.quick)


if __name__ == "__main__":
    common.main("ceilings", bench, __doc__)
