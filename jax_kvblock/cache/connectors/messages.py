"""Requests and replies between jobs: small messages, on a connection that both prove.

Blocks do not go this way; wires move them.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import random
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jax_kvblock.cache.connector import ConnectorError

FORMAT = 1  # of messages
KEY_BYTES = 32
_NONCE = 32
_SIZE = struct.Struct("!I")  # in front of each message
_WORDS = 200  # bytes of a refusal, where a nonce or a proof is awaited
COME_AGAIN = "come again"  # the end of one that is for a moment
_FIRST_NAP, _LAST_NAP = 0.05, 1.0  # seconds before one comes again, about
_MOST = 64 << 20  # bytes of a message: keys, or a description of memory


class ComeAgainError(ConnectorError):
    """There was no room for a moment."""


class Message(NamedTuple):
    """What it is, its fields, and bytes behind them."""

    kind: str
    fields: dict[str, Any]
    payload: bytes

    @property
    def keys(self) -> list[bytes]:
        """The payload as keys."""
        if len(self.payload) % KEY_BYTES:
            raise ConnectorError(f"{self.kind}: keys must be of {KEY_BYTES} bytes")
        places = range(0, len(self.payload), KEY_BYTES)
        return [self.payload[i : i + KEY_BYTES] for i in places]


class Channel:
    """Messages in order, both ways.

    A connection that breaks, falls silent or is too slow is a `ConnectorError`, and
    closed.

    Args:
      connected: a socket.
      peer: the other side's name, for errors.
      timeout: seconds that a message may take, all of it, and the wait for it.
    """

    def __init__(self, connected: socket.socket, peer: str, timeout: float) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer, self.timeout = peer, timeout
        self._socket = connected

    def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        head = json.dumps([kind, fields]).encode()
        self._send(struct.pack("<I", len(head)) + head + payload)

    def receive(self) -> Message:
        """The next message.

        Raises:
          ConnectorError: when the other side is gone or silent, or says that something
            failed there.
        """
        data = self._receive(_MOST)
        (size,) = struct.unpack_from("<I", data)
        kind, fields = json.loads(data[4 : 4 + size])
        if kind == "error":
            raise ConnectorError(f"{self.peer} says: {fields['why']}")
        return Message(kind, fields, data[4 + size :])

    def ask(self, kind: str, payload: bytes = b"", **fields: Any) -> Message:
        """Sends a request, and waits for its reply."""
        self.send(kind, payload, **fields)
        return self.receive()

    def waiting(self, seconds: float) -> bool:
        """Whether a message comes within so many seconds."""
        try:
            self._socket.settimeout(seconds)
            self._socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return False
        except OSError:
            pass
        return True  # if it is gone, `receive` says so

    def shut(self) -> None:
        """Ends it from any thread: who waits for a message is told that it is gone."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    # ---- who it is ----

    def prove_as_server(self, secret: bytes, enters: Callable[[], bool]) -> None:
        """Hears the other side's proof, and gives its own.

        enters: asked between the two; where it is False, somebody else has refused it.
        """
        mine = secrets.token_bytes(_NONCE)
        self._send(mine)
        reply = self._receive(_NONCE + 32)
        theirs, proof = reply[:_NONCE], reply[_NONCE:]
        self._compare(proof, _proof(secret, b"client", mine, theirs))
        if not enters():
            raise ConnectorError(f"{self.peer} was refused")
        self._send(_proof(secret, b"server", mine, theirs))

    def refuse(self, why: str) -> None:
        """In place of a nonce or a proof: why, in other than 32 bytes; and ends it.

        From any thread: who waits for a message of the other side is told.
        """
        with contextlib.suppress(OSError):
            said = why.encode()[:_WORDS]
            self._socket.sendall(_SIZE.pack(len(said)) + said)
        self.shut()

    def prove_as_client(self, secret: bytes) -> None:
        """Proves who it is, and hears the other side's proof.

        Raises:
          ComeAgainError: when there is no room for a moment.
        """
        mine, theirs = secrets.token_bytes(_NONCE), self._welcome()
        self._send(mine + _proof(secret, b"client", theirs, mine))
        proof = self._welcome()
        self._compare(proof, _proof(secret, b"server", theirs, mine))

    def _welcome(self) -> bytes:
        """32 bytes, if they are no refusal."""
        said = self._receive(_WORDS)
        if len(said) == _NONCE:
            return said
        self.close()
        words = said.decode(errors="replace")
        kind = ComeAgainError if words.endswith(COME_AGAIN) else ConnectorError
        raise kind(f"{self.peer} refuses: {words!a}")

    def _compare(self, proof: bytes, wanted: bytes) -> None:
        if not hmac.compare_digest(proof, wanted):
            self.close()
            raise ConnectorError(f"{self.peer} has another secret")

    # ---- bytes ----

    def _send(self, data: bytes) -> None:
        try:
            self._socket.settimeout(self.timeout)  # for all of it
            self._socket.sendall(_SIZE.pack(len(data)) + data)
        except OSError as error:
            raise self._gone(error) from error

    def _receive(self, most: int) -> bytes:
        until = time.monotonic() + self.timeout
        try:
            (size,) = _SIZE.unpack(self._exactly(_SIZE.size, until))
            if size > most:
                raise OSError(f"a message of {size} bytes, not at most {most}")
            return self._exactly(size, until)
        except OSError as error:
            raise self._gone(error) from error

    def _exactly(self, size: int, until: float) -> bytes:
        """Bytes as they come, before a time by the monotonic clock."""
        came = bytearray()
        while len(came) < size:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            self._socket.settimeout(left)
            more = self._socket.recv(min(size - len(came), 1 << 20))
            if not more:
                raise ConnectionError("end of the connection")
            came += more
        return bytes(came)

    def _gone(self, error: BaseException) -> ConnectorError:
        with contextlib.suppress(OSError):
            self.close()
        silent = isinstance(error, TimeoutError)
        why = f"silent for {self.timeout} s" if silent else "gone"
        return ConnectorError(f"{self.peer} is {why} ({type(error).__name__}: {error})")


