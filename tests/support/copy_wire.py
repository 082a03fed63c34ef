"""A wire within a process, and servers and connectors over it, for tests of peers."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from peer_process import SECRET
from tier_parts import HEAD_BYTES, HEADS, namespace

from jax_kvblock.cache.connector import ConnectorError
from jax_kvblock.cache.connectors import BlockServer, PeerConnector

STAGING = 3 * HEADS * HEAD_BYTES  # three blocks at a time


class CopySide:
    """A wire within a process: a description is an address in a table."""

    offers: dict[bytes, np.ndarray] = {}  # noqa: RUF012

    def __init__(self, broken: list[str]) -> None:
        self.hello, self._broken = os.urandom(8), broken

    def meet(self, hello: bytes) -> None:
        self.other = hello

    def offer(self, rows: np.ndarray) -> bytes:
        self.offers[self.hello] = rows
        return self.hello

    def taken(self) -> None:
        del self.offers[self.hello]

    def withdraw(self) -> None:
        self.offers.pop(self.hello, None)

    def fetch(self, what: bytes, rows: Sequence[np.ndarray], timeout: float) -> None:
        assert what == self.other
        if "fetch" in self._broken:
            raise ConnectorError("the cable is cut")
        for row, came in zip(
            rows, self.offers[what].reshape(-1, len(rows[0])), strict=True
        ):
            row[:] = ~came if "bits" in self._broken else came

    def close(self) -> None:
        pass


class CopyWire:
    """What is in `broken` goes wrong: fetch, bits."""

    name = "copy"

    def __init__(self) -> None:
        self.broken: list[str] = []

    def side(self, nbytes: int) -> CopySide:
        return CopySide(self.broken)


def served(store: Any, wire: Any, heads: range = range(HEADS), **options: Any) -> Any:
    options = {"staging_bytes": STAGING, "secret": SECRET, **options}
    space = namespace(len(heads))
    return BlockServer(store, namespace=space, heads=heads, wire=wire, **options)


def connected(
    addresses: list[str], wire: Any, heads: range = range(HEADS), **options: Any
) -> PeerConnector:
    given = {"min_bandwidth": 0, "probe_bytes": 1 << 16, "ask_seconds": 30.0}
    options = {**given, "secret": SECRET, **options}
    space = namespace(len(heads))
    return PeerConnector(addresses, namespace=space, heads=heads, wire=wire, **options)


def read(connector: PeerConnector, of: list[bytes]) -> tuple[list[bool], np.ndarray]:
    out = np.zeros((len(of), len(connector.heads) * HEAD_BYTES), np.uint8)
    return connector.get(of, out).result(30), out


def again(connector: PeerConnector, of: list[bytes]) -> list[bool]:
    """What is found in the end, of a server that may come back."""
    until = time.monotonic() + 30
    while not any(found := connector.has(of)) and time.monotonic() < until:
        time.sleep(0.01)
    return found
