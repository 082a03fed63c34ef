"""KV-cache blocks for JAX: layouts, pools, copies at the speed of memory, attention."""

# Before all that uses the native module: says what to do where it is missing.
from jax_kvblock.core import debug_checks

# isort: split
from jax_kvblock import cache as cache
from jax_kvblock import dropins as dropins
from jax_kvblock import fp8 as fp8
from jax_kvblock import fusion as fusion
from jax_kvblock import graphs as graphs
from jax_kvblock import hardware as hardware
from jax_kvblock import kernels as kernels
from jax_kvblock import layers as layers
from jax_kvblock import parallel as parallel
from jax_kvblock import precision as precision
from jax_kvblock import sparse as sparse
from jax_kvblock import training as training
from jax_kvblock.append import KVScales, append_kv, rope_append
from jax_kvblock.attention import (
    AttentionScales,
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
    merge_attention,
)
from jax_kvblock.blocks import (
    BlockSpec,
    KVPool,
    Layout,
    block_to_operational,
    block_to_universal,
    convert_blocks,
    copy_blocks,
    gather_blocks,
    gather_kv,
    operational_to_block,
    scatter_blocks,
    transfer_blocks,
    universal_to_block,
)
from jax_kvblock.cache import BlockTable, PrefixCache
from jax_kvblock.objects import (
    Block,
    BlockList,
    BlockManager,
    Layer,
    Piece,
    PoolDoubledWarning,
    PoolExhaustedError,
    PoolLostError,
)
from jax_kvblock.paged import paged_attention

__version__ = "0.1.0"

__all__ = [
    "AttentionScales",
    "AttentionTiles",
    "Block",
    "BlockList",
    "BlockManager",
    "BlockSpec",
    "BlockTable",
    "FlashAttention",
    "KVPool",
    "KVScales",
    "Layer",
    "Layout",
    "Piece",
    "PoolDoubledWarning",
    "PoolExhaustedError",
    "PoolLostError",
    "PrefixCache",
    "append_kv",
    "attention_fn",
    "available_tiles",
    "block_to_operational",
    "block_to_universal",
    "convert_blocks",
    "copy_blocks",
    "debug_checks",
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
    "merge_attention",
    "operational_to_block",
    "paged_attention",
    "rope_append",
    "scatter_blocks",
    "transfer_blocks",
    "universal_to_block",
]
