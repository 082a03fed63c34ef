"""`Connector`: blocks by key that other jobs have written, whatever their shards are.

A job of tensor-parallel size n has in each of its processes the blocks of some heads.
What it writes is a part; who reads puts together what it needs of the parts that are
there. Below the device blocks lie in universal order, so that heads which follow one
another are one run of bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from jax_kvblock.cache.namespace import Namespace
from jax_kvblock.core import checks


class ConnectorError(RuntimeError):
    """Another job's blocks cannot be had: it is gone, or of another kind."""


class SlowConnectorError(ConnectorError):
    """What was measured at the start is below `min_bandwidth`."""


class Part(Protocol):
    """Blocks of some of the model's heads.

    Attributes:
      heads: which ones.
    """

    heads: range

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Of each key, whether its block is there with all of these heads."""
        ...

    def get(
        self, keys: Sequence[bytes], rows: Sequence[np.ndarray], *, start: int
    ) -> Future[Any]:
        """Reads bytes of blocks, from `start` on, as many as a row has.

        Returns:
          A future of bools: of each block, whether it was there and is right.
        """
        ...


class Connector:
    """Blocks by key, for the heads of one process; a store of `TieredCache`.

    Args:
      namespace: the `PrefixCache`'s; its `num_kv_heads` are the model's.
      heads: which of these the process has; all of them when None.
      parts: where blocks are read, the nearest first.

    Attributes:
      heads: as above.
      head_bytes: of a block, for one head.

    Raises:
      ValueError: for heads that are not as many as a block of the process has, or that
        the model does not have.

    Example:
      >>> cache = PrefixCache(manager, model="m", num_kv_heads=8)  # a shard has 4
      >>> connector = DiskConnector("/shared", namespace=cache.namespace,
      ...                           heads=range(4, 8), max_bytes=64 << 30)
      >>> tiers = TieredCache(cache, host_bytes=8 << 30, store=connector)
    """

    def __init__(
        self,
        namespace: Namespace,
        heads: range | None = None,
        parts: Sequence[Part] = (),
    ) -> None:
        spec = namespace.spec
        self.namespace = namespace
        self.num_heads = namespace.num_kv_heads or spec.num_kv_heads
        self.head_bytes = spec.block_bytes // spec.num_kv_heads
        self.heads = self._checked(range(self.num_heads) if heads is None else heads)
        if len(self.heads) != spec.num_kv_heads:
            raise ValueError(
                f"{self._name}: heads must be the {spec.num_kv_heads} of this process, "
                f"got {_words(self.heads)}; pass heads=range(first, end), and to "
                "PrefixCache num_kv_heads=, the model's"
            )
        self.__parts = list(parts)

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def takes(self) -> bool:
        """Whether blocks may be put here, or are only read."""
        return False

    def parts(self) -> Sequence[Part]:
        """Where blocks are read now, the nearest first."""
        return tuple(self.__parts)

    # ---- what a store does ----

    def has(self, keys: Sequence[bytes], *, heads: range | None = None) -> list[bool]:
        """Of each key, whether all heads of its block are there.

        Args:
          keys: 32 bytes each.
          heads: which of the model's; the process's own when None.
        """
        return self._has(keys, heads, _ask)

    def get(
        self, keys: Sequence[bytes], out: np.ndarray, *, heads: range | None = None
    ) -> Future[list[bool]]:
        """Reads blocks into rows.

        Args:
          keys: 32 bytes each.
          out: uint8 `[n, head_bytes · number of heads]`. The rows of blocks that are
            not there may have been overwritten.
          heads: which of the model's; the process's own when None.

        Returns:
          A future of n bools: of each block, whether all of it was there and is right.
          Its exception is a part's that failed.
        """
        wanted = self.heads if heads is None else self._checked(heads)
        shape = (len(keys), len(wanted) * self.head_bytes)
        self._check_rows("get", "out", out, shape)
        left, reads = self._plan(keys, wanted, _ask)
        found = [not heads for heads in left]
        gathered = _Gathered(found, len(reads))
        for (part, first, end), places in reads.items():
            places = [i for i in places if found[i]]
            to = slice(
                (first - wanted.start) * self.head_bytes,
                (end - wanted.start) * self.head_bytes,
            )
            start = (first - part.heads.start) * self.head_bytes
            rows = [out[i, to] for i in places]
            gathered.take(part, [keys[i] for i in places], rows, start, places)
        return gathered.future

    def put(self, keys: Sequence[bytes], rows: np.ndarray) -> Future[Any]:
        """Keeps blocks of the process's own heads for others.

        Args:
          keys: 32 bytes each.
          rows: uint8 `[n, head_bytes · number of heads]`, which stay as they are until
            the future is done.

        Raises:
          ConnectorError: where blocks are only read.
        """
        raise ConnectorError(f"{self._name}.put: blocks are only read here")

    def close(self) -> None:
        """Waits for what is under way, and lets go of everything."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- inside ----

    def _has(
        self,
        keys: Sequence[bytes],
        heads: range | None,
        ask: Callable[[Part, Sequence[bytes]], list[bool]],
    ) -> list[bool]:
        wanted = self.heads if heads is None else self._checked(heads)
        left, _ = self._plan(keys, wanted, ask)
        return [not heads for heads in left]

    def _plan(
        self,
        keys: Sequence[bytes],
        wanted: range,
        ask: Callable[[Part, Sequence[bytes]], list[bool]],
    ) -> tuple[list[set[int]], dict[tuple[Part, int, int], list[int]]]:
        """What no part has, of each key; and who reads which heads of which keys."""
        left = [set(wanted) for _ in keys]
        reads: dict[tuple[Part, int, int], list[int]] = {}
        for part in self.parts():
            shared = range(
                max(part.heads.start, wanted.start), min(part.heads.stop, wanted.stop)
            )
            asked = [i for i, heads in enumerate(left) if not heads.isdisjoint(shared)]
            here = ask(part, [keys[i] for i in asked]) if asked else []
            for i, there in zip(asked, here, strict=True):
                if not there:
                    continue
                for first, end in _runs(left[i], shared):
                    reads.setdefault((part, first, end), []).append(i)
                left[i] -= set(shared)
        return left, reads

    def _checked(self, heads: range) -> range:
        right = isinstance(heads, range) and heads.step == 1 and len(heads) > 0
        if not right or heads.start < 0 or heads.stop > self.num_heads:
            raise ValueError(
                f"{self._name}: heads must be a range of the model's {self.num_heads}, "
                f"got {heads!r}"
            )
        return heads

    def _check_rows(
        self, method: str, name: str, rows: np.ndarray, shape: tuple[int, int]
    ) -> None:
        fits = isinstance(rows, np.ndarray) and rows.dtype == np.uint8
        if not fits or rows.shape != shape or (rows.size and rows.strides[1] != 1):
            raise ValueError(
                f"{self._name}.{method}: {name} must be uint8{list(shape)}, a row a "
                f"block, got {checks.show(rows)}"
            )


