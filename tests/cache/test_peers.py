"""Blocks from one job to another, by the wires that are installed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peer_process import SECRET
from tier_parts import HEAD_BYTES, HEADS, MemoryPart, block, blocks, keys, namespace

import jax_kvblock
import jax_kvblock as kv
from jax_kvblock.cache.connector import ConnectorError, SlowConnectorError
from jax_kvblock.cache.connectors import (
    BlockServer,
    JaxWire,
    NixlWire,
    PeerConnector,
    nixl_wire,
)

SUPPORT = Path(__file__).parents[1] / "support"
# NIXL 1.5.1 ended processes by a segmentation fault at their exit where it was tried;
# `test_nixl_wire.py` has a stand-in for it.
NIXL = pytest.param(
    "nixl",
    marks=pytest.mark.skipif(
        not os.environ.get("KVBLOCK_TEST_NIXL"),
        reason="set KVBLOCK_TEST_NIXL=1 where NIXL is installed",
    ),
)
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


@pytest.fixture
def wire() -> Iterator[CopyWire]:
    CopySide.offers.clear()
    yield CopyWire()
    assert not CopySide.offers  # nothing that was offered stays


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


# ---- two processes -------------------------------------------------------------------


def address_of(process: subprocess.Popen[str]) -> str:
    """What it says when it serves; NIXL says things, too."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("serves at"):
            return line.split()[-1]
    raise AssertionError("it does not serve")


@pytest.mark.parametrize("kind", ["jax", NIXL])
def test_blocks_of_two_shards_from_two_processes(kind: str) -> None:
    """Two processes, each with half of the heads; this one has all, then a quarter."""
    paths = [str(Path(jax_kvblock.__file__).parents[1]), str(SUPPORT)]
    paths += os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-P", str(SUPPORT / "peer_process.py"), kind]
    started = [
        subprocess.Popen(
            [*command, *map(str, (*heads, STAGING))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **own},
            text=True,
        )
        for heads in ((0, 2), (2, 4))
    ]
    try:
        addresses = [address_of(process) for process in started]
        here = JaxWire() if kind == "jax" else NixlWire()
        of = keys(10)
        for heads in (range(HEADS), range(2, 3)):
            with connected(addresses, here, heads) as connector:
                assert connector.has(of) == [True] * 8 + [False] * 2
                found, out = read(connector, of)
                assert found == [True] * 8 + [False] * 2
                np.testing.assert_array_equal(out[:8], blocks(of[:8], heads))
                if len(heads) == HEADS:
                    connector.put(of[8:], blocks(of[8:])).result(30)
                    found, out = read(connector, of[8:])
                    assert found == [True] * 2
                    np.testing.assert_array_equal(out, blocks(of[8:]))
                    connector._peers[0].get([of[8]], [out[0, :HEAD_BYTES]], start=0)
                    of = of[:8] + keys(2, 20)
        with connected(addresses, here, ask_seconds=0.2) as connector:
            started[1].send_signal(signal.SIGSTOP)  # frozen, and its port still open
            began = time.monotonic()
            assert connector.has(keys(2)) == [False] * 2
            assert time.monotonic() - began < 10 and connector.unanswered == 2
            started[1].send_signal(signal.SIGCONT)
            assert again(connector, keys(2)) == [True] * 2 and not connector.errors
        with pytest.raises(
            SlowConnectorError, match=r"by .*: [\d.]+ GB/s with .* less"
        ):
            connected(addresses, here, min_bandwidth=1e15)
    finally:
        for process in started:
            process.send_signal(signal.SIGCONT)
            process.communicate("\n", timeout=30)
    if kind == "jax":
        assert [process.returncode for process in started] == [0, 0]


# ---- what is asked and answered ------------------------------------------------------


def test_as_many_blocks_at_a_time_as_fit(wire: CopyWire) -> None:
    of, store = keys(8), MemoryPart(of=keys(8))
    del store.kept[of[4]]
    with served(store, wire) as server, connected([server.address], wire) as connector:
        found, out = read(connector, of)
        assert found == [True] * 4 + [False] + [True] * 3
        # What was not there is not asked for: 7 blocks, 3 at a time.
        assert [count for count, *_ in store.reads] == [3, 3, 1]
        rest = [i for i in range(8) if i != 4]
        np.testing.assert_array_equal(out[rest], blocks([of[i] for i in rest]))
        assert list(connector.bandwidths) == [server.address]
        assert connector.errors == {}


