"""`BlockServer`: lets other jobs read this one's blocks, by key."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from jax_kvblock.cache.connector import Connector, ConnectorError
from jax_kvblock.cache.connectors.messages import (
    COME_AGAIN,
    FORMAT,
    KEY_BYTES,
    Channel,
    Message,
    check_secret,
)
from jax_kvblock.cache.connectors.wire import Side, Wire
from jax_kvblock.cache.namespace import Namespace

_NAP = 0.1  # seconds between looks whether the server is closed
_STRANGERS = 32  # connections at a time that have not shown the secret; the oldest go
_PROOF_SECONDS = 5.0  # in which they have to


class Served(Protocol):
    """What a server reads: `TierStore`, `DiskTier`, or a store of one's own."""

    def has(self, keys: Sequence[bytes]) -> list[bool]: ...

    def get(
        self, keys: Sequence[bytes], out: np.ndarray, *, start: int
    ) -> Future[Any]: ...


class BlockServer:
    """Serves blocks to the `PeerConnector`s of other jobs.

    Each connection has a thread, and `staging_bytes` of memory.

    Args:
      store: what is served: `TierStore(tiers)` for the blocks of a `TieredCache`, or a
        `DiskTier`. With `takes`, it also has `put(keys, rows)`.
      namespace: the `PrefixCache`'s.
      wire: `JaxWire` or `NixlWire`; the other side has to use the same.
      secret: at least 16 bytes, the same in all jobs.
      heads: which of the model's heads the blocks have; all of them when None.
      host, port: where it listens, by IPv4 or IPv6; port 0 takes one that is free.
      staging_bytes: how much a reply has at most.
      takes: whether others may put blocks here.
      timeout: seconds that a message to or from another job may take, all of it.
      max_connections: how many may be open; each `PeerConnector` has two. More of them
        are told so and closed.

    Attributes:
      address: "host:port", or "[host]:port" of IPv6: what the other jobs need.
      heads: as above.

    Raises:
      ValueError: for heads that do not fit the namespace, a secret that is too short,
        `staging_bytes` in which no block fits, or `max_connections` below 2.
      OSError: when the port cannot be had.

    Example:
      >>> server = BlockServer(TierStore(tiers), namespace=cache.namespace,
      ...                      wire=JaxWire(), secret=secret)
    """

    def __init__(
        self,
        store: Served,
        *,
        namespace: Namespace,
        wire: Wire,
        secret: bytes,
        heads: range | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        staging_bytes: int = 64 << 20,
        takes: bool = False,
        timeout: float = 30.0,
        max_connections: int = 1024,
    ) -> None:
        self.store, self.wire, self._takes = store, wire, takes
        shape = Connector(namespace, heads)
        self.heads, self._namespace = shape.heads, namespace
        self._secret = check_secret("BlockServer", secret)
        self._num_heads, self._head_bytes = shape.num_heads, shape.head_bytes
        self.block_bytes = len(self.heads) * shape.head_bytes
        self._staging, self._timeout = staging_bytes, timeout
        if staging_bytes < self.block_bytes:
            raise ValueError(
                "BlockServer: staging_bytes must hold a block of "
                f"{self.block_bytes} bytes, got {staging_bytes}"
            )
        if max_connections < 2:
            raise ValueError(
                "BlockServer: max_connections must be at least 2, a PeerConnector's, "
                f"got {max_connections}"
            )
        self._most = max_connections
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._open: dict[Channel, threading.Thread] = {}
        self._strangers: dict[Channel, None] = {}  # the oldest first
        six = ":" in host
        family = socket.AF_INET6 if six else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self._listener.settimeout(_NAP)
        named = f"[{host}]" if six else host
        self.address = f"{named}:{self._listener.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    @property
    def num_connections(self) -> int:
        """How many connections are open."""
        with self._lock:
            return len(self._open)

    def close(self) -> None:
        """Ends all connections; what is under way fails at the other side.

        Waits for what the store and the wire are at by then, and for nobody else.
        """
        self._closed.set()
        self._accepting.join()
        self._listener.close()
        with self._lock:
            connections = dict(self._open)
        for channel in connections:
            channel.shut()
        for thread in connections.values():
            thread.join()

    def __enter__(self) -> BlockServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- connections ----

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connected, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._closed.wait(_NAP):
                    return
                continue
            try:
                self._take(connected, address)
            except Exception:  # it is gone, or there is no thread for it
                connected.close()
                self._closed.wait(_NAP)

    def _take(self, connected: socket.socket, address: tuple[Any, ...]) -> None:
        """A connection that has come gets a thread, or is refused."""
        name = f"BlockServer: {address[0]}:{address[1]}"
        channel = Channel(connected, name, min(self._timeout, _PROOF_SECONDS))
        self._drop_strangers()
        if (count := self.num_connections) >= self._most:
            channel.refuse(f"{count} connections are open, max_connections; pass more")
            channel.close()
            return
        given = (channel,)
        thread = threading.Thread(target=self._run, args=given, daemon=True)
        with self._lock:
            self._open[channel] = thread
            self._strangers[channel] = None
        try:
            thread.start()
        except BaseException:
            with self._lock:
                del self._open[channel], self._strangers[channel]
            raise

    def _drop_strangers(self) -> None:
        """Makes room for one more: who only holds a place must not keep others out."""
        with self._lock:
            if len(self._strangers) < _STRANGERS:
                return
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            thread = self._open[oldest]
        oldest.refuse(f"{_STRANGERS} others have not shown the secret; {COME_AGAIN}")
        thread.join()  # at once, since it waits for nobody any more

    def _enters(self, channel: Channel) -> bool:
        """Whether one that has shown the secret was not dropped meanwhile."""
        with self._lock:
            return self._strangers.pop(channel, self) is None

    def _run(self, channel: Channel) -> None:
        """One connection, from its beginning to its end."""
        try:
            with contextlib.suppress(ConnectorError):
                enters = functools.partial(self._enters, channel)
                channel.prove_as_server(self._secret, enters)
                channel.timeout = self._timeout
                self._serve(channel)
        finally:
            with self._lock:
                self._strangers.pop(channel, None)
                del self._open[channel]
            channel.close()

    def _serve(self, channel: Channel) -> None:
        with contextlib.ExitStack() as stack:
            connection = None
            while not self._closed.is_set():
                if not channel.waiting(_NAP):
                    continue
                request = channel.receive()
                try:
                    if connection is None:
                        connection = self._begin(request, stack, channel)
                    else:
                        connection.reply(request)
                except Exception as error:
                    if connection is not None and connection.side is not None:
                        connection.side.withdraw()
                    channel.send("error", why=f"{type(error).__name__}: {error}")

    def _begin(
        self, hello: Message, stack: contextlib.ExitStack, channel: Channel
    ) -> _Connection:
        """Both sides say what they are; those that do not fit part here."""
        fields = hello.fields
        mine: dict[str, Any] = {
            "format": FORMAT,
            "namespace": self._namespace.digest.hex(),
            "wire": self.wire.name,
            "num_heads": self._num_heads,
            "head_bytes": self._head_bytes,
        }
        for name, value in mine.items():
            if fields.get(name) != value:
                raise ConnectorError(f"{name} is {value} here, not {fields.get(name)}")
        side = None
        if fields["moves"]:
            side = self.wire.side(self._staging)
            stack.callback(side.close)
            side.meet(hello.payload)
        channel.send(
            "hello",
            side.hello if side else b"",
            heads=[self.heads.start, self.heads.stop],
            staging=self._staging,
            takes=self._takes,
        )
        return _Connection(self, channel, side)


