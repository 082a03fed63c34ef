"""`PeerConnector`: blocks that other jobs serve."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from jax_kvblock.cache.connector import (
    Connector,
    ConnectorError,
    Part,
    all_of,
    check_rate,
)
from jax_kvblock.cache.connectors.asking import Questions
from jax_kvblock.cache.connectors.messages import (
    FORMAT,
    KEY_BYTES,
    Channel,
    Message,
    check_secret,
    connect,
)
from jax_kvblock.cache.connectors.server import probe_rows
from jax_kvblock.cache.connectors.wire import Side, Wire
from jax_kvblock.cache.namespace import Namespace

_ROUNDS = 3  # of a probe: the first one sets up connections
_EARLY, _LATE = 0.75, 1.25  # of `retry_seconds`, so that jobs do not all come at once


class PeerConnector(Connector):
    """Blocks that the `BlockServer`s of other jobs hold.

    Args:
      addresses: of the servers, "host:port"; the nearest first. Each has some of the
        heads.
      namespace: the `PrefixCache`'s.
      wire: `JaxWire` or `NixlWire`, as the servers have it.
      secret: the servers', at least 16 bytes.
      heads: which of the model's heads this process has; all of them when None.
      min_bandwidth: bytes a second, from each server, as they are measured at the
        start with `probe_bytes`; 0 accepts any.
      probe_bytes: how much is fetched to measure it.
      timeout: seconds that a message to or from a server may take, and for which one
        that has no room for a moment is tried again.
      ask_seconds: how long a `TieredCache` waits for the servers' answers, all of them
        together, since engines ask between their steps. What is not answered by then is
        a miss. The answer is kept for the next question, and a server that was late is
        not waited for until it has answered in so many seconds.
      retry_seconds: how long after it was lost, and after each try, a server is
        connected to again, a quarter more or less, by a thread of its own once somebody
        asks for blocks; it is measured again then. None: never.

    Attributes:
      bandwidths: what was measured last, bytes a second by address.
      ask_seconds: as above.
      unanswered: blocks that `has` took for misses, since a server had not answered by
        `timeout=`.

    Raises:
      SlowConnectorError: when a server's way here is slower.
      ConnectorError: when a server is not there, or serves other blocks.
      ValueError: for no address, heads that do not fit the namespace, a short secret,
        `ask_seconds` or `retry_seconds` that are not above 0.

    Example:
      >>> connector = PeerConnector(["10.0.0.7:8500"], namespace=cache.namespace,
      ...                           wire=JaxWire(), secret=secret)
      >>> tiers = TieredCache(cache, host_bytes=8 << 30, store=connector)
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        namespace: Namespace,
        wire: Wire,
        secret: bytes,
        heads: range | None = None,
        min_bandwidth: float = 1e9,
        probe_bytes: int = 32 << 20,
        timeout: float = 30.0,
        ask_seconds: float = 0.2,
        retry_seconds: float | None = 30.0,
    ) -> None:
        super().__init__(namespace, heads)
        check_secret("PeerConnector", secret)
        if retry_seconds is not None and not retry_seconds > 0:
            raise ValueError(
                "PeerConnector: retry_seconds must be above 0, or None for never, got "
                f"{retry_seconds}"
            )
        if not ask_seconds > 0:
            raise ValueError(
                f"PeerConnector: ask_seconds must be above 0, got {ask_seconds}"
            )
        if isinstance(addresses, str) or not addresses:
            raise ValueError(
                "PeerConnector: addresses must be several like 'host:port', got "
                f"{addresses!r}"
            )
        self._wire, self._secret = wire, secret
        self._timeout, self.ask_seconds = timeout, ask_seconds
        self._probe, self._retry = (probe_bytes, min_bandwidth), retry_seconds
        self._lock = threading.Lock()  # of who looks for lost servers
        self._looker = ThreadPoolExecutor(1, "kvblock-peers")
        self._looking = self._closed = False
        self._peers: list[Peer] = []
        self._opening: Peer | None = None  # the last one that was, or is
        self.bandwidths: dict[str, float] = {}
        self.unanswered = 0
        try:
            for address in addresses:
                self._peers.append(self._open(address))
        except BaseException:
            self.close()
            raise

    @property
    def takes(self) -> bool:
        """Whether there is a server that takes blocks, or was."""
        return any(peer.takes for peer in self._peers)

    def parts(self) -> Sequence[Part]:
        self._look_again()
        return tuple(peer for peer in self._peers if peer.error is None)

    @property
    def errors(self) -> dict[str, ConnectorError]:
        """Of servers that are gone, why, or why the last try to connect again failed;
        nothing of theirs is found until they are back."""
        return {p.address: p.error for p in self._peers if p.error is not None}

    def has(
        self,
        keys: Sequence[bytes],
        *,
        heads: range | None = None,
        timeout: float | None = None,
    ) -> list[bool]:
        """Of each key, whether all heads of its block are there.

        Args:
          keys, heads: as `Connector.has` has them.
          timeout: seconds to wait for the servers' answers, all of them together;
            what is not answered by then is a miss, and `unanswered` counts it. A
            server's own `timeout` when None, after which it is lost.
        """
        if timeout is None:
            return super().has(keys, heads=heads)
        until = time.monotonic() + timeout

        def ask(peer: Any, keys: Sequence[bytes]) -> list[bool]:
            return peer.has(keys, max(0.0, until - time.monotonic()))

        return self._has(keys, heads, ask)

    def count_unanswered(self, count: int) -> None:
        with self._lock:
            self.unanswered += count

    def put(self, keys: Sequence[bytes], rows: np.ndarray) -> Future[None]:
        """Hands blocks to the servers that take them and have heads of this process.

        A server is given whole blocks of its own heads, so it cannot have others than
        this process.

        Raises:
          ConnectorError: when no such servers are there for all heads.
        """
        shape = (len(keys), len(self.heads) * self.head_bytes)
        self._check_rows("put", "rows", rows, shape)
        takers: list[Peer] = []
        left = set(self.heads)
        for peer in self._peers:
            inside = set(peer.heads) <= set(self.heads)
            if peer.error is None and peer.takes and inside and left & set(peer.heads):
                takers.append(peer)
                left -= set(peer.heads)
        if left:
            raise ConnectorError(
                f"PeerConnector.put: no server takes heads {sorted(left)}; open one "
                "with takes=True, whose heads are among this process's"
            )
        puts = []
        for peer in takers:
            first = (peer.heads.start - self.heads.start) * self.head_bytes
            last = first + len(peer.heads) * self.head_bytes
            puts.append(peer.put(list(keys), rows[:, first:last]))
        return all_of(puts)

    def close(self) -> None:
        """Ends all connections: what is under way fails."""
        with self._lock:
            self._closed = True
            if self._opening is not None:
                self._opening.shut()
        self._looker.shutdown(wait=False)
        for peer in self._peers:
            peer.close()

    # ---- servers, and those that were lost ----

    def _open(self, address: str) -> Peer:
        """A server that is there, at the rate that is asked."""
        peer = Peer(address, self, self._wire, self._timeout)
        with self._lock:
            self._opening = peer
            if self._closed:
                peer.shut()
        try:
            peer.open(self._secret)
            self.bandwidths[address] = peer.probe(*self._probe)
        except BaseException:
            peer.close()
            raise
        return peer

    def _look_again(self) -> None:
        """Has lost servers sought whose time has come."""
        if self._retry is None:
            return
        now = time.monotonic()
        with self._lock:
            lost = [
                place
                for place, peer in enumerate(self._peers)
                if peer.error is not None
                and now - peer.lost_at >= self._retry * peer.patience
            ]
            if lost and not self._looking and not self._closed:
                self._looking = True
                self._looker.submit(self._find_again, lost)

    def _find_again(self, places: Sequence[int]) -> None:
        try:
            for place in places:
                self._find_one(place)
        finally:
            with self._lock:
                self._looking = False

    def _find_one(self, place: int) -> None:
        lost = self._peers[place]
        try:
            found = self._open(lost.address)
            if found.heads != lost.heads:
                found.close()
                raise ConnectorError(
                    f"PeerConnector: {lost.address} serves heads {found.heads.start} "
                    f"to {found.heads.stop - 1} now, not {lost.heads.start} to "
                    f"{lost.heads.stop - 1}; connect by a new PeerConnector"
                )
        except Exception as error:  # as it may be half up
            lost.lost(
                error if isinstance(error, ConnectorError) else ConnectorError(error)
            )
            return
        with self._lock:
            if not self._closed:
                self._peers[place], found = found, lost
        found.close()


