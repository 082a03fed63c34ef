"""Heads of blocks from device to device of one process, each with programs of its own.

A piece is read on the device that has it, goes to the one that wants it by
`jax.device_put`, and is written there. To start a program of one device costs the host
a tenth of what one over several costs, and none waits for another device.

Many blocks go in chunks. One is on its way while the next is read and the one before
is written, and heads that stay go from pool to pool under the first.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.parallel.reshard_parts import Ids, Part, copy, read, write
from jax_kvblock.parallel.reshard_routes import Route, find_routes, grain

# What a device sends of a chunk: over NVLink some 700 us at 390 GB/s, where the host
# takes up to 500 us to start what a chunk needs.
CHUNK_BYTES = 2**28
LEAST_CHUNKS, LEAST_BYTES = 2, 2**25  # of less each chunk would cost more than it hides
AHEAD_BYTES = 2**31  # on a device beside the pools: the host waits before it is more

Pieces = dict[Route, jax.Array]


class _Sent(NamedTuple):
    """A chunk on its way: each route's piece, where it is wanted."""

    number: int
    pieces: Pieces


def copy_between(src: Part, src_ids: Ids, dst: Part, dst_ids: Ids) -> KVPool:
    """The new destination pool; the old one is donated."""
    with jax.transfer_guard_host_to_device("allow"):  # ids on the host; they are meant
        return _Copies(src, src_ids, dst, dst_ids).run()


class _Copies:
    def __init__(self, src: Part, src_ids: Ids, dst: Part, dst_ids: Ids) -> None:
        routes = find_routes(src.cut, dst.cut)
        self._width = grain(src.cut, dst.cut)
        self._dst = dst
        self._sources, self._targets = src.on_each(), dst.on_each()
        self._stay = [r for r in routes if r.sender == r.receiver]
        self._travel = [r for r in routes if r.sender != r.receiver]
        piece = len(src_ids) * self._width * src.head_bytes
        self._chunks, self._most = _chunks(len(src_ids), piece, self._travel)
        self._src_ids, self._dst_ids = (
            _on_devices(_chunked(ids, self._chunks), [*dict(_by(routes, end))])
            for ids, end in ((src_ids, 0), (dst_ids, 2))
        )

    def run(self) -> KVPool:
        arriving: deque[_Sent] = deque()
        written: deque[_Sent] = deque()
        for number in range(self._chunks if self._travel else 0):
            arriving.append(self._sent(number))
            if number == 0:
                self._copy_what_stays()
            else:
                written.append(self._written(arriving.popleft()))
            if len(written) >= self._most:
                jax.block_until_ready([*written.popleft().pieces.values()])
        if not self._travel:
            self._copy_what_stays()
        while arriving:
            self._written(arriving.popleft())
        return self._dst.of_each({d: pool.arrays for d, pool in self._targets.items()})

    def _sent(self, number: int) -> _Sent:
        """Reads a chunk, each piece once, and sends it to all that want it."""
        pieces = {}
        for sender, routes in _by(self._travel, 0):
            takes = tuple(sorted({r.take for r in routes}))
            ids = self._src_ids[sender][number]
            made = _read(self._sources[sender], ids, takes=takes, width=self._width)
            found = dict(zip(takes, made, strict=True))
            pieces.update({r: found[r.take] for r in routes})
        there = jax.device_put([*pieces.values()], [r.receiver for r in pieces])
        return _Sent(number, dict(zip(pieces, there, strict=True)))

    def _written(self, sent: _Sent) -> _Sent:
        for receiver, routes in _by(self._travel, 2):
            self._targets[receiver] = _write(
                self._targets[receiver],
                self._dst_ids[receiver][sent.number],
                tuple(sent.pieces[r] for r in routes),
                puts=tuple(r.put for r in routes),
            )
        return sent

    def _copy_what_stays(self) -> None:
        for device, routes in _by(self._stay, 0):
            self._targets[device] = _copy(
                self._sources[device],
                self._src_ids[device][-1],
                self._targets[device],
                self._dst_ids[device][-1],
                moves=tuple((r.take, r.put) for r in routes),
                width=self._width,
            )


def _chunks(blocks: int, piece: int, travel: Sequence[Route]) -> tuple[int, int]:
    """How many chunks pieces of so many bytes go in, and how many at a time."""
    sends = _most_of(travel, 0)
    chunks = -(-piece * sends // CHUNK_BYTES)
    chunks = max(chunks, min(LEAST_CHUNKS, piece * sends // LEAST_BYTES), 1)
    chunks = min(chunks, blocks)
    held = piece * (sends + _most_of(travel, 2)) // chunks
    return chunks, max(AHEAD_BYTES // max(held, 1), 1)


def _most_of(routes: Sequence[Route], end: int) -> int:
    """How many routes the busiest sender (0), or receiver (2), has."""
    return max((len(some) for _, some in _by(routes, end)), default=0)


def _by(routes: Sequence[Route], end: int) -> list[tuple[jax.Device, list[Route]]]:
    """The routes of each sender (0), or of each receiver (2)."""
    found: dict[jax.Device, list[Route]] = {}
    for route in routes:
        found.setdefault(route[end], []).append(route)
    return list(found.items())


def _on_devices(
    chunks: list[Any], devices: list[jax.Device]
) -> dict[jax.Device, list[Any]]:
    """Chunks of ids for each device; those on the host stay there until it asks."""
    if isinstance(chunks[0], np.ndarray):
        return dict.fromkeys(devices, chunks)
    return {d: jax.device_put(chunks, d) for d in devices}


def _chunked(ids: Ids, chunks: int) -> list[Any]:
    """Chunks of one length, so that one program serves all, and behind them all ids.

    The last chunk ends with −1.
    """
    if chunks == 1:
        return [ids]
    if not isinstance(ids, np.ndarray):
        return [*_split(ids, chunks=chunks), ids]
    length = -(-len(ids) // chunks)
    padded = np.full(chunks * length, -1, np.int32)
    padded[: len(ids)] = ids
    return [*padded.reshape(chunks, length), ids]


@functools.partial(jax.jit, static_argnames="chunks")
def _split(ids: jax.Array, *, chunks: int) -> tuple[jax.Array, ...]:
    length = -(-len(ids) // chunks)
    ids = jnp.pad(ids, (0, length * chunks - len(ids)), constant_values=-1)
    return tuple(ids.reshape(chunks, length))


# ---- programs of one device ----------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("takes", "width"))
def _read(
    pool: KVPool, ids: jax.Array, *, takes: tuple[int, ...], width: int
) -> tuple[jax.Array, ...]:
    return tuple(read(pool, ids, first, width) for first in takes)


@functools.partial(jax.jit, static_argnames="puts", donate_argnames="pool")
def _write(
    pool: KVPool,
    ids: jax.Array,
    pieces: tuple[jax.Array, ...],
    *,
    puts: tuple[int, ...],
) -> KVPool:
    for piece, first in zip(pieces, puts, strict=True):
        pool = write(pool, ids, piece, first)
    return pool


@functools.partial(jax.jit, static_argnames=("moves", "width"), donate_argnames="dst")
def _copy(
    src: KVPool,
    src_ids: jax.Array,
    dst: KVPool,
    dst_ids: jax.Array,
    *,
    moves: tuple[tuple[int, int], ...],
    width: int,
) -> KVPool:
    """Heads from pool to pool, each from one place (take) to another (put)."""
    for take, put in moves:
        dst = copy(src, src_ids, take, dst, dst_ids, put, width)
    return dst
