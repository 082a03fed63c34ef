"""Attention and blocks over several devices: sequences, heads and caches that are cut.

The engines are JAX's own: `shard_map`, XLA's collectives, `jax.distributed`.
"""

from jax_kvblock.parallel.context import context_parallel_attention
from jax_kvblock.parallel.decode import (
    interleaved_lens,
    interleaved_paged_attention,
    interleaved_slots,
    interleaved_tables,
)
from jax_kvblock.parallel.documents import (
    device_work,
    document_order,
    reorder_documents,
)
from jax_kvblock.parallel.kv_heads import (
    kv_heads_partition,
    own_kv_heads,
    repeat_kv_heads,
    repeat_spec,
)
from jax_kvblock.parallel.layer_config import AttentionConfig, AttentionPatterns
from jax_kvblock.parallel.layers import (
    Attention,
    ContextParallelAttention,
    RingAttentionLayer,
    create_attention,
    create_context_parallel_attention,
    create_ring_attention,
)
from jax_kvblock.parallel.options import compiler_options
from jax_kvblock.parallel.reshard import reshard_blocks
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
    "compiler_options",
    "context_parallel_attention",
    "create_attention",
    "create_context_parallel_attention",
    "create_ring_attention",
    "device_work",
    "document_order",
    "from_zigzag",
    "interleaved_lens",
    "interleaved_paged_attention",
    "interleaved_slots",
    "interleaved_tables",
    "kv_heads_partition",
    "own_kv_heads",
    "pad_documents",
    "pad_sequence",
    "reorder_documents",
    "repeat_kv_heads",
    "repeat_spec",
    "reshard_blocks",
    "shard_positions",
    "to_zigzag",
]
