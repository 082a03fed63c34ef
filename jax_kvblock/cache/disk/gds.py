"""Blocks from disk straight into GPU memory, by kvikio: GPUDirect storage.

No machine with GPUDirect storage was at hand: tests have a stand-in for kvikio, over
host memory.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_kvblock.cache.disk.errors import needed


class DeviceReads:
    """Reads of one file into GPU memory, where kvikio can.

    wanted: None takes kvikio where it is installed and has GPUDirect storage, until a
        read fails; True demands it, also where it goes by host memory itself; False
        does without.
    direct: whether the file is read around the page cache, as GPUDirect has to.
    """

    def __init__(self, path: Path, wanted: bool | None, direct: bool) -> None:
        self._path, self._wanted, self._direct = path.resolve(), wanted, direct
        self._lock = threading.Lock()
        self._file: Any = None
        self._failure: str | None = None
        self._closed = False

    @staticmethod
    def check(wanted: bool | None) -> None:
        """Raises ImportError where kvikio is demanded and is not installed."""
        if wanted:
            needed("kvikio", "kvikio-cu13 (or -cu12), or leave gpudirect out")

    @property
    def work(self) -> bool:
        """Whether blocks may be read this way."""
        return self._failure is None and self._found[0] is not None

    @property
    def why(self) -> str:
        """Who reads, "kvikio"; or why nobody does."""
        return self._failure or self._found[1]

    @functools.cached_property
    def _found(self) -> tuple[Any, str]:
        """kvikio, which is loaded when it is asked for, or None; and why."""
        if self._wanted is False:
            return None, "gpudirect=False"
        if not self._wanted and not self._direct:
            return None, "the file goes through the page cache"
        try:
            kvikio = importlib.import_module("kvikio")
            can = self._wanted or _has_storage(kvikio)
        except ImportError:
            return None, "kvikio is not installed"
        except Exception as error:  # one that was built for another system
            return None, f"kvikio does not load: {error}"
        return (kvikio, "kvikio") if can else (None, "kvikio finds no GPUDirect here")

    def read(self, buffers: Sequence[Any], offsets: Sequence[int], size: int) -> None:
        """Reads so many bytes from each offset into a buffer, and waits for all.

        Raises OSError when fewer came, and what kvikio fails with; nothing is under way
        then. From then on it does not `work`, unless it is demanded.
        """
        try:
            self._read(buffers, offsets, size)
        except Exception as error:
            self.failed(error)
            raise

    def failed(self, error: Exception) -> None:
        """Blocks are read to the host from now on, unless kvikio is demanded."""
        if not self._wanted:
            self._failure = f"kvikio failed: {error}"

    def _read(self, buffers: Sequence[Any], offsets: Sequence[int], size: int) -> None:
        file, errors, begun = self._opened(), [], []
        try:
            for buffer, offset in zip(buffers, offsets, strict=True):
                # One task each: of several, an error of one might come before the end
                # of the others.
                how = {"size": size, "file_offset": offset, "task_size": size}
                begun.append(file.pread(buffer, **how))
        except Exception as error:
            errors.append(error)
        for read in begun:
            try:
                if (count := read.get()) != size:
                    raise OSError(f"{count} bytes of {size} came from {self._path}")
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _opened(self) -> Any:
        """The file, which kvikio registers with the driver once."""
        with self._lock:
            if self._closed:
                raise ValueError(f"{self._path} is closed")
            if self._file is None:
                self._file = self._found[0].CuFile(self._path, "r")
            return self._file

    def close(self) -> None:
        """Nothing is being read."""
        with self._lock:
            self._closed = True
            if self._file is not None:
                self._file.close()
            self._file = None


def _has_storage(kvikio: Any) -> bool:
    """Whether reads go past host memory; libcufile alone may do without the driver."""
    if kvikio.defaults.is_compat_mode_preferred():
        return False
    driver = importlib.import_module("kvikio.cufile_driver")
    return bool(driver.get("is_gds_available"))