class _Connection:
    """What a connection is asked for, after the hello."""

    def __init__(
        self, server: BlockServer, channel: Channel, side: Side | None
    ) -> None:
        self._server, self._channel, self.side = server, channel, side

    def reply(self, request: Message) -> None:
        kinds = {"has": self._has}
        if self.side is not None:
            moves = {"get": self._get, "put": self._put, "probe": self._probe}
            kinds.update(moves)
        if request.kind not in kinds:
            raise ConnectorError(f"{request.kind!r} is not known here")
        kinds[request.kind](request)

    def _has(self, request: Message) -> None:
        there = self._server.store.has(request.keys)
        self._channel.send("has", bytes(map(int, there)))

    def _get(self, request: Message) -> None:
        keys, fields = request.keys, request.fields
        start, count = int(fields["start"]), int(fields["count"])
        if not 0 <= start < start + count <= self._server.block_bytes:
            raise ConnectorError(f"bytes {start} to {start + count} are not in a block")
        rows = self._rows(len(keys), count)
        found = list(self._server.store.get(keys, rows, start=start).result())
        here = rows if all(found) else np.ascontiguousarray(rows[np.flatnonzero(found)])
        self._hand_over("get", here, bytes(map(int, found)))

    def _probe(self, request: Message) -> None:
        self._hand_over("probe", probe_rows(int(request.fields["nbytes"])), b"")

    def _put(self, request: Message) -> None:
        if not self._server._takes:
            raise ConnectorError("blocks are only read here; open it with takes=True")
        end = int(request.fields["count"]) * KEY_BYTES
        keys = request._replace(payload=request.payload[:end]).keys
        offered = request.payload[end:]
        rows = self._rows(len(keys), self._server.block_bytes)
        self._side.fetch(offered, list(rows), self._server._timeout)
        store: Any = self._server.store
        store.put(keys, rows).result()
        self._channel.send("put")

    @property
    def _side(self) -> Side:
        assert self.side is not None
        return self.side

    def _rows(self, count: int, size: int) -> np.ndarray:
        if count * size > self._server._staging:
            raise ConnectorError(
                f"{count} blocks of {size} bytes are more than "
                f"staging_bytes={self._server._staging}"
            )
        return np.empty((count, size), np.uint8)

    def _hand_over(self, kind: str, rows: np.ndarray, payload: bytes) -> None:
        """Has rows fetched, and waits until they are."""
        if not rows.size:
            self._channel.send(kind, payload, offered=0)
            return
        try:
            offered = self._side.offer(rows)
            self._channel.send(kind, offered + payload, offered=len(offered))
            taken = self._channel.receive().kind == "taken"
        except BaseException:
            self._side.withdraw()
            raise
        if taken:
            self._side.taken()
        else:
            self._side.withdraw()


def probe_rows(nbytes: int) -> np.ndarray:
    """What is sent to measure a wire: both sides know it, uint8 `[1, nbytes]`."""
    pattern = np.arange(251, dtype=np.uint8)
    return np.resize(pattern, (1, nbytes))
