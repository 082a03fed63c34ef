"""KV-cache blocks for JAX: layouts, pools, copies at the speed of memory, attention."""

from jax_kvblock.attention import (
    AttentionTiles,
    FlashAttention,
    attention_fn,
    available_tiles,
    dot_product_attention,
    estimate_memory_usage,
    flash_attention,
    flash_attention_backward,
    flash_attention_forward,
    get_optimal_block_sizes,
    lm_to_lse,
    lse_to_lm,
)
from jax_kvblock.block import Block, BlockList, Layer, Piece
from jax_kvblock.convert import (
    block_to_operational,
    block_to_universal,
    convert_blocks,
    operational_to_block,
    universal_to_block,
)
from jax_kvblock.layout import BlockSpec, Layout
from jax_kvblock.manager import (
    BlockManager,
    PoolDoubledWarning,
    PoolExhaustedError,
    PoolLostError,
)
from jax_kvblock.pool import KVPool
from jax_kvblock.transfer import (
    append_kv,
    copy_blocks,
    gather_blocks,
    gather_kv,
    scatter_blocks,
    transfer_blocks,
)

__version__ = "0.1.0"

__all__ = [
    "AttentionTiles",
    "Block",
    "BlockList",
    "BlockManager",
    "BlockSpec",
    "FlashAttention",
    "KVPool",
    "Layer",
    "Layout",
    "Piece",
    "PoolDoubledWarning",
    "PoolExhaustedError",
    "PoolLostError",
    "append_kv",
    "attention_fn",
    "available_tiles",
    "block_to_operational",
    "block_to_universal",
    "convert_blocks",
    "copy_blocks",
    "dot_product_attention",
    "estimate_memory_usage",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_forward",
    "gather_blocks",
    "gather_kv",
    "get_optimal_block_sizes",
    "lm_to_lse",
    "lse_to_lm",
    "operational_to_block",
    "scatter_blocks",
    "transfer_blocks",
    "universal_to_block",
]
