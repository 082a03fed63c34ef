"""Heads of blocks from device to device of one process, each with programs of its own.

A piece is read on the device that has it, is copied to the one that wants it, and is
written there. No program is over several devices, which the host takes several times as
long to start, and none waits for another device.

Few blocks wait for the host. So a piece is sent as soon as it is read, and what it is
written to is looked at while it is on its way. Ids go to all devices before that, at
once: to go to those that send first and to the others later, they cost the host more.

Many blocks go in chunks. One is on its way while the next is read and the one before
is written, and heads that stay go from pool to pool under the first.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jax_kvblock.blocks.layout import BlockSpec
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.parallel.reshard_parts import (
    Devices,
    Ids,
    Part,
    brought,
    copy,
    flat_mesh,
    read,
    shards,
    write,
)
from jax_kvblock.parallel.reshard_routes import Cut, Route, find_routes, grain

# What a device sends and gets of a chunk, at most: over NVLink some 1.4 ms at 390 GB/s,
# where a host took 0.5 ms to start what a chunk needs.
CHUNK_BYTES = 2**29
AHEAD = 4  # chunks under way: 2 GiB on a device beside the pools. Then the host waits

Pieces = dict[Route, jax.Array]


class _Ways(NamedTuple):
    """What each device of two cuts has to do with the other pool.

    Attributes:
      senders, receivers, keepers: the routes that begin, end, or do both there.
      movers, keeping, devices: those that send or get, those that keep, and all.
      busiest: the most pieces that one device sends and gets.
    """

    senders: list[tuple[jax.Device, list[Route]]]
    receivers: list[tuple[jax.Device, list[Route]]]
    keepers: list[tuple[jax.Device, list[Route]]]
    movers: Devices
    keeping: Devices
    devices: Devices
    busiest: int


class _Sent(NamedTuple):
    """A chunk on its way: each route's piece, where it is wanted."""

    number: int
    pieces: Pieces


def copy_between(src: Part, src_ids: Ids, dst: Part, dst_ids: Ids) -> KVPool:
    """The new destination pool; the old one is donated."""
    return _Copies(src, src_ids, dst, dst_ids).run()


class _Copies:
    """One call: what each device has, and the programs that it runs."""

    def __init__(self, src: Part, src_ids: Ids, dst: Part, dst_ids: Ids) -> None:
        self._ways, width = _ways(src.cut, dst.cut), grain(src.cut, dst.cut)
        self._dst = dst
        self._sources = src.on_each()
        self._targets: dict[jax.Device, tuple[jax.Array, ...]] = {}
        piece = len(src_ids) * width * src.head_bytes
        self._chunks = _chunks(len(src_ids), piece, self._ways.busiest)
        *chunks, whole = _chunked(src_ids, dst_ids, self._chunks)
        self._ids = [_on_devices(ids, self._ways.movers) for ids in chunks]
        at = self._ways.keeping if chunks else self._ways.devices
        self._ids.append(_on_devices(whole, at))
        self._of = (src.spec, src.pool.contiguous), (dst.spec, dst.pool.contiguous)
        self._width = width

    def run(self) -> KVPool:
        arriving: deque[_Sent] = deque()
        written: deque[_Sent] = deque()
        for number in range(self._chunks if self._ways.senders else 0):
            if len(arriving) + len(written) == AHEAD:
                jax.block_until_ready([*written.popleft().pieces.values()])
            arriving.append(self._sent(number))
            if number == 0:
                self._copy_what_stays()
            else:
                written.append(self._written(arriving.popleft()))
        if not self._ways.senders:
            self._copy_what_stays()
        while arriving:
            self._written(arriving.popleft())
        return self._dst.of_each(self._targets)

    def _sent(self, number: int) -> _Sent:
        """Reads a chunk, each piece once, and sends it to all that want it."""
        pieces: Pieces = {}
        for sender, routes in self._ways.senders:
            takes = tuple(sorted({r.take for r in routes}))
            program = _reader(*self._of[0], takes, self._width)
            made = program(self._sources[sender], self._ids[number][sender])
            found = dict(zip(takes, made, strict=True))
            for r in routes:
                pieces[r] = brought(found[r.take], SingleDeviceSharding(r.receiver))
        return _Sent(number, pieces)

    def _written(self, sent: _Sent) -> _Sent:
        for receiver, routes in self._ways.receivers:
            program = _writer(*self._of[1], tuple(r.put for r in routes))
            self._targets[receiver] = program(
                self._targets[receiver],
                self._ids[sent.number][receiver],
                tuple(sent.pieces[r] for r in routes),
            )
        return sent

    def _copy_what_stays(self) -> None:
        self._targets = self._dst.on_each()
        for device, routes in self._ways.keepers:
            moves = tuple((r.take, r.put) for r in routes)
            program = _copier(*self._of, moves, self._width)
            self._targets[device] = program(
                self._targets[device], self._sources[device], self._ids[-1][device]
            )


