"""Blocks from one job to another, by the wires that are installed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from copy_wire import STAGING, CopySide, CopyWire, again, connected, read, served
from peer_process import SECRET
from tier_parts import HEAD_BYTES, HEADS, MemoryPart, block, blocks, keys, namespace

import jax_kvblock
from jax_kvblock.cache.connector import ConnectorError, SlowConnectorError
from jax_kvblock.cache.connectors import (
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


@pytest.fixture
def wire() -> Iterator[CopyWire]:
    CopySide.offers.clear()
    yield CopyWire()
    assert not CopySide.offers  # nothing that was offered stays


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
        with connected(addresses, here) as connector:
            started[1].send_signal(signal.SIGSTOP)  # its port stays open
            assert os.WIFSTOPPED(os.waitpid(started[1].pid, os.WUNTRACED)[1])
            began = time.monotonic()
            assert connector.has(keys(2), timeout=0.2) == [False] * 2
            assert time.monotonic() - began < 10 and connector.unanswered >= 2
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
    with pytest.raises(ValueError, match="max_connections must be at least 2, a Peer"):
        served(MemoryPart(), wire, max_connections=1)


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


def test_nixl_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_wire, "MODULES", ("no_such_nixl._api",))
    with pytest.raises(ImportError, match="`pip install --no-deps nixl-cu13`"):
        NixlWire()
