"""Caches that hold K and V by turns along the heads, in tiles of 32 bits.

    [P, page, ceil(2K / pack), pack, D padded]    pack heads of 16 bits or less in a row

Nobody here needs the tiles, but they stay: a cache of another shape would not be
updated in place.
"""

from __future__ import annotations

from typing import Any

import jax

from jax_kvblock.core.checks import check_array, show, to_jax
from jax_kvblock.paged.arguments import STORED
from jax_kvblock.paged.pages import PageLayout


def check_cache(where: str, name: str, cache: Any, ranks: tuple[int, ...]) -> jax.Array:
    """The cache, of a rank and dtype that are served."""
    cache = check_array(where, name, cache)
    forms = {4: "[P, page, 2 K, D]", 5: "[P, page, 2 K / pack, pack, D]"}
    if cache.ndim not in ranks or 0 in cache.shape:
        raise ValueError(
            f"{where}: {name} must be {' or '.join(forms[rank] for rank in ranks)}, "
            f"got {show(cache)}"
        )
    if cache.dtype not in STORED:
        raise TypeError(
            f"{where}: {name} must hold floats of 8 bits or more, or int8, got "
            f"{show(cache)}; nothing here serves others"
        )
    return to_jax(cache)


def by_turns(
    where: str, name: str, cache: jax.Array, heads: int, dim: int
) -> PageLayout:
    """The layout of heads K0, V0, K1, V1, …"""
    rows = cache.size // (cache.shape[0] * cache.shape[1] * cache.shape[-1])
    if rows % 2 or rows < 2 * heads or cache.shape[-1] < dim:
        raise ValueError(
            f"{where}: {name} must have room for {2 * heads} heads, K and V by turns, "
            f"of head dim {dim}, got {show(cache)}"
        )
    return PageLayout("P T (H O) D", heads=heads, head_dim=dim, tiled=cache.ndim == 5)


def in_rows(
    where: str, name: str, cache: jax.Array, heads: int, dim: int
) -> PageLayout:
    """The layout of a head's key, then its value in one row of twice the head dim."""
    rows = cache.size // (cache.shape[0] * cache.shape[1] * cache.shape[-1])
    if rows < heads or cache.shape[-1] != 2 * dim:
        raise ValueError(
            f"{where}: {name} must have room for {heads} heads, whose rows are a key "
            f"and a value of head dim {dim}, got {show(cache)}"
        )
    return PageLayout("P T H (O D)", heads=heads, tiled=True)
