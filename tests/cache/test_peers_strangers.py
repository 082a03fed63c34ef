"""Strangers who come to servers, and many who come at once."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from copy_wire import CopySide, CopyWire, connected, served
from tier_parts import MemoryPart, keys

from jax_kvblock.cache.connector import ConnectorError
from jax_kvblock.cache.connectors import server as peers_server
from jax_kvblock.cache.connectors.messages import Channel, ComeAgainError


@pytest.fixture
def wire() -> Iterator[CopyWire]:
    CopySide.offers.clear()
    yield CopyWire()
    assert not CopySide.offers  # nothing that was offered stays


def stranger(server: Any) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), 10)


def test_closing_does_not_wait_for_those_who_say_nothing(wire: CopyWire) -> None:
    with contextlib.ExitStack() as stack:
        server = served(MemoryPart(of=keys(1)), wire)
        connector = stack.enter_context(connected([server.address], wire))
        channel = connector._peers[0]._asks
        channel._socket.sendall(b"\0\0")  # half of a size, and no more
        for _ in range(3):
            stack.enter_context(stranger(server)).recv(1)  # their turn to prove it
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 2 and server.num_connections == 0


def test_a_message_has_to_come_whole_in_time(
    wire: CopyWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then is not enough, before the secret is shown nor after."""
    with served(MemoryPart(), wire) as server:
        with monkeypatch.context() as patch, stranger_within(patch, server) as slow:
            assert refused_after(slow, b"\0\0\0\x40") < 3
        with connected([server.address], wire) as connector:
            for channel in server._open:
                channel.timeout = 0.5
            asks = connector._peers[0]._asks
            assert refused_after(asks._socket, b"\0\0\1\0") < 3


def stranger_within(patch: pytest.MonkeyPatch, server: Any) -> socket.socket:
    """One who has half a second for the proof."""
    patch.setattr(peers_server, "_PROOF_SECONDS", 0.5)
    client = stranger(server)
    client.recv(1)  # its time has begun
    return client


def refused_after(client: socket.socket, size: bytes) -> float:
    """How long one may send a byte each 0.1 s behind a size; 5 s at most."""
    began = time.monotonic()
    with contextlib.suppress(OSError):
        client.sendall(size)
        while time.monotonic() - began < 5:
            client.sendall(b"\0")
            time.sleep(0.1)
    return time.monotonic() - began


def rest_of(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(1024), b""))


def test_connections_that_find_no_room(
    wire: CopyWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_server, "_STRANGERS", 3)
    with served(MemoryPart(of=keys(1)), wire, max_connections=4) as server:
        strangers = [stranger(server) for _ in range(3)]
        for each in strangers:
            each.recv(1)
        # The oldest makes room for one who shows the secret, and is told so.
        with connected([server.address], wire, timeout=10) as connector:
            assert connector.has(keys(1)) == [True]
            assert b"have not shown the secret; come again" in rest_of(strangers[0])
            assert server.num_connections == 4
        for each in strangers:
            each.close()
        until = time.monotonic() + 10
        while server.num_connections and time.monotonic() < until:
            time.sleep(0.01)
        with connected([server.address], wire), connected([server.address], wire):
            with pytest.raises(ConnectorError, match="4 connections are open, max_con"):
                connected([server.address], wire)
            assert server.num_connections == 4


def test_one_who_is_dropped_comes_again(
    wire: CopyWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many at once, who need longer for their proof than others need to come."""
    monkeypatch.setattr(peers_server, "_STRANGERS", 2)
    prove, dropped = Channel.prove_as_client, []

    def slowly(channel: Channel, secret: bytes) -> None:
        time.sleep(0.02)
        try:
            prove(channel, secret)
        except ComeAgainError as error:
            dropped.append(error)
            raise

    monkeypatch.setattr(Channel, "prove_as_client", slowly)
    with (
        served(MemoryPart(of=keys(1)), wire) as server,
        ThreadPoolExecutor(8) as threads,
    ):
        opened = [
            threads.submit(connected, [server.address], wire, timeout=60)
            for _ in range(8)
        ]
        for each in opened:
            with each.result(60) as connector:
                assert connector.has(keys(1)) == [True]
        assert dropped


def test_one_who_finds_no_room_for_long_is_told_so(
    wire: CopyWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def refused(channel: Channel, secret: bytes) -> None:
        tries.append(time.monotonic())
        channel.close()
        raise ComeAgainError("come again")

    monkeypatch.setattr(Channel, "prove_as_client", refused)
    with (
        served(MemoryPart(), wire) as server,
        pytest.raises(ConnectorError, match="come again"),
    ):
        connected([server.address], wire, timeout=0.5)
    assert len(tries) >= 2 and tries[-1] - tries[0] <= 0.5


def test_who_accepts_goes_on_where_no_thread_can_be_started(
    wire: CopyWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, refuses = threading.Thread.start, ["thread", "thread", "socket"]

    def start(thread: threading.Thread) -> None:
        if "_run" in thread.name and refuses[:1] == ["thread"]:
            refuses.pop(0)
            raise RuntimeError("can't start new thread")
        run(thread)

    class Gone(Channel):
        def __init__(self, *args: Any) -> None:
            if refuses[:1] == ["socket"]:
                refuses.pop(0)
                raise OSError("Invalid argument")
            super().__init__(*args)

    monkeypatch.setattr(peers_server, "Channel", Gone)
    with served(MemoryPart(of=keys(1)), wire) as server:
        monkeypatch.setattr(threading.Thread, "start", start)
        for _ in range(3):
            with stranger(server) as client:
                assert rest_of(client) == b"" and server.num_connections == 0
        assert not refuses
        with connected([server.address], wire) as connector:
            assert connector.has(keys(1)) == [True]


def test_a_server_by_ipv6(wire: CopyWire) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with served(MemoryPart(of=keys(1)), wire, host="::1") as server:
        assert server.address.startswith("[::1]:")
        with connected([server.address], wire) as connector:
            assert connector.has(keys(2)) == [True, False]
