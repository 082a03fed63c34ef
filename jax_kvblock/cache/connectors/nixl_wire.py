"""`NixlWire`: bytes by NVIDIA's NIXL, from host memory to host memory."""

from __future__ import annotations

import contextlib
import importlib
import secrets
import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_kvblock.cache.connector import ConnectorError

MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
_OFFER = struct.Struct("<QQ")  # address, bytes


class NixlWire:
    """Bytes by NIXL's one-sided reads: over RDMA where UCX finds it, else TCP.

    Blocks go from host memory to host memory, through memory that is registered once
    for each connection.

    Args:
      backend: of NIXL.

    Raises:
      ImportError: when NIXL is not installed.
      ConnectorError: when its backend does not start.

    Example:
      >>> connector = PeerConnector(["10.0.0.7:8500"], wire=NixlWire(), ...)
    """

    name = "nixl"

    def __init__(self, backend: str = "UCX") -> None:
        self._api, self._backend = _api(), backend
        _agent(self._api, backend)  # or it would fail at the first connection

    def side(self, nbytes: int) -> _NixlSide:
        return _NixlSide(_agent(self._api, self._backend), nbytes)


def _api() -> Any:
    for name in MODULES:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise ImportError(
        "NixlWire: NIXL is not installed; `pip install --no-deps nixl-cu13` (or "
        "nixl-cu12), or use JaxWire"
    )


def _agent(api: Any, backend: str) -> Any:
    try:
        config = api.nixl_agent_config(backends=[backend])
        agent = api.nixl_agent(f"kvblock-{secrets.token_hex(8)}", config)
        there = agent.get_plugin_list()
    except Exception as error:
        raise ConnectorError(f"NixlWire: {backend} does not start: {error}") from error
    if backend not in there:  # of which NIXL only warns
        raise ConnectorError(
            f"NixlWire: {backend} does not start: it is not among NIXL's plugins, "
            f"{', '.join(there)}"
        )
    return agent


class _NixlSide:
    """An agent with memory that is registered, for what it offers and what it fetches.

    Only one of the two happens at a time.
    """

    def __init__(self, agent: Any, nbytes: int) -> None:
        self._agent, self._peer = agent, ""
        self._memory = np.zeros(nbytes, np.uint8)
        self._first = self._memory.ctypes.data
        place = [(self._first, nbytes, 0, "")]
        self._registered = agent.register_memory(place, "DRAM")
        self.hello: bytes = agent.get_agent_metadata()

    def meet(self, hello: bytes) -> None:
        name = self._agent.add_remote_agent(hello)
        self._peer = name.decode() if isinstance(name, bytes) else name

    def offer(self, rows: np.ndarray) -> bytes:
        self._memory[: rows.nbytes] = rows.reshape(-1)
        return _OFFER.pack(self._first, rows.nbytes)

    def taken(self) -> None:
        pass

    def withdraw(self) -> None:
        pass

    def fetch(
        self, description: bytes, rows: Sequence[np.ndarray], timeout: float
    ) -> None:
        address, nbytes = _OFFER.unpack(description)
        if nbytes != sum(row.nbytes for row in rows) or nbytes > len(self._memory):
            raise ConnectorError(f"NixlWire: {nbytes} bytes are offered, of others")
        self._read(address, nbytes, timeout)
        first = 0
        for row in rows:
            np.copyto(row, self._memory[first : first + len(row)])
            first += len(row)

    def _read(self, address: int, nbytes: int, timeout: float) -> None:
        agent, until, nap = self._agent, time.monotonic() + timeout, 5e-5
        here = agent.get_xfer_descs([(self._first, nbytes, 0)], "DRAM")
        there = agent.get_xfer_descs([(address, nbytes, 0)], "DRAM")
        try:
            handle = agent.initialize_xfer("READ", here, there, self._peer)
            try:
                state = agent.transfer(handle)
                while state == "PROC":
                    if time.monotonic() > until:
                        raise ConnectorError(
                            f"NixlWire: nothing came within {timeout} s"
                        )
                    time.sleep(nap)
                    nap = min(2 * nap, 1e-3)
                    state = agent.check_xfer_state(handle)
            finally:
                agent.release_xfer_handle(handle)
        except ConnectorError:
            raise
        except Exception as error:
            raise ConnectorError(f"NixlWire: a transfer failed: {error}") from error
        if state != "DONE":
            raise ConnectorError(f"NixlWire: a transfer ended as {state}")

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the other side may be gone
            if self._peer:
                self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._registered)
