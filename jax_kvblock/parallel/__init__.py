"""Attention and blocks over several devices: sequences, heads and caches that are cut.

The engines are JAX's own: `shard_map`, XLA's collectives, `jax.distributed`.
"""

from jax_kvblock.parallel.context import context_parallel_attention
from jax_kvblock.parallel.layers import (
    Attention,
    AttentionConfig,
    AttentionPatterns,
    ContextParallelAttention,
    RingAttentionLayer,
    create_attention,
    create_context_parallel_attention,
    create_ring_attention,
)
from jax_kvblock.parallel.sequence import (
    from_zigzag,
    pad_documents,
    pad_sequence,
    shard_positions,
    to_zigzag,
)

__all__ = [
    "Attention",
    "AttentionConfig",
    "AttentionPatterns",
    "ContextParallelAttention",
    "RingAttentionLayer",
    "context_parallel_attention",
    "create_attention",
    "create_context_parallel_attention",
    "create_ring_attention",
    "from_zigzag",
    "pad_documents",
    "pad_sequence",
    "shard_positions",
    "to_zigzag",
]
