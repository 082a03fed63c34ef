"""A stand-in for kvikio, as much of it as a disk tier calls, over host memory.

Where the room is a GPU's, what was read on the host is copied there.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_launches import connect, driver

from jax_kvblock.cache.disk.gds import DeviceReads


class Defaults:
    """Attributes: compat_mode: whether it has no GPUDirect storage."""

    compat_mode = False

    def is_compat_mode_preferred(self) -> bool:
        return self.compat_mode


class Driver:
    """Attributes: has_storage: whether there is a driver for it."""

    has_storage = True

    def get(self, name: str) -> bool:
        assert name == "is_gds_available"
        return self.has_storage


class Kvikio:
    """The module.

    Attributes:
      reads: the offset and the bytes of each read that was asked for.
      open_files: how many are open.
      gate: what is read waits for it.
      short: bytes that a read lacks.
      flips: whether the first byte of what is read is another one.
      any_file: whether files that go through the page cache will do, as where the
        filesystem of the tests has no O_DIRECT.
      broken: which offsets fail, at once, and with what.
    """

    def __init__(self) -> None:
        self.defaults, self.cufile_driver = Defaults(), Driver()
        self.flips, self.any_file = False, True
        self.reads: list[tuple[int, int]] = []
        self.open_files, self.num_opened = 0, 0
        self.gate = threading.Event()
        self.gate.set()
        self.short = 0
        self.broken: tuple[Callable[[int], bool], Exception] | None = None
        self.threads = ThreadPoolExecutor(2)

    def CuFile(self, path: Path, flags: str) -> CuFile:
        assert flags == "r"
        return CuFile(self, path)


class CuFile:
    def __init__(self, module: Kvikio, path: Path) -> None:
        self._module, self._file, self._lock = module, path.open("rb"), threading.Lock()
        module.open_files += 1
        module.num_opened += 1

    def pread(
        self, buffer: Any, *, size: int, file_offset: int, task_size: int
    ) -> Read:
        module = self._module
        assert task_size == size  # else it is split
        module.reads.append((file_offset, size))
        there = getattr(buffer, "__cuda_array_interface__", None)
        if there is None:
            memory = np.asarray(buffer)
        else:
            assert there["typestr"] == "|u1" and there["strides"] is None
            memory = np.zeros(there["shape"], np.uint8)
        assert memory.dtype == np.uint8 and memory.nbytes >= size
        address = there and there["data"][0]
        job = module.threads.submit(self._read, memory, size, file_offset, address)
        return Read(job)

    def _read(
        self, memory: np.ndarray, size: int, offset: int, address: int | None
    ) -> int:
        module = self._module
        if module.broken is not None and module.broken[0](offset):
            raise module.broken[1]
        assert module.gate.wait(30)
        with self._lock:
            self._file.seek(offset)
            data = self._file.read(size - module.short)
        memory[: len(data)] = np.frombuffer(data, np.uint8)
        memory[0] ^= module.flips
        if address is not None:
            _copy_to_gpu(address, memory[: len(data)])
        return len(data)

    def close(self) -> None:
        self._module.open_files -= 1
        self._file.close()


def _copy_to_gpu(address: int, memory: np.ndarray) -> None:
    connect()
    source = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes)
    driver("cuMemcpyHtoD_v2", ctypes.c_uint64(address), *source)
    driver("cuCtxSynchronize")  # it may return before the bytes are there


class Read:
    def __init__(self, future: Future[int]) -> None:
        self._future = future

    def get(self) -> int:
        return self._future.result()


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kvikio]:
    found = Kvikio()
    monkeypatch.setitem(sys.modules, "kvikio", found)  # type: ignore[misc]
    driver = found.cufile_driver
    monkeypatch.setitem(sys.modules, "kvikio.cufile_driver", driver)  # type: ignore[misc]
    init = DeviceReads.__init__

    def of_any_file(self: Any, path: Path, wanted: bool | None, direct: bool) -> None:
        init(self, path, wanted, direct or found.any_file)

    monkeypatch.setattr(DeviceReads, "__init__", of_any_file)
    yield found
    found.threads.shutdown()
    assert found.open_files == 0
