"""Lines: what copies strips of bytes, one list after the other.

On the CPU memcpy, on CUDA a stream of libkvblock's (`kvblock/copy_stream.h`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jax_kvblock import _native
from jax_kvblock.core.ffi import platform_of

# kvblock_strip of copy_stream.h.
FIELDS = ("to", "from", "bytes", "rows", "to_pitch", "from_pitch")
STRIP = np.dtype([(name, np.int64) for name in FIELDS])


def bytes_at(address: int, size: int) -> np.ndarray:
    """Memory of the host, uint8 `[size]`; whoever has it keeps what lies there."""
    memory = (ctypes.c_uint8 * size).from_address(address)
    return np.frombuffer(memory, np.uint8)


class CopyError(RuntimeError):
    """A copy between host and device failed; what it was to write is not there."""


class Copy:
    """A copy under way. It keeps what it reads and writes; dropped, it waits first."""

    def __init__(self, mark: Mark, kept: Any) -> None:
        self._mark: Mark | None = mark
        self._kept = kept
        self._error: CopyError | None = None
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether it has ended, right or wrong. Never waits."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits for it, or asks, too
        try:
            return self._mark is None or self._mark.done()
        finally:
            self._lock.release()

    def wait(self) -> None:
        """Waits until it has ended.

        Raises:
          CopyError: when it failed.
        """
        with self._lock:
            if self._mark is not None:
                mark, self._mark = self._mark, None
                try:
                    mark.wait()
                except CopyError as error:
                    self._error = error
                self._kept = None
        if self._error is not None:
            raise self._error

    def __del__(self) -> None:
        with contextlib.suppress(CopyError):
            self.wait()


class Mark(Protocol):
    """When a copy has ended."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """It is not asked again."""
        ...


class Line(Protocol):
    """What copies strips, one list after the other."""

    def start(self, strips: np.ndarray, kept: Any) -> Copy: ...


def line_for(device: jax.Device) -> Line:
    if platform_of(device) == "cuda":
        return CudaLine(library(), int(device.local_hardware_id))
    if platform_of(device) == "cpu":
        return CpuLine(library())
    raise CopyError(
        f"Copies: there is no way to copy beside XLA on {device.platform}; leave the "
        "tiers below the device out"
    )


class CpuLine:
    """memcpy in the thread that asks; it has ended when `start` returns."""

    def __init__(self, native: ctypes.CDLL) -> None:
        self._native = native

    def start(self, strips: np.ndarray, kept: Any) -> Copy:
        _check(self._native.kvblock_strips_copy_cpu(strips.ctypes.data, len(strips)))
        return Copy(_Ended(), kept)


class _Ended:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class CudaLine:
    """A CUDA stream."""

    def __init__(self, native: ctypes.CDLL, device: int) -> None:
        self._native = native
        stream = ctypes.c_void_p()
        _check(native.kvblock_copy_stream_open(device, ctypes.byref(stream)))
        self._stream = stream

    def start(self, strips: np.ndarray, kept: Any) -> Copy:
        mark = ctypes.c_void_p()
        start = self._native.kvblock_copy_stream_start
        where = (self._stream, strips.ctypes.data, len(strips))
        _check(start(*where, ctypes.byref(mark)))
        # A mark knows its line, so that the stream outlives the copy.
        return Copy(_CudaMark(self, mark), kept)

    def __del__(self) -> None:
        if hasattr(self, "_stream"):
            self._native.kvblock_copy_stream_close(self._stream)


class _CudaMark:
    def __init__(self, line: CudaLine, mark: ctypes.c_void_p) -> None:
        self._line, self._native, self._mark = line, line._native, mark

    def done(self) -> bool:
        done = ctypes.c_int()
        self._native.kvblock_copy_mark_done(self._mark, ctypes.byref(done))
        return bool(done.value)

    def wait(self) -> None:
        try:
            _check(self._native.kvblock_copy_mark_wait(self._mark))
        finally:
            self._native.kvblock_copy_mark_free(self._mark)


@functools.cache
def library() -> ctypes.CDLL:
    """libkvblock, which the package has beside it."""
    folder = Path(_native.__file__).parent / "lib"
    return typed(ctypes.CDLL(str(folder / "libkvblock.so")))


def typed(native: ctypes.CDLL) -> ctypes.CDLL:
    """Says what the functions of copy_stream.h take and return."""
    pointer, strips = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int64)
    for name, arguments in (
        ("strips_copy_cpu", strips),
        ("copy_stream_open", (ctypes.c_int, pointer)),
        ("copy_stream_close", (pointer,)),
        ("copy_stream_start", (pointer, *strips, pointer)),
        ("copy_mark_done", (pointer, pointer)),
        ("copy_mark_wait", (pointer,)),
        ("copy_mark_free", (pointer,)),
    ):
        function = getattr(native, f"kvblock_{name}")
        function.restype, function.argtypes = ctypes.c_char_p, arguments
    return native


def _check(error: bytes | None) -> None:
    if error is not None:
        raise CopyError(f"Copies: {error.decode()}")
