"""The checks of `AttentionTiles`: lists of tiles, and the bits of partial ones."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jax_kvblock.attention.config import AttentionConfig, AttentionTiles
from jax_kvblock.attention.integers import known_on_host, saturated
from jax_kvblock.attention.mask_tiles import FULL, check_tile_side, words_of
from jax_kvblock.core import debug
from jax_kvblock.core.checks import check_array, check_int32, show, to_jax


def check_tile_sides(where: str, tiles: Any) -> tuple[int, int]:
    """(block_q, block_kv) of tile lists; zeros without lists."""
    if tiles is None:
        return 0, 0
    if not isinstance(tiles, AttentionTiles):
        raise TypeError(
            f"{where}: tiles must be an AttentionTiles, got {type(tiles).__name__}; "
            "pass AttentionTiles(indices, counts)"
        )
    block_q, block_kv = (
        check_tile_side(where, f"tiles.{name}", getattr(tiles, name))
        for name in ("block_q", "block_kv")
    )
    return block_q, block_kv


def check_tiles(
    where: str, tiles: Any, config: AttentionConfig, sizes: tuple[int, int, int, int]
) -> tuple[Any, Any, Any, Any]:
    """The lists, and the bits of partial tiles."""
    if tiles is None:
        return None, None, None, None
    batch, n, t, s = sizes
    form = "[B|1, N|1, query tiles, entries]"
    indices = check_int32(where, "tiles.indices", tiles.indices, form, 4)
    rows_form = "[B|1, N|1, query tiles]"
    counts = check_int32(where, "tiles.counts", saturated(tiles.counts), rows_form, 3)
    rows = -(-t // config.block_q)
    fits = (
        indices.shape[0] in (1, batch)
        and indices.shape[1] in (1, n)
        and indices.shape[2] == rows
    )
    if not fits:
        raise ValueError(
            f"{where}: tiles.indices must be "
            f"int32[{batch}|1, {n}|1, {rows}, max_tiles] for T = {t} and "
            f"block_q = {config.block_q}, got {show(indices)}; one row for each query "
            "tile"
        )
    if counts.shape != indices.shape[:3]:
        raise ValueError(
            f"{where}: tiles.counts must be int32{list(indices.shape[:3])} like "
            f"tiles.indices without its last dim, got {show(counts)}"
        )
    partial, masks = _partial_tiles(where, tiles, config, indices)
    num_kv = -(-s // config.block_kv)
    check_entries(where, tiles, num_kv)
    count = 0 if masks is None else masks.shape[0]
    lists = {"indices": indices, "counts": counts, "partial": partial}
    debug.check(_look, where, num_kv, count, **lists)
    return indices, counts, partial, masks


def _partial_tiles(
    where: str, tiles: AttentionTiles, config: AttentionConfig, indices: jax.Array
) -> tuple[Any, Any]:
    """`partial` and `masks`, or neither."""
    pair = {"partial": tiles.partial, "masks": tiles.masks}
    absent = [name for name, x in pair.items() if x is None]
    if len(absent) == 2:
        return None, None
    if absent:
        (name,) = absent
        raise ValueError(
            f"{where}: tiles.partial and tiles.masks must come together, got no "
            f"{name}; AttentionTiles.from_mask makes both"
        )
    form = "[B|1, N|1, query tiles, entries]"
    partial = check_int32(where, "tiles.partial", tiles.partial, form, 4)
    if partial.shape != indices.shape:
        raise ValueError(
            f"{where}: tiles.partial must be int32{list(indices.shape)} like "
            f"tiles.indices, got {show(partial)}; a row of masks for each entry, or −1"
        )
    masks = check_array(where, "tiles.masks", tiles.masks)
    rows, words = config.block_q, words_of(config.block_kv)
    must = (
        f"{where}: tiles.masks must be uint32[P, {rows}, {words}] for tiles of {rows} "
        f"x {config.block_kv}, got {show(masks)}"
    )
    if masks.dtype != np.uint32:
        raise TypeError(f"{must}; a bit for each key, as from_mask packs them")
    if masks.ndim != 3 or masks.shape[1:] != (rows, words):
        raise ValueError(f"{must}; a row of bits for each query of a partial tile")
    return partial, to_jax(masks)


def check_entries(where: str, tiles: AttentionTiles, num_kv: int) -> None:
    """What the lists say, where their values are known."""
    indices = known_on_host(where, "tiles.indices", tiles.indices)
    counts = known_on_host(where, "tiles.counts", tiles.counts)
    if indices is None or counts is None:
        return
    partial, count = None, 0
    if tiles.partial is not None and tiles.masks is not None:
        partial = known_on_host(where, "tiles.partial", tiles.partial)
        count = tiles.masks.shape[0]
    _look(where, num_kv, count, indices=indices, counts=counts, partial=partial)


def _look(
    where: str,
    num_kv: int,
    count: int,
    *,
    indices: np.ndarray,
    counts: np.ndarray,
    partial: np.ndarray | None = None,
) -> None:
    entry = np.arange(indices.shape[-1])
    used = (entry < counts[..., None]) & (indices >= 0) & (indices < num_kv)
    _check_once(where, indices, used)
    if partial is not None:
        _check_rows_of_masks(where, partial, used, count)


def _check_once(where: str, indices: np.ndarray, used: np.ndarray) -> None:
    """No tile twice in a list."""
    # What does not count becomes a number that comes once.
    entry = np.arange(indices.shape[-1])
    listed = np.sort(np.where(used, indices, -1 - entry), axis=-1)
    twice = np.argwhere(listed[..., 1:] == listed[..., :-1])
    if len(twice):
        b, n, i, _ = at = tuple(map(int, twice[0]))
        raise ValueError(
            f"{where}: tiles.indices must list a tile once for a query tile, got tile "
            f"{listed[at]} twice in indices[{b}, {n}, {i}]; its keys would count "
            "twice: put -1 there, or leave it out"
        )


def _check_rows_of_masks(
    where: str, partial: np.ndarray, used: np.ndarray, count: int
) -> None:
    """A row of the masks for each entry that counts, or −1."""
    wrong = np.argwhere(used & ((partial < FULL) | (partial >= count)))
    if len(wrong):
        at = tuple(map(int, wrong[0]))
        raise ValueError(
            f"{where}: tiles.partial must be rows of tiles.masks, less than {count}, "
            f"or -1 for full tiles, got {partial[at]} in partial{list(at)}; leave a "
            "tile where nobody attends out of tiles.indices"
        )