def _chunks(blocks: int, piece: int, busiest: int) -> int:
    """How many chunks pieces of so many bytes go in."""
    return min(max(-(-piece * busiest // CHUNK_BYTES), 1), blocks)


@functools.lru_cache(maxsize=256)
def _ways(src: Cut, dst: Cut) -> _Ways:
    routes = find_routes(src, dst)
    travel = [r for r in routes if r.sender != r.receiver]
    stay = [r for r in routes if r.sender == r.receiver]
    return _Ways(
        senders=_by(travel, 0),
        receivers=_by(travel, 2),
        keepers=_by(stay, 0),
        movers=_ends(travel),
        keeping=_ends(stay),
        devices=_ends(routes),
        busiest=_busiest(travel),
    )


def _busiest(travel: Sequence[Route]) -> int:
    """The most pieces that one device sends and gets."""
    ends = Counter(end for r in travel for end in (r.sender, r.receiver))
    return max(ends.values(), default=0)


def _ends(routes: Sequence[Route]) -> Devices:
    return tuple(dict.fromkeys(end for r in routes for end in (r.sender, r.receiver)))


def _by(routes: Sequence[Route], end: int) -> list[tuple[jax.Device, list[Route]]]:
    """The routes of each sender (0), or of each receiver (2)."""
    found: dict[jax.Device, list[Route]] = {}
    for route in routes:
        found.setdefault(route[end], []).append(route)
    return list(found.items())


def _on_devices(ids: Ids, devices: Devices) -> dict[jax.Device, jax.Array]:
    """A copy on each device. They go to all at once, of a CPU and of GPUs apart.

    A program that is given ids on the host takes twice as long to start as this takes
    for another device.
    """
    there: dict[jax.Device, jax.Array] = {}
    for to in _whole_on(devices):
        there.update(shards(brought(ids, to)))
    return there


@functools.lru_cache(maxsize=256)
def _whole_on(devices: Devices) -> tuple[Sharding, ...]:
    """Where arrays lie that are whole on each device: no array is of two clients.

    On one device without a mesh, since a pool there may be of another one.
    """
    found: dict[int, list[jax.Device]] = {}
    for device in devices:
        found.setdefault(id(device.client), []).append(device)
    return tuple(
        NamedSharding(flat_mesh(tuple(own)), P())
        if len(own) > 1
        else SingleDeviceSharding(own[0])
        for own in found.values()
    )


def _chunked(src_ids: Ids, dst_ids: Ids, chunks: int) -> Sequence[Ids]:
    """Chunks of both, `[2, length]`, of one length, so that one program serves all.

    Behind them come all ids, unless they are one chunk. The last chunk ends with −1.
    """
    arrays = [x for x in (src_ids, dst_ids) if isinstance(x, jax.Array)]
    if arrays:  # they meet in a program, in device memory
        at = arrays[0].sharding.with_memory_kind("device")
        return _split(*jax.device_put((src_ids, dst_ids), at), chunks=chunks)
    both = np.array((src_ids, dst_ids))
    if chunks == 1:
        return [both]
    length = -(-len(src_ids) // chunks)
    padded = np.full((2, chunks * length), -1, np.int32)
    padded[:, : len(src_ids)] = both
    return [*padded.reshape(2, chunks, length).swapaxes(0, 1), both]


@functools.partial(jax.jit, static_argnames="chunks")
def _split(src_ids: Ids, dst_ids: Ids, *, chunks: int) -> tuple[jax.Array, ...]:
    both = jnp.stack((src_ids, dst_ids))
    if chunks == 1:
        return (both,)
    length = -(-len(src_ids) // chunks)
    more = ((0, 0), (0, length * chunks - len(src_ids)))
    padded = jnp.pad(both, more, constant_values=-1)
    return *padded.reshape(2, chunks, length).swapaxes(0, 1), both


# ---- programs of one device ----------------------------------------------------------
#
# Functions of arrays alone: to take pools apart and to hash what is static would cost
# the host as much as the rest of a call.

Spec = tuple[BlockSpec, bool]  # of a device's part of a pool; whether it is one array


def _pool(arrays: tuple[jax.Array, ...], spec: BlockSpec, contiguous: bool) -> KVPool:
    return KVPool._holding(arrays[0] if contiguous else arrays, spec)


@functools.lru_cache(maxsize=256)
def _reader(
    spec: BlockSpec, contiguous: bool, takes: tuple[int, ...], width: int
) -> Any:
    """Of arrays and ids `[2, n]`, a piece for each first head."""

    def reads(arrays: tuple[jax.Array, ...], ids: jax.Array) -> tuple[jax.Array, ...]:
        pool = _pool(arrays, spec, contiguous)
        return tuple(read(pool, ids[0], first, width) for first in takes)

    return jax.jit(reads)


@functools.lru_cache(maxsize=256)
def _writer(spec: BlockSpec, contiguous: bool, puts: tuple[int, ...]) -> Any:
    """Of arrays, which are donated, ids and pieces: the arrays with these."""

    def writes(
        arrays: tuple[jax.Array, ...], ids: jax.Array, pieces: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        pool = _pool(arrays, spec, contiguous)
        for piece, first in zip(pieces, puts, strict=True):
            pool = write(pool, ids[1], piece, first)
        return pool.arrays

    return jax.jit(writes, donate_argnums=0)


@functools.lru_cache(maxsize=256)
def _copier(
    src_of: Spec, dst_of: Spec, moves: tuple[tuple[int, int], ...], width: int
) -> Any:
    """From pool to pool, heads from one place (take) to another (put)."""

    def copies(
        dst: tuple[jax.Array, ...], src: tuple[jax.Array, ...], ids: jax.Array
    ) -> tuple[jax.Array, ...]:
        source, pool = _pool(src, *src_of), _pool(dst, *dst_of)
        for take, put in moves:
            pool = copy(source, ids[0], take, pool, ids[1], put, width)
        return pool.arrays

    return jax.jit(copies, donate_argnums=0)
