"""Softmax attention in tiles: one contract, forward and backward."""

from jax_kvblock.attention.config import AttentionTiles
from jax_kvblock.attention.flash import RESIDUAL_NAMES, flash_attention

__all__ = ["RESIDUAL_NAMES", "AttentionTiles", "flash_attention"]
