"""`JaxWire`: bytes by `jax.experimental.transfer`, from host memory to host memory."""

from __future__ import annotations

import contextlib
import secrets
import struct
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.transfer import start_transfer_server

from jax_kvblock.cache.connector import ConnectorError

_OFFER = struct.Struct("<QQQ")  # uuid, rows, bytes of a row


class JaxWire:
    """Bytes by JAX's transfer server, over TCP.

    Blocks go from host memory to host memory, by arrays of JAX's CPU client; no GPU
    takes part. Whoever reaches the server's port and guesses a number of 62 bits could
    fetch what is offered at that time: use a network that is the jobs' own.

    Args:
      host: the address of this machine that the other side reaches.

    Raises:
      ConnectorError: when JAX has no CPU client.

    Example:
      >>> connector = PeerConnector(["10.0.0.7:8500"], wire=JaxWire("10.0.0.8"), ...)
    """

    name = "jax.experimental.transfer"

    def __init__(self, host: str = "127.0.0.1") -> None:
        try:
            self._device = jax.local_devices(backend="cpu")[0]
        except RuntimeError as error:
            raise ConnectorError(
                "JaxWire: jax has no CPU client here; set JAX_PLATFORMS=cuda,cpu, or "
                "leave it unset"
            ) from error
        start: Any = start_transfer_server
        host = f"[{host}]" if ":" in host else host  # of IPv6
        self._server = start(self._device.client, f"{host}:0", [f"{host}:0"])

    def side(self, nbytes: int) -> _JaxSide:
        return _JaxSide(self._server, self._device)


class _JaxSide:
    def __init__(self, server: Any, device: jax.Device) -> None:
        self._server, self._device = server, device
        self._sharding = jax.sharding.SingleDeviceSharding(device)
        self._connection: Any = None
        self._offered: bytes | None = None
        self.hello = server.address().encode()

    def meet(self, hello: bytes) -> None:
        self._connection = self._server.connect(hello.decode())

    def offer(self, rows: np.ndarray) -> bytes:
        uuid = secrets.randbits(62)
        self._server.await_pull(uuid, [jax.device_put(rows, self._device)])
        self._offered = _OFFER.pack(uuid, *rows.shape)
        return self._offered

    def taken(self) -> None:
        self._offered = None

    def withdraw(self) -> None:
        # An offer cannot be taken back: we fetch it ourselves, or it would stay.
        if self._offered is not None:
            offered, self._offered = self._offered, None
            with contextlib.suppress(ConnectorError):
                _pulled(self._server.connect(self.hello.decode()), offered, self, 10.0)

    def fetch(
        self, description: bytes, rows: Sequence[np.ndarray], timeout: float
    ) -> None:
        pulled = _pulled(self._connection, description, self, timeout)
        for row, came in zip(rows, pulled, strict=True):
            np.copyto(row, came)

    def close(self) -> None:
        self.withdraw()
        self._connection = None


def _pulled(
    connection: Any, description: bytes, side: _JaxSide, timeout: float
) -> np.ndarray:
    uuid, *shape = _OFFER.unpack(description)
    wanted = jax.ShapeDtypeStruct(tuple(shape), np.uint8, sharding=side._sharding)
    until, nap = time.monotonic() + timeout, 5e-5
    try:
        (array,) = connection.pull(uuid, [wanted])
        # It would wait for ever for a side that is there and silent.
        while not array.is_ready():
            if time.monotonic() > until:
                raise ConnectorError(f"JaxWire: nothing came within {timeout} s")
            time.sleep(nap)
            nap = min(2 * nap, 1e-3)
        return np.asarray(array)
    except jax.errors.JaxRuntimeError as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise ConnectorError(f"JaxWire: a transfer failed: {first_line}") from error
