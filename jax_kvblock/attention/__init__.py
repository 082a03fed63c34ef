"""Softmax attention in tiles: one contract, forward and backward.

It imports `core` alone.
"""

from jax_kvblock.attention.bhnd import (
    FlashAttention,
    flash_attention_backward,
    flash_attention_forward,
    lm_to_lse,
    lse_to_lm,
)
from jax_kvblock.attention.config import AttentionTiles
from jax_kvblock.attention.dot_product import dot_product_attention
from jax_kvblock.attention.eight_bits import AttentionScales
from jax_kvblock.attention.flash import RESIDUAL_NAMES, flash_attention
from jax_kvblock.attention.memory_estimate import estimate_memory_usage
from jax_kvblock.attention.merge import merge_attention
from jax_kvblock.attention.nnx import attention_fn
from jax_kvblock.attention.tile_sizes import available_tiles, get_optimal_block_sizes

__all__ = [
    "RESIDUAL_NAMES",
    "AttentionScales",
    "AttentionTiles",
    "FlashAttention",
    "attention_fn",
    "available_tiles",
    "dot_product_attention",
    "estimate_memory_usage",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_forward",
    "get_optimal_block_sizes",
    "lm_to_lse",
    "lse_to_lm",
    "merge_attention",
]