def connect(
    where: str,
    address: str,
    secret: bytes,
    timeout: float,
    made: list[Channel],
    ended: threading.Event,
) -> Channel:
    """A connection to a server, once both have proved that they have the secret.

    Where there is no room for a moment it comes again, for `timeout` seconds, at times
    that chance chooses: others do so, too.

    Args:
      made: takes connections before they are waited for, so that others can shut them.
      ended: nobody wants it any more.

    Raises:
      ConnectorError: when nobody is there, or it is of another kind.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # of IPv6
    until, nap = time.monotonic() + timeout, _FIRST_NAP
    while True:
        try:
            connected = socket.create_connection((host, int(port)), timeout)
        except (OSError, ValueError) as error:
            raise ConnectorError(
                f"{where}: nobody serves at {address} ({error})"
            ) from error
        channel = Channel(connected, f"{where}: {address}", timeout)
        made.append(channel)
        if ended.is_set():
            raise ConnectorError(f"{where}: closed while it connected to {address}")
        try:
            channel.prove_as_client(secret)
        except ComeAgainError:
            made.remove(channel)
            seconds = nap * random.uniform(0.5, 1.5)
            if time.monotonic() + seconds > until or ended.wait(seconds):
                raise
            nap = min(2 * nap, _LAST_NAP)
        else:
            return channel


def _proof(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, role + first + second, "sha256")


def check_secret(where: str, secret: bytes) -> bytes:
    if not isinstance(secret, bytes) or len(secret) < 16:
        raise ValueError(
            f"{where}: secret must be at least 16 bytes that all jobs share, such as "
            "secrets.token_bytes(32): who has it reads everybody's keys and values"
        )
    return secret
