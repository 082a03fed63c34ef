"""Softmax attention in tiles: one contract, forward and backward."""

from jax_kvblock.attention.config import AttentionTiles
from jax_kvblock.attention.dot_product import dot_product_attention
from jax_kvblock.attention.flash import RESIDUAL_NAMES, flash_attention
from jax_kvblock.attention.nnx import attention_fn

__all__ = [
    "RESIDUAL_NAMES",
    "AttentionTiles",
    "attention_fn",
    "dot_product_attention",
    "flash_attention",
]