def test_some_that_went_away_meanwhile(wire: CopyWire) -> None:
    one, two, three = keys(3)
    store = MemoryPart(of=[one, three])
    store.lies = {two}
    with served(store, wire) as server, connected([server.address], wire) as connector:
        found, out = read(connector, [one, two, three])
        assert found == [True, False, True]
        np.testing.assert_array_equal(out[[0, 2]], blocks([one, three]))
        store.kept.clear()
        store.lies = {one}
        assert read(connector, [one])[0] == [False]


def test_blocks_that_are_put(wire: CopyWire) -> None:
    of = keys(7)
    left, right = MemoryPart(range(0, 2)), MemoryPart(range(2, 4))
    with (
        served(left, wire, range(0, 2), takes=True) as a,
        served(right, wire, range(2, 4), takes=True) as b,
        connected([a.address, b.address], wire) as connector,
    ):
        connector.put(of, blocks(of)).result(10)
        for part in (left, right):
            for key in of:
                np.testing.assert_array_equal(part.kept[key], block(key, part.heads))
        found, out = read(connector, of)
        assert all(found) and (out == blocks(of)).all()


def test_who_takes_no_blocks(wire: CopyWire) -> None:
    of, rows = keys(1), blocks(keys(1))
    with served(MemoryPart(), wire) as server:
        with connected([server.address], wire) as connector:
            assert not connector.takes
            with pytest.raises(
                ConnectorError, match=r"no server takes heads \[0, 1, 2"
            ):
                connector.put(of, rows)
            # One that asks all the same is told so, and goes on.
            with pytest.raises(ConnectorError, match=r"says: .*: blocks are only read"):
                connector._peers[0].put(of, rows).result(10)
        with connected([server.address], wire, range(0, 2)) as connector:
            with pytest.raises(ConnectorError, match=r"no server takes heads \[0, 1\]"):
                connector.put(of, blocks(of, range(0, 2)))
            with pytest.raises(ValueError, match=r"put: rows must be uint8\[1, 1536\]"):
                connector.put(of, rows)


# ---- what does not fit ---------------------------------------------------------------


def test_jobs_that_do_not_fit(wire: CopyWire, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(MemoryPart(), wire) as server:
        address = [server.address]
        with pytest.raises(ConnectorError, match=r"has another secret|is gone"):
            connected(address, wire, secret=b"something else of us")
        space = namespace(model="another")
        options = {"wire": wire, "secret": SECRET, "min_bandwidth": 0}
        with pytest.raises(
            ConnectorError, match=r"says: .* namespace is \w+ here, not"
        ):
            PeerConnector(address, namespace=space, **options)
        other = CopyWire()
        other.name = "cups and a string"
        with pytest.raises(ConnectorError, match="wire is copy here, not cups and a s"):
            connected(address, other)
        with connected(address, wire):  # and the server goes on
            pass


def test_wrong_arguments_of_peers(wire: CopyWire) -> None:
    with pytest.raises(ValueError, match="secret must be at least 16 bytes"):
        connected(["localhost:1"], wire, secret=b"short")
    with pytest.raises(ValueError, match="secret must be at least 16 bytes"):
        served(MemoryPart(), wire, secret=b"short")
    with pytest.raises(ValueError, match="addresses must be several like 'host:port'"):
        connected("localhost:1", wire)  # type: ignore[arg-type]
    with pytest.raises(ConnectorError, match="nobody serves at localhost:1 "):
        connected(["localhost:1"], wire)
    for seconds in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="ask_seconds must be above 0, got"):
            connected(["localhost:1"], wire, ask_seconds=seconds)
        with pytest.raises(ValueError, match="retry_seconds must be above 0, or None"):
            connected(["localhost:1"], wire, retry_seconds=seconds)
    with pytest.raises(ConnectorError, match="nobody serves at nowhere "):
        connected(["nowhere"], wire)
    with pytest.raises(
        ValueError, match=r"staging_bytes must hold a block of 3072 byt"
    ):
        served(MemoryPart(), wire, staging_bytes=3071)


