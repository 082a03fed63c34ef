"""Blocks by `NixlWire`, over a stand-in for NIXL."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from nixl_stand_in import Nixl
from peer_process import SECRET
from tier_parts import HEAD_BYTES, HEADS, MemoryPart, block, blocks, keys, namespace

from jax_kvblock.cache.connector import ConnectorError
from jax_kvblock.cache.connectors import BlockServer, NixlWire, PeerConnector
from jax_kvblock.cache.connectors.nixl_wire import MODULES

BLOCK = HEADS * HEAD_BYTES
EVERY = range(HEADS)


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nixl]:
    module = Nixl()
    for name in {*MODULES, *(name.partition(".")[0] for name in MODULES)}:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, MODULES[1].partition(".")[0], module)
    monkeypatch.setitem(sys.modules, MODULES[1], module)
    yield module
    assert module.left() == []


def served(store: MemoryPart) -> BlockServer:
    """Three blocks at a time."""
    return BlockServer(
        store,
        namespace=namespace(),
        wire=NixlWire(),
        secret=SECRET,
        staging_bytes=3 * BLOCK,
        takes=True,
    )


def connected(
    server: BlockServer, heads: range = EVERY, timeout: float = 30
) -> PeerConnector:
    return PeerConnector(
        [server.address],
        namespace=namespace(len(heads)),
        heads=heads,
        wire=NixlWire(),
        secret=SECRET,
        min_bandwidth=0,
        timeout=timeout,
    )


def read(connector: PeerConnector, of: list[bytes]) -> tuple[list[bool], np.ndarray]:
    out = np.zeros((len(of), len(connector.heads) * HEAD_BYTES), np.uint8)
    return connector.get(of, out).result(30), out


@pytest.mark.parametrize("looks", [0, 1, 5])
def test_blocks_by_nixl(nixl: Nixl, looks: int) -> None:
    nixl.looks = looks
    of, store = keys(8), MemoryPart(of=keys(7))
    del store.kept[of[4]]
    there = [i for i in range(7) if i != 4]
    with served(store) as server:
        for heads in (EVERY, range(2, 3)):
            with connected(server, heads) as connector:
                nixl.transfers.clear()  # those of the probe
                found, out = read(connector, of)
                assert found == [i in there for i in range(8)]
                wanted = blocks([of[i] for i in there], heads)
                np.testing.assert_array_equal(out[there], wanted)
                assert sum(nixl.transfers) == wanted.nbytes
        with connected(server) as connector:
            more = keys(4, 20)
            connector.put(more, blocks(more)).result(30)
            for key in more:
                np.testing.assert_array_equal(store.kept[key], block(key))


def test_what_was_registered_goes_with_the_connection(nixl: Nixl) -> None:
    """Also while the server goes on."""
    with served(MemoryPart(of=keys(2))) as server:
        with connected(server) as connector:
            read(connector, keys(2))
            # Either end has its own memory, and knows the other one.
            kinds = sorted(text.split(": ")[1] for text in nixl.left())
            assert kinds == ["peers"] * 2 + ["registered"] * 2
        until = time.monotonic() + 10
        while server.num_connections and time.monotonic() < until:
            time.sleep(0.01)
        assert nixl.left() == []


FAILURES = {
    "initialize": "NixlWire: a transfer failed: NIXL_ERR_NOT_FOUND",
    "post": "NixlWire: a transfer ended as ERR",
    "state": "NixlWire: a transfer ended as ERR",
    "look": "NixlWire: a transfer failed: NIXL_ERR_REMOTE_DISCONNECT",
    "stuck": "NixlWire: nothing came within 0.5 s",
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_transfer_that_fails(nixl: Nixl, how: str) -> None:
    of = keys(3)
    with served(MemoryPart(of=of)) as server:
        with connected(server, timeout=0.5) as connector:
            assert read(connector, of)[0] == [True] * 3
            nixl.broken.add(how)
            with pytest.raises(ConnectorError, match=FAILURES[how]):
                read(connector, of)
            # It is not asked again, and says why.
            assert connector.has(of) == [False] * 3
            assert FAILURES[how] in str(connector.errors[server.address])
        nixl.broken.clear()
        with connected(server) as connector:  # and a new connection is right
            found, out = read(connector, of)
            assert all(found) and (out == blocks(of)).all()


def test_a_put_that_fails(nixl: Nixl) -> None:
    """The server fetches: it says what went wrong, and keeps nothing."""
    store, of = MemoryPart(), keys(2)
    with served(store) as server, connected(server) as connector:
        nixl.broken.add("state")
        said = f"says: ConnectorError: {FAILURES['state']}"
        with pytest.raises(ConnectorError, match=said):
            connector.put(of, blocks(of)).result(30)
        assert not store.kept


def test_offers_of_other_bytes(nixl: Nixl) -> None:
    here, there = (NixlWire().side(100) for _ in range(2))
    here.meet(there.hello)
    offered = there.offer(np.arange(60, dtype=np.uint8).reshape(2, 30))
    rows = [np.zeros(30, np.uint8) for _ in range(2)]
    for count, wrong in ((60, rows[:1]), (60, [*rows, rows[0]])):
        with pytest.raises(ConnectorError, match=f"{count} bytes are offered, of oth"):
            here.fetch(offered, wrong, 1)
    assert nixl.transfers == []
    here.fetch(offered, rows, 1)
    np.testing.assert_array_equal(np.concatenate(rows), np.arange(60))
    here.close()
    there.close()


def test_a_backend_that_does_not_start(nixl: Nixl) -> None:
    with pytest.raises(ConnectorError, match="FAST does not start: it is not among"):
        NixlWire("FAST")
    nixl.broken.add("start")
    with pytest.raises(ConnectorError, match="UCX does not start: NIXL_ERR_BACKEND"):
        NixlWire()
