"""What `debug_checks` looks at in a call of `paged_attention`."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.core import debug
from jax_kvblock.paged.call import Paged, PagedConfig, page_shapes


def check_data(where: str, config: PagedConfig, x: Paged) -> None:
    """Looks at the integers of a call, where checks are on."""
    if not debug.enabled():
        return
    (blocks, size, *_), _ = page_shapes(x.pages)
    layers = x.pages.spec.num_layers if isinstance(x.pages, KVPool) else 1
    debug.check(
        _look,
        where,
        (blocks, size, layers, x.q.shape[1]),
        (x.q.shape[2], config.query_heads),
        tables=x.tables,
        kv_lens=x.kv_lens,
        query_start=x.query_start,
        q_lens=x.q_lens,
        layer=x.layer,
        q_first=x.q_first,
    )


def _look(
    where: str,
    sizes: tuple[int, int, int, int],
    heads: tuple[int, int | None],
    *,
    tables: Any,
    kv_lens: Any,
    query_start: Any = None,
    q_lens: Any = None,
    layer: Any = None,
    q_first: Any = None,
) -> None:
    blocks, size, layers, rows = sizes
    width = tables.shape[1]
    debug.check_range(
        where, "kv_lens", kv_lens, 0, width * size, "what block_tables has room for"
    )
    # Ids behind a sequence's end are read by nobody.
    used = np.arange(width) * size < kv_lens[:, None]
    read = np.where(used, tables, -1)
    debug.check_ids(where, "block_tables", read, blocks, "the pool's blocks")
    if query_start is not None:
        _look_at_starts(where, query_start[0], rows)
    if q_lens is not None:
        debug.check_range(where, "q_lens", q_lens, 0, rows, "the queries of a sequence")
    if layer is not None:
        debug.check_range(where, "layer", layer[0], 0, layers - 1, "the pool's layers")
    if q_first is not None:
        own, total = heads
        at = int(q_first[0])
        if at % own or not 0 <= at < (total or own):
            raise IndexError(
                f"{where}: q_heads[0] is {at}, and must be a multiple of {own} below "
                f"{total}"
            )


def _look_at_starts(where: str, starts: Any, rows: int) -> None:
    debug.check_range(where, "query_start", starts, 0, rows, "q's tokens and their end")
    at = debug.first_bad(starts[1:] < starts[:-1])
    if at is not None:
        b = at[0]
        raise ValueError(
            f"{where}: query_start[{b + 1}] is {int(starts[b + 1])}, less than "
            f"query_start[{b}], which is {int(starts[b])}; then no sequence has queries"
        )