class _Gathered:
    """One future for what several parts read."""

    def __init__(self, found: list[bool], count: int) -> None:
        self.future: Future[list[bool]] = Future()
        self._found, self._left = found, count
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        if not count:
            self.future.set_result(found)

    def take(
        self,
        part: Part,
        keys: list[bytes],
        rows: list[np.ndarray],
        start: int,
        places: list[int],
    ) -> None:
        def ended(future: Future[Any]) -> None:
            with self._lock:
                try:
                    for i, there in zip(places, future.result(), strict=True):
                        self._found[i] &= bool(there)
                except BaseException as error:
                    self._error = self._error or error
                self._left -= 1
                last = not self._left
            if last and self._error is not None:
                self.future.set_exception(self._error)
            elif last:
                self.future.set_result(self._found)

        try:
            reading = part.get(keys, rows, start=start)
        except Exception as error:
            reading = Future()
            reading.set_exception(error)
        reading.add_done_callback(ended)


def all_of(futures: Sequence[Future[None]]) -> Future[None]:
    """Done when all are; fails as the first of them."""
    together: Future[None] = Future()
    left, lock = [len(futures)], threading.Lock()

    def ended(_: Future[None]) -> None:
        with lock:
            left[0] -= 1
            last = not left[0]
        if last:
            errors = [future.exception() for future in futures]
            error = next((e for e in errors if e is not None), None)
            if error is None:
                together.set_result(None)
            else:
                together.set_exception(error)

    for future in futures:
        future.add_done_callback(ended)
    return together


def _ask(part: Part, keys: Sequence[bytes]) -> list[bool]:
    return part.has(keys)


def _runs(left: set[int], shared: range) -> list[tuple[int, int]]:
    """Heads of `shared` that are left, as runs (first, end)."""
    runs: list[tuple[int, int]] = []
    for head in shared:
        if head not in left:
            continue
        if runs and runs[-1][1] == head:
            runs[-1] = (runs[-1][0], head + 1)
        else:
            runs.append((head, head + 1))
    return runs


def _words(heads: range) -> str:
    return f"{len(heads)} ({heads.start} to {heads.stop - 1})"


def check_rate(where: str, nbytes: int, seconds: float, least: float) -> float:
    """Bytes a second that were measured.

    Raises:
      SlowConnectorError: when these are fewer than `least`.
    """
    rate = nbytes / max(seconds, 1e-9)
    if rate < least:
        raise SlowConnectorError(
            f"{where}: {rate / 1e9:.3g} GB/s with {nbytes / 2**20:.3g} MiB, less than "
            f"min_bandwidth, {least / 1e9:.3g} GB/s; use a faster way, or pass "
            "min_bandwidth=0 to accept any"
        )
    return rate
