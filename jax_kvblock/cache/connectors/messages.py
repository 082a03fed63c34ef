"""Requests and replies between jobs: small messages, on a connection that both prove.

Blocks do not go this way; wires move them.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from jax_kvblock.cache.connector import ConnectorError

FORMAT = 1  # of messages
KEY_BYTES = 32
_NONCE = 32
_MOST = 64 << 20  # bytes of a message: keys, or a description of memory


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

    A connection that breaks or falls silent is a `ConnectorError`, and closed.

    Args:
      connected: a socket.
      peer: the other side's name, for errors.
      timeout: seconds that it may be silent in the middle of an exchange.
    """

    def __init__(self, connected: socket.socket, peer: str, timeout: float) -> None:
        limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
        connected.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connected.setsockopt(socket.SOL_SOCKET, option, limit)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer, self.timeout = peer, timeout
        self._connection = Connection(connected.detach())

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
            return self._connection.poll(seconds)
        except OSError:
            return True  # `receive` says what it is

    def close(self) -> None:
        self._connection.close()

    # ---- who it is ----

    def prove_as_server(self, secret: bytes) -> None:
        mine = secrets.token_bytes(_NONCE)
        self._send(mine)
        reply = self._receive(_NONCE + 32)
        theirs, proof = reply[:_NONCE], reply[_NONCE:]
        self._compare(proof, _proof(secret, b"client", mine, theirs))
        self._send(_proof(secret, b"server", mine, theirs))

    def prove_as_client(self, secret: bytes) -> None:
        mine, theirs = secrets.token_bytes(_NONCE), self._receive(_NONCE)
        self._send(mine + _proof(secret, b"client", theirs, mine))
        proof = self._receive(32)
        self._compare(proof, _proof(secret, b"server", theirs, mine))

    def _compare(self, proof: bytes, wanted: bytes) -> None:
        if not hmac.compare_digest(proof, wanted):
            self.close()
            raise ConnectorError(f"{self.peer} has another secret")

    # ---- bytes ----

    def _send(self, data: bytes) -> None:
        try:
            self._connection.send_bytes(data)
        except OSError as error:
            raise self._gone(error) from error

    def _receive(self, most: int) -> bytes:
        try:
            return self._connection.recv_bytes(most)
        except (OSError, EOFError) as error:
            raise self._gone(error) from error

    def _gone(self, error: BaseException) -> ConnectorError:
        with contextlib.suppress(OSError):
            self.close()
        silent = isinstance(error, BlockingIOError)
        why = f"silent for {self.timeout} s" if silent else "gone"
        return ConnectorError(f"{self.peer} is {why} ({type(error).__name__}: {error})")


def _proof(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, role + first + second, "sha256")


def check_secret(where: str, secret: bytes) -> bytes:
    if not isinstance(secret, bytes) or len(secret) < 16:
        raise ValueError(
            f"{where}: secret must be at least 16 bytes that all jobs share, such as "
            "secrets.token_bytes(32): who has it reads everybody's keys and values"
        )
    return secret
