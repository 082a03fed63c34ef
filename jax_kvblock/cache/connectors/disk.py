"""`DiskConnector`: jobs that share a folder, each writing files of its own."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jax_kvblock.cache.connector import (
    Connector,
    ConnectorError,
    Part,
    SlowConnectorError,
    check_rate,
)
from jax_kvblock.cache.connectors.disk_probe import ReadingProbe
from jax_kvblock.cache.disk import DiskTier
from jax_kvblock.cache.disk.errors import DiskTierError
from jax_kvblock.cache.namespace import Namespace

_FOLDER = re.compile(r"(?P<job>[\w-]+)\.heads-(?P<first>\d+)-(?P<end>\d+)")
_PROBE, _PROBE_SECONDS = ".probe-", 3600  # no probe takes as long
_NO_BOUND = 1 << 62  # who only reads takes nothing


class DiskPart:
    """A `DiskTier` that holds some heads of each block.

    An index may be open once in a process. So connectors of one process share a tier:
    the last one that lets go of it closes it.

    Attributes:
      bytes_read: how much was asked for since it was opened.
    """

    _open: ClassVar[dict[Path, DiskPart]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: Path, heads: range, **options: Any) -> None:
        self._path, self.heads, self._users = path, heads, 1
        self.bytes_read = 0
        self._index = path / options["namespace"].hex() / "index.lmdb"
        found = _file_of(self._index)  # before it is opened
        self.tier = DiskTier(path, **options)
        self._file = found if options["read_only"] else _file_of(self._index)

    @property
    def replaced(self) -> bool:
        """Whether who writes it has made its files anew, or of another size."""
        return _file_of(self._index) != self._file

    @classmethod
    def opened(cls, path: Path, heads: range, **options: Any) -> DiskPart:
        """The part of a folder, to read what is there; or, first of all, to write."""
        with cls._lock:
            part = cls._open.get(path)
            if part is not None and options["read_only"] and not part.replaced:
                part._users += 1
                return part
            part = DiskPart(path, heads, **options)
            cls._open[path] = part
            return part

    def close(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if self._open.get(self._path) is self:
                del self._open[self._path]
            self.tier.close()

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return self.tier.has(keys)

    def keys(self) -> list[bytes]:
        return self.tier.keys()

    def get(
        self, keys: Sequence[bytes], rows: Sequence[np.ndarray], *, start: int
    ) -> Future[Any]:
        self.bytes_read += sum(map(len, rows))
        return self.tier.get(keys, rows, start=start)


def _file_of(path: Path) -> tuple[int, int, int] | None:
    """Which file it is, and how large; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size


