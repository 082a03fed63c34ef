"""Tiles of a mask, made on the host: what `AttentionTiles.from_mask` does.

A mask is read in pieces of a row of tiles, so that no `[T, S]` array is made of a
function. A piece is packed into bits at once, and the bits say which of its tiles
nobody attends in, which are full, and which are partial.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_kvblock.core.checks import (
    check_array,
    check_integer,
    show,
    shown,
)

# What the sides of tiles are multiples of: the rows of a tensor core's product.
TILE_UNIT = 16
WORD_BITS = 32
FULL = -1  # in place of a row of the masks: everything in the tile attends
# Elements of a mask that are evaluated at a time: intermediate results stay in cache.
PIECE = 1 << 20

# mask(b, h, q, kv) -> bool: the batch member and the query head as integers, positions
# of queries as int32 [rows, 1] and of keys as int32 [1, keys].
MaskFunction = Callable[[int, int, np.ndarray, np.ndarray], Any]


class TileArrays(NamedTuple):
    """The arrays of an `AttentionTiles`; no `partial` and `masks` if all are full."""

    indices: np.ndarray
    counts: np.ndarray
    partial: np.ndarray | None
    masks: np.ndarray | None


class _Mask(NamedTuple):
    """A mask that is read piece by piece."""

    sizes: tuple[int, int, int, int]  # B|1, N|1, T, S
    read: Callable[[int, int, slice, slice], np.ndarray]  # bool [rows, keys]


def words_of(block_kv: int) -> int:
    """Words of bits to a row of a tile."""
    return -(-block_kv // WORD_BITS)


def check_tile_side(where: str, name: str, value: Any) -> int:
    fix = f"tile sizes are compiled in, multiples of {TILE_UNIT}"
    side = check_integer(where, name, value, fix)
    if side < TILE_UNIT or side % TILE_UNIT:
        raise ValueError(
            f"{where}: {name} must be a multiple of {TILE_UNIT}, got {side}; pass 128 "
            "(the CUDA kernels serve multiples of 128 alone)"
        )
    return side


def tiles_of_mask(
    where: str,
    mask: Any,
    *,
    q_len: Any,
    kv_len: Any,
    batch: Any,
    heads: Any,
    block_q: Any,
    block_kv: Any,
    max_tiles: Any,
    max_masks: Any,
) -> TileArrays:
    """The lists and bits of a mask; see `AttentionTiles.from_mask`."""
    block_q = check_tile_side(where, "block_q", block_q)
    block_kv = check_tile_side(where, "block_kv", block_kv)
    given = {"batch": batch, "heads": heads, "q_len": q_len, "kv_len": kv_len}
    given = {n: _extent(where, n, x) for n, x in given.items() if x is not None}
    if callable(mask):
        source = _of_function(where, mask, given)
    else:
        source = _of_array(where, mask, given)
    b, n, t, _ = source.sizes

    # Of each row of tiles the tiles that it visits, and for each its row in the masks.
    stored: dict[bytes, int] = {}
    lists = []
    for member, head, q0 in itertools.product(range(b), range(n), range(0, t, block_q)):
        rows = slice(q0, min(q0 + block_q, t))
        lists.append(_visit(source, member, head, rows, block_q, block_kv, stored))
    lengths = [len(tiles) for tiles, _ in lists]
    visited = "tiles that a query tile visits"
    width = _room(where, "max_tiles", max_tiles, max(lengths, default=0), visited) or 1
    count = _room(where, "max_masks", max_masks, len(stored), "partial tiles")

    indices = np.full((len(lists), width), -1, np.int32)
    partial = np.full((len(lists), width), FULL, np.int32)
    for i, (tiles, kinds) in enumerate(lists):
        indices[i, : len(tiles)], partial[i, : len(tiles)] = tiles, kinds
    shape = (b, n, -(-t // block_q))
    full = TileArrays(
        indices.reshape(*shape, width),
        np.array(lengths, np.int32).reshape(shape),
        None,
        None,
    )
    if count == 0:
        return full
    masks = np.zeros((count, block_q, words_of(block_kv)), np.uint32)
    bits = np.frombuffer(b"".join(stored), np.uint32)
    masks[: len(stored)] = bits.reshape(len(stored), *masks.shape[1:])
    return full._replace(partial=partial.reshape(*shape, width), masks=masks)


def _extent(where: str, name: str, value: Any) -> int:
    extent = check_integer(where, name, value, "pass a Python integer")
    if extent < 0:
        raise ValueError(f"{where}: {name} must not be negative, got {extent}")
    return extent


def _room(where: str, name: str, given: Any, needed: int, what: str) -> int:
    """How many entries there are, `needed` of them in use."""
    room = needed if given is None else _extent(where, name, given)
    if room < needed:
        raise ValueError(
            f"{where}: {name} must be at least {needed}, the {what}, got {room}; pass "
            "more, or None for as many as there are"
        )
    return room


# ---- where a mask comes from ---------------------------------------------------------


def _of_function(where: str, mask: MaskFunction, given: dict[str, int]) -> _Mask:
    """A mask that is called with positions."""
    for name in ("q_len", "kv_len"):
        if name not in given:
            raise ValueError(
                f"{where}: {name} must be given with a function of positions, got "
                "None; pass the length of "
                + ("q, q.shape[1]" if name == "q_len" else "k and v, k.shape[1]")
            )
    if not _takes_four(mask):
        raise TypeError(
            f"{where}: mask must be a function mask(b, h, q, kv) of a batch member, a "
            f"head and positions, got {mask!r}; take all four, lambda b, h, q, kv: "
            "q >= kv"
        )

    def read(b: int, h: int, rows: slice, keys: slice) -> np.ndarray:
        q = np.arange(rows.start, rows.stop, dtype=np.int32)[:, None]
        kv = np.arange(keys.start, keys.stop, dtype=np.int32)[None, :]
        return _answer(where, mask(b, h, q, kv), (q.shape[0], kv.shape[1]))

    members, heads = given.get("batch", 1), given.get("heads", 1)
    return _Mask((members, heads, given["q_len"], given["kv_len"]), read)


def _takes_four(function: Any) -> bool:
    try:
        inspect.signature(function).bind(*range(4))
    except TypeError:
        return False
    except ValueError:  # a built-in function may not tell
        pass
    return True


def _answer(where: str, made: Any, shape: tuple[int, int]) -> np.ndarray:
    """What the function said of a piece, as bool `[rows, keys]`."""
    if isinstance(made, jax.core.Tracer):
        raise TypeError(
            f"{where}: mask must give values, got {shown(made)}; tiles are made on the "
            "host: make them outside of jit, and pass them as an argument"
        )
    answer = np.asarray(jax.device_get(made))
    if answer.dtype != np.bool_:
        raise TypeError(
            f"{where}: mask must give bools, got {show(answer)}; compare, or cast it "
            "with .astype(bool)"
        )
    try:
        return np.broadcast_to(answer, shape)
    except ValueError:
        raise ValueError(
            f"{where}: mask must give bool{list(shape)}, or what broadcasts to it, for "
            f"positions q [{shape[0]}, 1] and kv [1, {shape[1]}], got {show(answer)}; "
            "index with q and kv as they are"
        ) from None


def _of_array(where: str, mask: Any, given: dict[str, int]) -> _Mask:
    """A mask that is there, `[T, S]` or `[B|1, N|1, T, S]`."""
    form = "bool[T, S] or bool[B|1, N|1, T, S]"
    if isinstance(mask, jax.core.Tracer):
        raise TypeError(
            f"{where}: mask must have values, got {shown(mask)}; tiles are made on the "
            "host: make them outside of jit, and pass them as an argument"
        )
    mask = check_array(where, "mask", mask, in_place=True)
    if mask.dtype != np.bool_:
        raise TypeError(
            f"{where}: mask must be {form}, got {show(mask)}; cast it with "
            ".astype(bool): True attends"
        )
    if mask.ndim not in (2, 4):
        raise ValueError(
            f"{where}: mask must be {form}, got {show(mask)}; of what the heads share "
            "make [B, 1, T, S], of what the batch shares [1, N, T, S]"
        )
    values = np.asarray(jax.device_get(mask))
    values = values if values.ndim == 4 else values[None, None]
    sizes = dict(zip(("batch", "heads", "q_len", "kv_len"), values.shape, strict=True))
    for name, extent in given.items():
        if sizes[name] != extent:
            raise ValueError(
                f"{where}: mask must be {form} with {name} = {extent}, got "
                f"{show(mask)}; an array has sizes of its own: leave {name} out"
            )
    b, n, t, s = values.shape
    return _Mask((b, n, t, s), lambda b, h, rows, keys: values[b, h, rows, keys])


# ---- tiles ---------------------------------------------------------------------------


def _visit(
    mask: _Mask,
    member: int,
    head: int,
    rows: slice,
    block_q: int,
    block_kv: int,
    stored: dict[bytes, int],
) -> tuple[list[int], list[int]]:
    """The tiles that a row of tiles visits, and the row of each in the masks.

    `stored` has the bits of each partial tile and their row; new ones join it.
    """
    tiles: list[int] = []
    kinds: list[int] = []
    for first, bits, exists in _pieces(mask, member, head, rows, block_q, block_kv):
        some = np.bitwise_or.reduce(bits, axis=0).any(-1)
        real = bits[: rows.stop - rows.start]
        full = (np.bitwise_and.reduce(real, axis=0) == exists).all(-1)
        for tile in np.flatnonzero(some).tolist():
            kind = FULL
            if not full[tile]:
                kind = stored.setdefault(bits[:, tile].tobytes(), len(stored))
            tiles.append(first + tile)
            kinds.append(kind)
    return tiles, kinds


def _pieces(
    mask: _Mask, member: int, head: int, rows: slice, block_q: int, block_kv: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """A row of tiles in pieces: the first tile of each, its bits, and which keys exist.

    Bits are uint32 `[block_q, tiles, words]`, 0 beyond T and S; keys `[tiles, words]`.
    """
    s = mask.sizes[3]
    step = max(1, PIECE // (block_q * block_kv)) * block_kv
    for k0 in range(0, s, step):
        keys = slice(k0, min(k0 + step, s))
        piece = mask.read(member, head, rows, keys)
        exists = np.ones((1, piece.shape[1]), bool)
        bits = pack(piece, block_q, block_kv), pack(exists, 1, block_kv)[0]
        yield k0 // block_kv, *bits


def pack(piece: np.ndarray, block_q: int, block_kv: int) -> np.ndarray:
    """Bools `[rows, keys]` as uint32 `[block_q, tiles, words]`, False beyond them.

    Bit c of word w is key 32 w + c of its tile.
    """
    rows, keys = piece.shape
    tiles, words = -(-keys // block_kv), words_of(block_kv)
    if piece.shape != (block_q, tiles * block_kv):
        piece = np.pad(piece, ((0, block_q - rows), (0, tiles * block_kv - keys)))
    piece = piece.reshape(block_q, tiles, block_kv)
    if unused := words * WORD_BITS - block_kv:
        piece = np.pad(piece, ((0, 0), (0, 0), (0, unused)))
    octets = np.packbits(piece, axis=-1, bitorder="little")
    return octets.view("<u4").astype(np.uint32, copy=False)
