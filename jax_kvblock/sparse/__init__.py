"""Attention that skips: selectors of tiles, how good they are, layers that use them.

It imports `core`, `attention`, `blocks` and `paged`.
"""

from jax_kvblock.sparse.antidiagonal import AntidiagonalThreshold
from jax_kvblock.sparse.attention import sparse_attention
from jax_kvblock.sparse.distill import gate_loss, tile_mass, train_gate
from jax_kvblock.sparse.evaluate import Quality, Seconds, evaluate_selector
from jax_kvblock.sparse.gate import Gate, LearnedGate, init_gate
from jax_kvblock.sparse.layer import (
    DynamicSparseAttention,
    SparsePattern,
    create_sparse_attention,
)
from jax_kvblock.sparse.oracle import Oracle
from jax_kvblock.sparse.pages import (
    PageChoice,
    PageSummary,
    refresh_summary,
    select_pages,
    summarize_pages,
)
from jax_kvblock.sparse.patterns import (
    BlockSparse,
    LocalGlobal,
    Random,
    Streaming,
    Strided,
)
from jax_kvblock.sparse.pooled import PooledThreshold
from jax_kvblock.sparse.scored import ScoredSelector, select_tiles
from jax_kvblock.sparse.select import Report, Selection
from jax_kvblock.sparse.selector import Selector, Union

__all__ = [
    "AntidiagonalThreshold",
    "BlockSparse",
    "DynamicSparseAttention",
    "Gate",
    "LearnedGate",
    "LocalGlobal",
    "Oracle",
    "PageChoice",
    "PageSummary",
    "PooledThreshold",
    "Quality",
    "Random",
    "Report",
    "ScoredSelector",
    "Seconds",
    "Selection",
    "Selector",
    "SparsePattern",
    "Streaming",
    "Strided",
    "Union",
    "create_sparse_attention",
    "evaluate_selector",
    "gate_loss",
    "init_gate",
    "refresh_summary",
    "select_pages",
    "select_tiles",
    "sparse_attention",
    "summarize_pages",
    "tile_mass",
    "train_gate",
]