def test_one_who_asks_for_too_much_is_told_so(wire: CopyWire) -> None:
    with served(MemoryPart(of=keys(5)), wire) as server:
        for kind, fields, said in (
            (
                "get",
                {"start": 0, "count": HEADS * HEAD_BYTES},
                "5 blocks of .* are more",
            ),
            (
                "get",
                {"start": 1, "count": HEADS * HEAD_BYTES},
                "bytes 1 to 3073 are not",
            ),
            ("get", {"start": 0, "count": 0}, "bytes 0 to 0 are not in a block"),
            ("dance", {}, "'dance' is not known here"),
        ):
            with connected([server.address], wire) as connector:
                channel = connector._peers[0]._moves
                with pytest.raises(ConnectorError, match=said):
                    channel.ask(kind, b"".join(keys(5)), **fields)
                assert channel.ask("has", b"".join(keys(6))).payload == bytes(
                    [1] * 5 + [0]
                )
                with pytest.raises(ConnectorError, match="keys must be of 32 bytes"):
                    channel.ask("has", b"abc")


# ---- what goes wrong -----------------------------------------------------------------


def test_a_server_that_ends(wire: CopyWire) -> None:
    of = keys(2)
    server = served(MemoryPart(of=of), wire)
    with connected([server.address], wire) as connector:
        assert read(connector, of)[0] == [True, True]
        server.close()
        assert connector.has(of) == [False, False]
        assert connector.parts() == ()
        assert "is gone" in str(connector.errors[server.address])
        assert read(connector, of)[0] == [False, False]


def again(connector: PeerConnector, of: list[bytes]) -> list[bool]:
    """What is found in the end, of a server that may come back."""
    until = time.monotonic() + 30
    while not any(found := connector.has(of)) and time.monotonic() < until:
        time.sleep(0.01)
    return found


def test_a_server_that_comes_back(wire: CopyWire) -> None:
    """It is another job's, with other blocks, and is measured again."""
    of = keys(3)
    server = served(MemoryPart(of=of[:2]), wire)
    port = int(server.address.rpartition(":")[2])
    with connected([server.address], wire, retry_seconds=0.05) as connector:
        lost = connector._peers[0]
        connector.bandwidths.clear()
        server.close()
        assert connector.has(of) == [False] * 3
        time.sleep(0.1)
        connector.has(of)  # tries, and nobody is there
        until = time.monotonic() + 30
        while "nobody serves" not in str(connector.errors) and time.monotonic() < until:
            time.sleep(0.01)
        assert "nobody serves" in str(connector.errors)
        with served(MemoryPart(of=of[1:]), wire, port=port, takes=True) as server:
            assert again(connector, of) == [False, True, True]
            assert connector.errors == {} and connector.takes
            assert list(connector.bandwidths) == [server.address]
            found, out = read(connector, of[1:])
            assert found == [True, True]
            np.testing.assert_array_equal(out, blocks(of[1:]))
            assert all(channel.closed for channel in lost._channels)
            # Its own connections, and none of those that were lost.
            assert server.num_connections == 2


@pytest.mark.parametrize("wrong", ["heads", "bits", "never"])
def test_a_server_that_does_not_come_back(wire: CopyWire, wrong: str) -> None:
    of = keys(1)
    server = served(MemoryPart(of=of), wire)
    port = int(server.address.rpartition(":")[2])
    retry = None if wrong == "never" else 0.05
    with connected([server.address], wire, retry_seconds=retry) as connector:
        server.close()
        assert connector.has(of) == [False]
        gone = str(connector.errors)
        heads = range(2, 4) if wrong == "heads" else range(HEADS)
        if wrong == "bits":
            wire.broken.append("bits")
        with served(MemoryPart(heads, of), wire, heads, port=port):
            until = time.monotonic() + (0.5 if wrong == "never" else 30)
            while str(connector.errors) == gone and time.monotonic() < until:
                assert connector.has(of) == [False]
                time.sleep(0.01)
            said = {
                "heads": "serves heads 2 to 3 now, not 0 to 3",
                "bits": "other bytes came than were sent",
                "never": "is gone",
            }
            assert said[wrong] in str(connector.errors)
            assert connector.has(of) == [False]