class DiskConnector(Connector):
    """Blocks of jobs that share a folder.

    Each process writes a `DiskTier` of its own and reads those of all others, also
    while they write: `path/<job>.heads-<first>-<end>/`. Folders that come later are
    found when they come.

    Args:
      path: the folder that the jobs share.
      namespace: the `PrefixCache`'s.
      max_bytes: what this process may take of the disk; None where it only reads.
      heads: which of the model's heads it has; all of them when None.
      job: a name of letters, digits, `_` and `-`; no two processes of the same job have
        the same heads.
      min_bandwidth: bytes a second, of writing and of reading, as they are measured at
        the start with `probe_bytes`; 0 measures nothing. Who only reads measures each
        folder with what is there, once it is an eighth of that or more: at the start,
        or else after as much was read of it.
      options: further ones of `DiskTier`: `num_threads`, `direct`.

    Attributes:
      write_bandwidth, read_bandwidth: what was measured, in bytes a second; None where
        nothing was.
      unreadable: folders of others that cannot be read, and why: one that is just being
        made, for example, or was found too slow after the start.

    Raises:
      SlowConnectorError: when the disk is slower; what is found so after the start is
        left out instead.
      DiskTierError: when the process's own folder cannot be used.
      ValueError: for a bad name, or heads that do not fit the namespace.

    Example:
      >>> with DiskConnector("/shared", namespace=cache.namespace,
      ...                    max_bytes=64 << 30) as connector:
      ...     connector.put(keys, rows).result()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        namespace: Namespace,
        max_bytes: int | None,
        heads: range | None = None,
        job: str = "job",
        min_bandwidth: float = 100e6,
        probe_bytes: int = 32 << 20,
        **options: Any,
    ) -> None:
        super().__init__(namespace, heads)
        self._root, self._options = Path(path), options
        folder = f"{job}.heads-{self.heads.start}-{self.heads.stop}"
        if not _FOLDER.fullmatch(folder):
            raise ValueError(
                f"DiskConnector: job must be letters, digits, _ and -, got {job!r}"
            )
        self._folder = folder
        self.write_bandwidth: float | None = None
        self.read_bandwidth: float | None = None
        self._own: DiskPart | None = None
        self._others: dict[str, DiskPart] = {}
        self._probes: dict[str, ReadingProbe] = {}  # of those not measured yet
        self._slow: dict[str, DiskPart] = {}  # which are not read any more
        self._probe_bytes, self._least = probe_bytes, min_bandwidth
        self._looking = threading.Lock()  # threads look at the same time
        self.unreadable: dict[str, str] = {}
        if max_bytes is not None:
            self._root.mkdir(parents=True, exist_ok=True)
            if min_bandwidth > 0:
                self._probe(probe_bytes, max_bytes, min_bandwidth)
            self._own = self._open(folder, self.heads, max_bytes)
        elif min_bandwidth > 0:
            try:
                self._probe_reading()
            except BaseException:
                self.close()
                raise

    @property
    def takes(self) -> bool:
        return self._own is not None

    def parts(self) -> Sequence[Part]:
        with self._looking:
            self._look()
            own = [] if self._own is None else [self._own]
            return (*own, *self._others.values())

    def put(self, keys: Sequence[bytes], rows: np.ndarray) -> Future[Any]:
        shape = (len(keys), len(self.heads) * self.head_bytes)
        self._check_rows("put", "rows", rows, shape)
        if self._own is None:
            raise ConnectorError(
                "DiskConnector.put: it was opened to read; pass max_bytes"
            )
        return self._own.tier.put(keys, rows)

    def close(self) -> None:
        own, self._own = self._own, None
        others, self._others = self._others, {}
        slow, self._slow = self._slow, {}
        mine = [] if own is None else [own]
        for part in (*others.values(), *slow.values(), *mine):
            part.close()

    # ---- inside ----

    def _open(
        self, folder: str, heads: range, max_bytes: int, read_only: bool = False
    ) -> DiskPart:
        return DiskPart.opened(
            (self._root / folder).resolve(),
            heads,
            namespace=self.namespace.digest,
            block_bytes=len(heads) * self.head_bytes,
            max_bytes=max_bytes,
            read_only=read_only,
            **self._options,
        )

    def _look(self) -> None:
        """Opens what others have made since it looked before, once more or anew."""
        self._judge_probes()
        for parts in (self._others, self._slow):
            for name, part in list(parts.items()):
                if part.replaced:
                    del parts[name]
                    self._probes.pop(name, None)
                    part.close()
        if not self._root.exists():
            return
        own = None if self._own is None else self._folder
        for name in sorted(os.listdir(self._root)):
            found = _FOLDER.fullmatch(name)
            if found is None or name == own:
                continue
            if name in self._others or name in self._slow:
                continue
            heads = range(int(found["first"]), int(found["end"]))
            if not (self._root / name / self.namespace.digest.hex()).exists():
                continue  # of another model
            try:
                if not heads or heads.stop > self.num_heads:
                    raise DiskTierError(f"the model has {self.num_heads} heads")
                part = self._open(name, heads, _NO_BOUND, read_only=True)
            except DiskTierError as error:
                self.unreadable[name] = str(error)
                continue
            self.unreadable.pop(name, None)
            self._others[name] = part
            if own is None and self._least > 0:  # who writes has measured this disk
                size = len(heads) * self.head_bytes
                self._probes[name] = ReadingProbe(part, size, self._probe_bytes)

    def _remove_old_probes(self) -> None:
        """Folders of processes that were killed while they measured."""
        for folder in self._root.glob(f"{_PROBE}*"):
            with contextlib.suppress(OSError):  # another one removes it, too
                if time.time() - folder.stat().st_mtime > _PROBE_SECONDS:
                    shutil.rmtree(folder)

    def _probe_reading(self) -> None:
        """Reads what others have written, where that is enough to tell a rate."""
        self._look()
        for name, probe in list(self._probes.items()):
            if probe.begin():
                self._judge(name, probe)

    def _judge_probes(self) -> None:
        """Leaves out what turned out to be slow, without waiting for a disk."""
        for name, probe in list(self._probes.items()):
            if probe.due:
                probe.begin()
            if not probe.done:
                continue
            try:
                self._judge(name, probe)
            except SlowConnectorError as error:
                del self._probes[name]
                self.unreadable[name] = str(error)
                self._slow[name] = self._others.pop(name)
            except OSError:  # as those who asked for its blocks were told
                continue

    def _judge(self, name: str, probe: ReadingProbe) -> None:
        where = f"DiskConnector: {self._root / name}, reading"
        rate = probe.rate(where, self._least)
        if rate is not None:
            self.read_bandwidth = min(rate, self.read_bandwidth or rate)
            del self._probes[name]

    def _probe(self, nbytes: int, max_bytes: int, least: float) -> None:
        """Writes and reads blocks in a folder of its own, which goes again."""
        self._remove_old_probes()
        size = len(self.heads) * self.head_bytes
        # Beside the rows: what slots are rounded up to, and the index.
        most = (max_bytes - (1 << 20)) // (2 * size + (64 << 10)) - 1
        count = max(1, min(nbytes // size, most))
        keys = [secrets.token_bytes(32) for _ in range(count)]
        rows = np.random.default_rng(0).integers(0, 256, (count, size), np.uint8)
        out = np.empty_like(rows)
        with tempfile.TemporaryDirectory(dir=self._root, prefix=_PROBE) as folder:
            bound = min(
                2 * rows.nbytes + (count + 1) * (64 << 10) + (1 << 20), max_bytes
            )
            part = self._open(Path(folder).name, self.heads, bound)
            with contextlib.closing(part):
                began = time.perf_counter()
                part.tier.put(keys, rows).result()
                written = time.perf_counter()
                found = part.tier.get(keys, out).result()
                read = time.perf_counter()
        if not all(found) or not np.array_equal(out, rows):
            raise ConnectorError(
                f"DiskConnector: {self._root} did not give back what was written there"
            )
        where = f"DiskConnector: {self._root}"
        self.write_bandwidth = check_rate(
            f"{where}, writing", rows.nbytes, written - began, least
        )
        self.read_bandwidth = check_rate(
            f"{where}, reading", rows.nbytes, read - written, least
        )
