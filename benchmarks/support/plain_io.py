"""What a disk gives without a tier: threads that read and write one preallocated file.

As fio does with its psync engine: whole blocks, each thread the next one, in the
file's order. Writes end when they are on the device.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np


class PlainFile:
    """A file of as many blocks as `rows` has, written from them and read into them."""

    def __init__(
        self, path: Path, rows: np.ndarray, threads: int, direct: bool
    ) -> None:
        self.path, self._rows, self._threads = path, rows, threads
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        self._fd = os.open(path, flags, 0o600)
        os.posix_fallocate(self._fd, 0, rows.nbytes)
        self._pool = ThreadPoolExecutor(threads)

    def write(self) -> None:
        size = self._rows.shape[1]
        self._all(lambda i: os.pwritev(self._fd, [self._rows[i]], i * size))
        os.fdatasync(self._fd)

    def read(self, into: np.ndarray) -> None:
        size = into.shape[1]
        self._all(lambda i: os.preadv(self._fd, [into[i]], i * size))

    def _all(self, call: Callable[[int], int]) -> None:
        numbers, size = iter(range(len(self._rows))), self._rows.shape[1]

        def run() -> None:
            for i in numbers:
                if call(i) != size:
                    raise OSError("a block was not read or written whole")

        for done in [self._pool.submit(run) for _ in range(self._threads)]:
            done.result()

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)


def drop_cache(path: Path) -> None:
    """The file's pages leave memory, so that reads come from the device."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def fio(
    path: Path, work: str, block: int, threads: int, size: int, direct: bool
) -> float:
    """Bytes a second by fio, of the same pattern in a file that is there.

    Each of its jobs has a run of the file of its own.
    """
    command = [
        *("fio", "--name=plain", f"--filename={path}", f"--rw={work}"),
        *(f"--bs={block}", f"--numjobs={threads}", f"--direct={int(direct)}"),
        *("--ioengine=psync", "--group_reporting", "--output-format=json"),
        *(f"--size={size // threads}", f"--offset_increment={size // threads}"),
        *("--overwrite=1", "--end_fsync=1", "--invalidate=1", "--thread"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (job,) = json.loads(done.stdout)["jobs"]
    rate: float = job[work]["bw_bytes"]
    return rate
