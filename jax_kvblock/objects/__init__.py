"""KV-cache blocks as objects: who holds which block of a pool, handles to them, and
what goes out by DLPack.

It imports `blocks` and `core`.
"""

from jax_kvblock.objects.block import Block, BlockList, Layer, Piece
from jax_kvblock.objects.manager import BlockManager, PoolExhaustedError
from jax_kvblock.objects.memory import PoolDoubledWarning, PoolLostError

__all__ = [
    "Block",
    "BlockList",
    "BlockManager",
    "Layer",
    "Piece",
    "PoolDoubledWarning",
    "PoolExhaustedError",
    "PoolLostError",
]
