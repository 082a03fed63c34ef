"""Servers that end, fall silent, are slow or fail."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from copy_wire import CopySide, CopyWire, again, connected, read, served
from tier_parts import HEAD_BYTES, HEADS, MemoryPart, blocks, keys, namespace

import jax_kvblock as kv
from jax_kvblock.cache.connector import ConnectorError
from jax_kvblock.cache.connectors.peer import Peer


@pytest.fixture
def wire() -> Iterator[CopyWire]:
    CopySide.offers.clear()
    yield CopyWire()
    assert not CopySide.offers  # nothing that was offered stays


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
        connected([server.address], wire) as connector,
    ):
        peer = connector._peers[0]
        peer._moves.timeout = 0.2
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
        assert connector.unanswered == tiers.stats()["store"]["unanswered"] == 8
        assert not connector.errors  # it may still answer
        assert tiers.stats()["store"]["failed"] == 0
        answers.set()
        assert again(connector, keys(2)) == [True, True]


class Slow(MemoryPart):
    """Takes a while to tell what it has, and counts the questions."""

    def __init__(self, of: list[bytes], seconds: float) -> None:
        super().__init__(of=of)
        self.seconds, self.asked = seconds, 0

    def has(self, keys: Any) -> list[bool]:
        self.asked += 1
        time.sleep(self.seconds)
        return super().has(keys)


def test_a_server_that_is_always_slow_gives_hits(wire: CopyWire) -> None:
    """An engine waits for it once; what it answers is there at the next question."""
    of = keys(3)
    slow, quick = Slow(of[:1], 0.25), Slow(of[1:2], 0.0)
    with (
        served(slow, wire) as one,
        served(quick, wire) as two,
        connected([one.address, two.address], wire, ask_seconds=0.1) as connector,
    ):
        found, until = [], time.monotonic() + 30
        while found != [True, True, False] and time.monotonic() < until:
            found = connector.has(of, timeout=0.1)
            time.sleep(0.01)
        assert found == [True, True, False]  # of one that is late, and one that is not
        began, counted = time.monotonic(), connector.unanswered
        for _ in range(20):
            assert connector.has(of, timeout=0.1) == found
        assert time.monotonic() - began < 1  # not 0.1 s each time
        assert connector.unanswered == counted
        assert read(connector, of)[0] == found  # who reads waits for what is true
        slow.seconds = 0.0
        slow.kept.clear()
        while connector.has(of, timeout=0.1)[0] and time.monotonic() < until:
            time.sleep(0.01)
        assert connector.has(of, timeout=30) == [False, True, False]


def test_all_servers_that_are_frozen_are_waited_for_together(wire: CopyWire) -> None:
    answers = threading.Event()
    answers.set()
    with contextlib.ExitStack() as stack:
        stack.callback(answers.set)
        addresses = []
        for _ in range(4):
            store = MemoryPart()
            store.has = lambda keys: [answers.wait(30)] * len(keys)  # type: ignore[method-assign]
            addresses.append(stack.enter_context(served(store, wire)).address)
        connector = stack.enter_context(connected(addresses, wire))
        stack.callback(answers.set)
        answers.clear()
        began = time.monotonic()
        for _ in range(10):
            assert connector.has(keys(1), timeout=0.5) == [False]
        assert 0.5 <= time.monotonic() - began < 1.5  # not 4 times, nor 10 times
        assert not connector.errors


def test_threads_that_ask_at_once_share_an_answer(wire: CopyWire) -> None:
    of, go = keys(8), threading.Event()
    slow = Slow(of, 0.2)
    with served(slow, wire) as server, connected([server.address], wire) as connector:
        with ThreadPoolExecutor(8) as threads:
            told = [
                threads.submit(lambda key: go.wait(30) and connector.has([key]), key)
                for key in of
            ]
            go.set()
            assert [each.result(30) for each in told] == [[True]] * 8
        assert slow.asked < 5  # one by one it is 8


def test_blocks_that_a_slow_server_has_are_not_put_again(wire: CopyWire) -> None:
    slow, heads = Slow([], 0.1), {"num_kv_heads": HEADS}
    manager = kv.BlockManager(3, 4, head_dim=8, num_blocks=4, dtype="float32", **heads)
    cache = kv.PrefixCache(manager, model="m", **heads)
    slow.lies = set(cache.namespace.keys(range(8)))  # it has them
    with (
        served(slow, wire, takes=True) as server,
        connected([server.address], wire, ask_seconds=0.01) as connector,
        kv.cache.TieredCache(cache, host_bytes=1 << 16, store=connector) as tiers,
    ):
        table = cache.open(range(9))
        table.reserve(9)
        table.commit(9)
        tiers.offload(table).wait()
        tiers.drain()
        told = tiers.stats()["store"]
        assert slow.asked == 1 and not slow.kept
        assert told["blocks_in"] == told["failed"] == told["unanswered"] == 0


def test_a_server_that_is_silent_for_too_long_is_lost(wire: CopyWire) -> None:
    store, answers = MemoryPart(), threading.Event()
    store.has = lambda keys: [answers.wait(30)] * len(keys)  # type: ignore[method-assign]
    with (
        served(store, wire) as server,
        connected([server.address], wire) as connector,
    ):
        connector._peers[0]._asks.timeout = 0.2
        assert connector.has(keys(1), timeout=0.01) == [False]
        until = time.monotonic() + 30
        while not connector.errors and time.monotonic() < until:
            time.sleep(0.01)
        assert "is silent for 0.2 s" in str(connector.errors)
        assert connector.has(keys(1)) == [False] and connector.unanswered == 1
        answers.set()


def test_jobs_do_not_all_come_back_at_once(wire: CopyWire) -> None:
    with (
        served(MemoryPart(), wire) as server,
        connected([server.address], wire) as connector,
    ):
        peer, patience = connector._peers[0], set()
        for _ in range(9):
            peer.lost(ConnectorError("gone"))
            patience.add(peer.patience)
    assert len(patience) == 9 and 0.75 <= min(patience) < max(patience) <= 1.25


def test_closing_waits_for_no_server(wire: CopyWire) -> None:
    """A get under way fails, and so does a try to connect again."""
    store, goes_on = MemoryPart(of=keys(1)), threading.Event()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(served(store, wire))
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        stack.callback(goes_on.set)
        connector = connected([server.address], wire, retry_seconds=0.001)
        store._thread.submit(goes_on.wait, 30)
        out = np.zeros((1, HEADS * HEAD_BYTES), np.uint8)
        reading = connector.get(keys(1), out)
        lost = Peer(f"127.0.0.1:{silent.getsockname()[1]}", connector, wire, 30)
        lost.lost(ConnectorError("gone"))
        connector._peers.append(lost)
        time.sleep(0.01)
        connector.parts()  # somebody asks
        stack.enter_context(silent.accept()[0])  # it is connected, and hears nothing
        began = time.monotonic()
        connector.close()
        connector._looker.shutdown()
        assert time.monotonic() - began < 5
        assert isinstance(reading.exception(5), ConnectorError)


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
