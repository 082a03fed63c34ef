"""Stores of parts of blocks for tests of connectors, and blocks of known contents."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_kvblock import BlockSpec
from jax_kvblock.cache import Namespace

HEADS = 4  # of the model


def namespace(heads: int = HEADS, model: str = "m") -> Namespace:
    """Of a process that has so many of the model's heads."""
    spec = BlockSpec(3, 2, 4, heads, 8, jnp.float32)
    return Namespace(model, spec, HEADS)


HEAD_BYTES = namespace(1).spec.block_bytes


def keys(count: int, first: int = 0) -> list[bytes]:
    return [bytes([1 + first + i]) * 32 for i in range(count)]


def block(key: bytes, heads: range = range(HEADS)) -> np.ndarray:
    """What some heads of the block of this key hold, uint8."""
    every = [
        np.random.default_rng([key[0], head]).integers(0, 256, HEAD_BYTES, np.uint8)
        for head in heads
    ]
    return np.concatenate(every)


def blocks(of: Sequence[bytes], heads: range = range(HEADS)) -> np.ndarray:
    return np.stack([block(key, heads) for key in of])


class MemoryPart:
    """Some heads of blocks, in a dict; `broken` is what reading raises."""

    def __init__(self, heads: range = range(HEADS), of: Sequence[bytes] = ()) -> None:
        self.heads = heads
        self.kept = {key: block(key, heads) for key in of}
        self.lies: set[bytes] = set()  # is there, and gone when it is read
        self.broken: Exception | None = None
        self.reads: list[tuple[int, int, int]] = []  # blocks, start, bytes
        self._thread = ThreadPoolExecutor(1)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.kept or key in self.lies for key in keys]

    def get(self, keys: Sequence[bytes], out: Any, *, start: int) -> Future[list[bool]]:
        return self._thread.submit(self._get, list(keys), list(out), start)

    def _get(self, keys: list[bytes], out: list[np.ndarray], start: int) -> list[bool]:
        if self.broken is not None:
            raise self.broken
        if keys:
            self.reads.append((len(keys), start, len(out[0])))
        for key, row in zip(keys, out, strict=True):
            if key in self.kept:
                row[:] = self.kept[key][start : start + len(row)]
        return [key in self.kept for key in keys]

    def put(self, keys: Sequence[bytes], rows: np.ndarray) -> Future[None]:
        kept = [row.copy() for row in rows]
        return self._thread.submit(self.kept.update, zip(list(keys), kept, strict=True))
