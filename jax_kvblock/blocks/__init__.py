"""KV-cache blocks as values: layouts, pools, and copies between them.

It imports `core` alone. Everything here is a function of arrays; who holds which block
is the business of `objects`.
"""

from jax_kvblock.blocks.convert import (
    block_to_operational,
    block_to_universal,
    convert_blocks,
    operational_to_block,
    universal_to_block,
)
from jax_kvblock.blocks.layout import BlockSpec, Layout
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.blocks.transfer import (
    copy_blocks,
    gather_blocks,
    gather_kv,
    scatter_blocks,
    transfer_blocks,
)

__all__ = [
    "BlockSpec",
    "KVPool",
    "Layout",
    "block_to_operational",
    "block_to_universal",
    "convert_blocks",
    "copy_blocks",
    "gather_blocks",
    "gather_kv",
    "operational_to_block",
    "scatter_blocks",
    "transfer_blocks",
    "universal_to_block",
]
