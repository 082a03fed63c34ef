"""Attention over the blocks of a cache, read through block tables.

It imports `attention`, `blocks` and `core`.
"""

from jax_kvblock.paged.attention import paged_attention

__all__ = ["paged_attention"]