class Peer:
    """A server that this process is connected to; a `Part`.

    It has two connections: a question need not wait for blocks that are on their way.

    Attributes:
      address, heads, takes: the server's.
      error: why it is gone; None while it is there.
      lost_at: when that was known, by the monotonic clock.
      patience: how many `retry_seconds` it is left alone then.
    """

    def __init__(
        self,
        address: str,
        of: PeerConnector,
        wire: Wire,
        timeout: float,
    ) -> None:
        self.address, self._of, self._wire = address, of, wire
        self._timeout = timeout
        self.error: ConnectorError | None = None
        self.lost_at, self.patience = 0.0, 1.0
        self._hello: dict[str, Any] = {
            "format": FORMAT,
            "namespace": of.namespace.digest.hex(),
            "wire": wire.name,
            "num_heads": of.num_heads,
            "head_bytes": of.head_bytes,
        }
        self._questions = Questions(self._ask, of.ask_seconds)
        self._mover = ThreadPoolExecutor(1, "kvblock-peer")
        self._channels: list[Channel] = []
        self._ended = threading.Event()
        self._side: Side | None = None

    def open(self, secret: bytes) -> None:
        """Connects; who calls it closes it where that fails."""
        self._asks, _ = self._connect(secret, b"", moves=False)
        # Asked first what fits, since an end of a wire costs memory.
        self._staging = int(self._said["staging"])
        self._side = self._wire.side(self._staging)
        self._moves, theirs = self._connect(secret, self._side.hello, moves=True)
        self._side.meet(theirs)
        self.heads = range(*self._said["heads"])
        self.takes = bool(self._said["takes"])

    def has(self, keys: Sequence[bytes], timeout: float | None = None) -> list[bool]:
        if self.error is not None or not keys:
            return [False] * len(keys)
        told = self._questions.has(keys, timeout)
        if unanswered := told.count(None):
            self._of.count_unanswered(unanswered)
        return [bool(there) for there in told]

    def get(
        self, keys: Sequence[bytes], rows: Sequence[np.ndarray], *, start: int
    ) -> Future[list[bool]]:
        return self._mover.submit(self._get, list(keys), list(rows), start)

    def put(self, keys: list[bytes], rows: np.ndarray) -> Future[None]:
        return self._mover.submit(self._put, keys, rows)

    def probe(self, nbytes: int, least: float) -> float:
        """Measures the way from the server; see `PeerConnector`."""
        where = f"PeerConnector: {self.address} by {self._hello['wire']}"
        nbytes = min(nbytes, self._staging)
        wanted, row = probe_rows(nbytes)[0], np.empty(nbytes, np.uint8)
        fastest = float("inf")
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            self._mover.submit(self._fetch_probe, row).result()
            fastest = min(fastest, time.perf_counter() - began)
            if not np.array_equal(row, wanted):
                raise ConnectorError(f"{where}: other bytes came than were sent")
            row[:] = 0
        return check_rate(where, nbytes, fastest, least)

    def lost(self, error: ConnectorError) -> None:
        """It is gone, or not back."""
        self.patience = random.uniform(_EARLY, _LATE)
        self.lost_at = time.monotonic()  # first: who sees the error looks at these
        self.error = error

    def shut(self) -> None:
        """From any thread: nobody waits for an answer any more."""
        self._ended.set()
        for channel in list(self._channels):
            channel.shut()

    def close(self) -> None:
        self.shut()
        self._mover.shutdown()
        self._questions.close()
        for channel in self._channels:
            channel.close()
        if self._side is not None:
            self._side.close()
            self._side = None

    # ---- inside ----

    def _ask(self, keys: bytes) -> bytes:
        """In the thread that asks: a byte for each key; of one that is gone, zeros."""
        try:
            if self.error is None:
                return self._asks.ask("has", keys).payload
        except ConnectorError as error:
            self._lose(error)
        return bytes(len(keys) // KEY_BYTES)

    def _connect(
        self, secret: bytes, hello: bytes, *, moves: bool
    ) -> tuple[Channel, bytes]:
        where, made = "PeerConnector", self._channels
        channel = connect(where, self.address, secret, self._timeout, made, self._ended)
        reply = channel.ask("hello", hello, **self._hello, moves=moves)
        self._said = reply.fields
        return channel, reply.payload

    def _get(self, keys: list[bytes], rows: list[np.ndarray], start: int) -> list[bool]:
        """In the thread that moves: as many blocks at a time as fit."""
        found: list[bool] = []
        step = self._step(len(rows[0]) if rows else 1)
        for first in range(0, len(keys), step):
            part = slice(first, first + step)
            found += self._moving(self._get_some, keys[part], rows[part], start)
        return found

    def _get_some(
        self, keys: list[bytes], rows: list[np.ndarray], start: int
    ) -> list[bool]:
        payload = b"".join(keys)
        reply = self._moves.ask("get", payload, start=start, count=len(rows[0]))
        size = reply.fields["offered"]
        found = [bool(x) for x in reply.payload[size:]]
        here = [row for row, there in zip(rows, found, strict=True) if there]
        self._take(reply, here)
        return found

    def _fetch_probe(self, row: np.ndarray) -> None:
        self._moving(self._fetch_probed, row)

    def _fetch_probed(self, row: np.ndarray) -> None:
        self._take(self._moves.ask("probe", nbytes=len(row)), [row])

    def _take(self, reply: Message, rows: list[np.ndarray]) -> None:
        """Fetches what a reply offers."""
        if size := reply.fields["offered"]:
            assert self._side is not None
            self._side.fetch(reply.payload[:size], rows, self._timeout)
            self._moves.send("taken")

    def _put(self, keys: list[bytes], rows: np.ndarray) -> None:
        step = self._step(rows.shape[1])
        for first in range(0, len(keys), step):
            part = slice(first, first + step)
            self._moving(self._put_some, keys[part], rows[part])

    def _put_some(self, keys: list[bytes], rows: np.ndarray) -> None:
        assert self._side is not None
        try:
            offered = self._side.offer(np.ascontiguousarray(rows))
            payload = b"".join(keys) + offered
            self._moves.ask("put", payload, count=len(keys))
            self._side.taken()
        finally:
            self._side.withdraw()

    def _step(self, size: int) -> int:
        return max(1, self._staging // max(size, 1))

    def _moving(self, what: Any, *args: Any) -> Any:
        if self.error is not None:
            raise self.error
        try:
            return what(*args)
        except ConnectorError as error:
            self._lose(error)
            self._moves.close()  # so that the server stops waiting for us
            raise

    def _lose(self, error: ConnectorError) -> None:
        """Nothing more is asked of it: what is under way there is not known."""
        if self.error is None:
            self.lost(error)