def test_a_server_that_falls_silent(wire: CopyWire) -> None:
    store = MemoryPart(of=keys(1))
    with (
        served(store, wire) as server,
        connected([server.address], wire, timeout=0.2) as connector,
    ):
        peer = connector._peers[0]
        store._thread.submit(time.sleep, 1.0)
        with pytest.raises(ConnectorError, match=r"is silent for 0.2 s"):
            read(connector, keys(1))
        assert connector.has(keys(1)) == [False] and peer.error is not None


def test_a_silent_server_does_not_hold_up_who_asks(wire: CopyWire) -> None:
    """It is waited for once; then its blocks are misses, until it has answered."""
    answers = threading.Event()
    answers.set()
    store, heads = MemoryPart(), {"num_kv_heads": HEADS}
    manager = kv.BlockManager(3, 4, head_dim=8, num_blocks=4, dtype="float32", **heads)
    cache = kv.PrefixCache(manager, model="m", **heads)
    assert cache.namespace.digest == namespace().digest
    store.has = lambda keys: [answers.wait(30)] * len(keys)  # type: ignore[method-assign]
    with (
        served(store, wire) as server,
        connected([server.address], wire, ask_seconds=0.05) as connector,
        kv.cache.TieredCache(cache, host_bytes=1 << 16, store=connector) as tiers,
    ):
        answers.clear()
        prompt, took = list(range(9)), []
        for _ in range(4):
            began = time.monotonic()
            assert tiers.lookup(prompt)["store"] == 0
            took.append(time.monotonic() - began)
        assert took[0] >= 0.05 and sum(took) < 5  # not 30 s, nor 4 times 0.05
        assert connector.unanswered == tiers.stats()["store"]["failed"] == 8
        assert not connector.errors  # it may still answer
        answers.set()
        assert again(connector, keys(2)) == [True, True]


def test_a_server_that_is_silent_for_too_long_is_lost(wire: CopyWire) -> None:
    store, answers = MemoryPart(), threading.Event()
    store.has = lambda keys: [answers.wait(30)] * len(keys)  # type: ignore[method-assign]
    options = {"ask_seconds": 0.01, "timeout": 0.2}
    with (
        served(store, wire) as server,
        connected([server.address], wire, **options) as connector,
    ):
        assert connector.has(keys(1)) == [False]
        until = time.monotonic() + 30
        while not connector.errors and time.monotonic() < until:
            time.sleep(0.01)
        assert "is silent for 0.2 s" in str(connector.errors)
        assert connector.has(keys(1)) == [False] and connector.unanswered == 1
        answers.set()


@pytest.mark.parametrize("who", ["store", "wire"])
def test_a_get_that_fails(wire: CopyWire, who: str) -> None:
    of = keys(2)
    store = MemoryPart(of=of)
    with served(store, wire) as server, connected([server.address], wire) as connector:
        if who == "store":
            store.broken = OSError("the disk is gone")
        else:
            wire.broken.append("fetch")
        said = {"store": "says: OSError: the disk is gone", "wire": "the cable is cut"}
        with pytest.raises(ConnectorError, match=said[who]):
            read(connector, of)
        assert connector.has(of) == [False, False]  # it is not asked again
        until = time.monotonic() + 5
    while CopySide.offers and time.monotonic() < until:
        time.sleep(0.01)


def test_other_bits_than_were_sent(wire: CopyWire) -> None:
    wire.broken.append("bits")
    with (
        served(MemoryPart(), wire) as server,
        pytest.raises(ConnectorError, match="other bytes came than were sent"),
    ):
        connected([server.address], wire)


def test_connections_go_when_their_jobs_do(wire: CopyWire) -> None:
    with served(MemoryPart(of=keys(1)), wire) as server:
        host, _, port = server.address.rpartition(":")
        stranger = socket.create_connection((host, int(port)))
        stranger.send(b"GET / HTTP/1.1\r\n\r\n" * 10)
        with connected([server.address], wire) as connector:
            assert read(connector, keys(1))[0] == [True]
            assert server.num_connections >= 2
        stranger.close()
        until = time.monotonic() + 10
        while server.num_connections and time.monotonic() < until:
            time.sleep(0.01)
        assert server.num_connections == 0


def test_nixl_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_wire, "MODULES", ("no_such_nixl._api",))
    with pytest.raises(ImportError, match="`pip install --no-deps nixl-cu13`"):
        NixlWire()
