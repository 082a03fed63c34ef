"""Blocks between jobs: from one to the other, or by a folder they share (`disk`)."""

from jax_kvblock.cache.connectors.jax_wire import JaxWire
from jax_kvblock.cache.connectors.nixl_wire import NixlWire
from jax_kvblock.cache.connectors.peer import PeerConnector
from jax_kvblock.cache.connectors.server import BlockServer
from jax_kvblock.cache.connectors.tier_store import TierStore

__all__ = [
    "BlockServer",
    "JaxWire",
    "NixlWire",
    "PeerConnector",
    "TierStore",
]
