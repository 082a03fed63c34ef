"""A process that serves blocks, for tests of two: says its address, and waits."""

from __future__ import annotations

import sys

from tier_parts import MemoryPart, keys, namespace

from jax_kvblock.cache.connectors import BlockServer, JaxWire, NixlWire

SECRET = b"between two of us"


def main(wire: str, first: int, end: int, staging: int) -> None:
    heads = range(first, end)
    store = MemoryPart(heads, keys(8))
    with BlockServer(
        store,
        namespace=namespace(len(heads)),
        heads=heads,
        wire=JaxWire() if wire == "jax" else NixlWire(),
        secret=SECRET,
        staging_bytes=staging,
        takes=True,
    ) as server:
        print("serves at", server.address, flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
