"""A stand-in for the module `nixl._api`: agents of one process, by memmove.

It has the calls that `NixlWire` makes, with the names, orders and answers of NIXL
1.5.1, and refuses what NIXL refuses: memory that nobody registered, peers that are not
known, handles that were released. Bytes come with the last look at a transfer, not
before.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json

Place = tuple[int, int]  # address, bytes


@dataclasses.dataclass
class Descriptors:
    """What `get_xfer_descs` and `register_memory` give."""

    places: list[Place]


class Handle:
    """One transfer, from `initialize_xfer` until it is released."""

    def __init__(self, here: Place, there: Place, peer: str) -> None:
        self.here, self.there, self.peer = here, there, peer
        self.looks = 0


class Nixl:
    """A module with agents that know each other; `broken` says what goes wrong.

    Attributes:
      broken: "start", "initialize" and "look" raise; "post" and "state" end transfers
        as ERR; "stuck" does not end them.
      looks: how often a transfer is looked at until it is done; 0: done at once.
      transfers: bytes of each that was done.
    """

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.looks, self.transfers = 2, list[int]()
        self.agents: dict[str, Agent] = {}

    def nixl_agent_config(self, *, backends: list[str]) -> list[str]:
        return backends

    def nixl_agent(self, name: str, backends: list[str]) -> Agent:
        if "start" in self.broken:
            raise RuntimeError("NIXL_ERR_BACKEND")
        assert name not in self.agents
        self.agents[name] = Agent(self, name, backends)
        return self.agents[name]

    def left(self) -> list[str]:
        """What agents have that they should have let go of."""
        found = []
        for agent in self.agents.values():
            kinds = vars(agent)
            for kind in ("registered", "peers", "handles"):
                found += [f"{agent.name}: {kind}"] * len(kinds[kind])
        return found


class Agent:
    def __init__(self, module: Nixl, name: str, backends: list[str]) -> None:
        self._module, self.name = module, name
        # NIXL warns of a backend that it does not have, and goes on without.
        self.backends = [name for name in backends if name in self.get_plugin_list()]
        self.registered: list[Place] = []
        self.peers: dict[str, list[Place]] = {}
        self.handles: set[Handle] = set()

    def get_plugin_list(self) -> list[str]:
        return ["POSIX", "UCX"]

    # ---- memory ----

    def register_memory(self, places: list[tuple], mem_type: str) -> Descriptors:
        if not self.backends or mem_type != "DRAM":
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        ((address, nbytes, device, text),) = places
        assert (device, text) == (0, "")
        self.registered.append((address, nbytes))
        return Descriptors([(address, nbytes)])

    def deregister_memory(self, descriptors: Descriptors) -> None:
        for place in descriptors.places:
            self.registered.remove(place)

    def get_xfer_descs(self, places: list[tuple], mem_type: str) -> Descriptors:
        assert mem_type == "DRAM"
        ((address, nbytes, device),) = places
        assert device == 0
        return Descriptors([(address, nbytes)])

    # ---- peers ----

    def get_agent_metadata(self) -> bytes:
        """The name, and what is registered by now."""
        return json.dumps([self.name, self.registered]).encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name, places = json.loads(metadata)
        self.peers[name] = [tuple(place) for place in places]
        return name.encode()  # text, in other versions

    def remove_remote_agent(self, agent: str) -> None:
        del self.peers[agent]

    # ---- transfers ----

    def initialize_xfer(
        self, operation: str, here: Descriptors, there: Descriptors, agent: str
    ) -> Handle:
        (mine,), (theirs,) = here.places, there.places
        known = _within(mine, self.registered) and _within(theirs, self.peers[agent])
        if "initialize" in self._module.broken or not known:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        assert operation == "READ" and mine[1] == theirs[1]
        handle = Handle(mine, theirs, agent)
        self.handles.add(handle)
        return handle

    def transfer(self, handle: Handle) -> str:
        assert handle in self.handles
        return "ERR" if "post" in self._module.broken else self._state(handle)

    def check_xfer_state(self, handle: Handle) -> str:
        assert handle in self.handles
        if "look" in self._module.broken:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        handle.looks += 1
        return "ERR" if "state" in self._module.broken else self._state(handle)

    def release_xfer_handle(self, handle: Handle) -> None:
        self.handles.remove(handle)

    def _state(self, handle: Handle) -> str:
        if handle.looks < self._module.looks or "stuck" in self._module.broken:
            assert handle.looks < 5000  # who waits for longer has no end
            return "PROC"
        (here, nbytes), (there, _) = handle.here, handle.there
        other = self._module.agents[handle.peer]
        assert _within(handle.there, other.registered)
        ctypes.memmove(here, there, nbytes)
        self._module.transfers.append(nbytes)
        return "DONE"


def _within(place: Place, of: list[Place]) -> bool:
    first, end = place[0], place[0] + place[1]
    return any(address <= first and end <= address + n for address, n in of)
