"""The programs that bring heads of blocks from the devices of one pool to another's.

A pool is seen as what each device has of it: one array that is cut over a flat mesh,
made of the same buffers. So a program is the same on each device and knows no cuts:
pools on other meshes, on one device, or whole on several, need no cases of their own.
Which heads a device reads and writes it looks up by its number.

Many blocks go in chunks, so that one is read, and another written, under the way of a
third.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_kvblock.blocks.layout import UNIVERSAL
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.parallel.options import engine_options
from jax_kvblock.parallel.reshard_copies import copy_between
from jax_kvblock.parallel.reshard_parts import (
    AXIS,
    ByDevice,
    Devices,
    Heads,
    Ids,
    Part,
    brought,
    copy,
    flat_mesh,
    here,
    read,
    shards,
    write,
)
from jax_kvblock.parallel.reshard_routes import (
    Round,
    Rounds,
    find_routes,
    grain,
    in_rounds,
)

# A chunk of a part of the heads. Over NVLink at about 300 GB/s it takes some 60 us, ten
# times as long as a launch. Of more than four each would cost more than is read first.
CHUNK_BYTES, MOST_CHUNKS = 2**24, 4
STEP_BYTES = 2**31  # that a step of collectives holds on each device beside the pools
Pieces = tuple[jax.Array, ...]
Firsts = tuple[tuple[int, ...], ...]  # of each piece, for each device, its first head


def move(src: Part, src_ids: Ids, dst: Part, dst_ids: Ids) -> KVPool:
    """The new destination pool; the old one is donated."""
    devices = tuple(dict.fromkeys((*src.cut.devices, *dst.cut.devices)))
    if not here(devices):
        return dst.pool  # others do it; this process has no part of either pool
    with (
        _no_mesh(),
        jax.transfer_guard_host_to_device("allow"),  # of ids,
        jax.transfer_guard_device_to_device("allow"),  # and of pieces: they are meant
    ):
        if {*src.cut.devices} == {*dst.cut.devices}:
            return _in_one_program(src, src_ids, dst, dst_ids)
        if _of_one_process(devices):
            return copy_between(src, src_ids, dst, dst_ids)
        return _by_collectives(src, src_ids, dst, dst_ids, devices)


def _of_one_process(devices: Devices) -> bool:
    return here(devices) == devices


def _num_chunks(src: Part, n: int, width: int) -> int:
    """In how many chunks n blocks go, `width` heads at a time."""
    return min(max(n * width * src.head_bytes // CHUNK_BYTES, 1), MOST_CHUNKS)


def _chunked(ids: Any, chunks: int) -> list[Any]:
    """As many of them, of one length but for the last."""
    length = -(-len(ids) // chunks)
    return [ids[first : first + length] for first in range(0, len(ids), length)]


def _no_mesh() -> jax.set_mesh:
    """A mesh that is set around the call has nothing to say to its programs."""
    try:
        return jax.set_mesh(None)
    except ValueError:  # all arguments are constants of a function that is traced
        raise ValueError(
            "reshard_blocks: inside of jit a pool or the ids must be arguments of the "
            "function, got arrays from outside for all of them; pass dst_pool as an "
            "argument, and donate it"
        ) from None


# ---- two ways ------------------------------------------------------------------------


def _in_one_program(src: Part, src_ids: Ids, dst: Part, dst_ids: Ids) -> KVPool:
    """Both pools on the same devices."""
    mesh = flat_mesh(dst.cut.devices)
    rounds = in_rounds(src.cut, dst.cut, dst.cut.devices)
    ids = _on_each(src_ids, mesh), _on_each(dst_ids, mesh)
    width = grain(src.cut, dst.cut)
    chunks = _num_chunks(src, len(src_ids), width)
    run = functools.partial(_step, mesh=mesh, rounds=rounds, width=width, chunks=chunks)
    return _updated(dst, run(_on(dst, mesh), _on(src, mesh), *ids))


def _by_collectives(
    src: Part, src_ids: Ids, dst: Part, dst_ids: Ids, devices: Devices
) -> KVPool:
    """Devices of several processes; many blocks go in several steps."""
    width, rounds = grain(src.cut, dst.cut), in_rounds(src.cut, dst.cut, devices)
    held = len(rounds.rounds) + len(rounds.pieces)  # on every device, of its shape
    steps = -(-len(src_ids) * width * src.head_bytes * held // STEP_BYTES)
    both = (_chunked(ids, steps) for ids in (src_ids, dst_ids))
    for take, put in zip(*both, strict=True):
        dst = Part(_by_a_collective(src, take, dst, put, devices), dst.cut)
    return dst.pool


def _by_a_collective(
    src: Part, src_ids: Ids, dst: Part, dst_ids: Ids, devices: Devices
) -> KVPool:
    """One program over all devices of both pools, and a scatter.

    Where all of them have blocks to send, the program reads these, too, in chunks: one
    is read under the way of another. Else there is a gather before it.

    Each process gathers on its own devices and scatters on its own. So none runs a
    program over devices of which it has none, and no pool is an operand of the program
    in between: devices without blocks to send take part with an empty piece.
    """
    mesh, own = flat_mesh(devices), here(devices)
    rounds, width = in_rounds(src.cut, dst.cut, devices), grain(src.cut, dst.cut)
    if {*src.cut.devices} == {*devices}:
        chunks = _num_chunks(src, len(src_ids), width)
        ids = _on_each(src_ids, mesh)
        send = functools.partial(_send, mesh=mesh, rounds=rounds, width=width)
        got = send(_on(src, mesh), ids, chunks=chunks)
        return _received(got, rounds, devices, dst, dst_ids)
    senders = here(dict.fromkeys(r.sender for r in find_routes(src.cut, dst.cut)))
    firsts = _columns(rounds.pieces, devices, senders)
    gathered = _gathered(src, src_ids, senders, firsts, width) if senders else ()
    idle = {d: _empty(src, len(src_ids), width, d) for d in own if d not in senders}
    parts = [{**idle, **shards(x)} for x in gathered] or [idle] * len(rounds.pieces)
    pieces = tuple(_flat(part, mesh) for part in parts)
    got = _exchange(pieces, mesh=mesh, rounds=rounds.rounds)
    return _received((got,), rounds, devices, dst, dst_ids)


def _received(
    got: tuple[Pieces, ...], rounds: Rounds, devices: Devices, dst: Part, ids: Ids
) -> KVPool:
    """The destination with what came to this process's devices, chunk by chunk."""
    receivers = here(dst.cut.devices)
    if not receivers:
        return dst.pool
    mine = flat_mesh(receivers)
    flat = tuple(tuple(_flat(shards(x), mine) for x in chunk) for chunk in got)
    puts = _columns([r.puts for r in rounds.rounds], devices, receivers)
    return _scattered(dst, ids, flat, puts)


def _gathered(
    src: Part, ids: Ids, senders: Devices, firsts: Firsts, width: int
) -> Pieces:
    """Pieces of the source, of some of this process's devices."""
    mesh = flat_mesh(senders)
    ids = _on_each(ids, mesh)
    return _gather(_on(src, mesh), ids, mesh=mesh, firsts=firsts, width=width)


def _scattered(dst: Part, ids: Ids, pieces: tuple[Pieces, ...], puts: Firsts) -> KVPool:
    """The destination, with pieces on this process's devices written into it."""
    mesh = flat_mesh(here(dst.cut.devices))
    flat = _scatter(_on(dst, mesh), _on_each(ids, mesh), pieces, mesh=mesh, puts=puts)
    return _updated(dst, flat)


# ---- programs ------------------------------------------------------------------------


class _Program:
    """A jitted function of a `mesh`; copy engines do what it permutes, where they can.

    Beside NCCL's kernels, those that read and write blocks would take turns.
    """

    def __init__(
        self, function: Callable[..., Any], static: Sequence[str], donated: Any = None
    ) -> None:
        names = {"static_argnames": ("mesh", *static), "donate_argnames": donated}
        self._jit = functools.partial(jax.jit, function, **names)
        self._jitted: dict[bool, Any] = {}

    def _of(self, mesh: Mesh) -> Any:
        options = engine_options(list(mesh.devices.flat))
        made = self._jitted.get(bool(options))
        if made is None:
            made = self._jit(compiler_options=options or None)
            self._jitted[bool(options)] = made
        return made

    def __call__(self, *args: Any, mesh: Mesh, **static: Any) -> Any:
        return self._of(mesh)(*args, mesh=mesh, **static)

    def lower(self, *args: Any, mesh: Mesh, **static: Any) -> Any:
        return self._of(mesh).lower(*args, mesh=mesh, **static)


def _program(*static: str, donated: Any = None) -> Callable[..., _Program]:
    return functools.partial(_Program, static=static, donated=donated)


@_program("rounds", "width", "chunks", donated="dst")
def _step(
    dst: KVPool,
    src: KVPool,
    src_ids: jax.Array,
    dst_ids: jax.Array,
    *,
    mesh: Mesh,
    rounds: Rounds,
    width: int,
    chunks: int,
) -> KVPool:
    """What stays goes from pool to pool in one pass, the rest by permutations.

    It goes while others are on their way.
    """

    def local(
        dst: KVPool, src: KVPool, src_ids: jax.Array, dst_ids: jax.Array
    ) -> KVPool:
        stay = [r for r in rounds.rounds if not r.pairs]
        moves = [r for r in rounds.rounds if r.pairs]
        got = []
        both = (_chunked(ids, chunks) for ids in (src_ids, dst_ids))
        for takes, puts in zip(*both, strict=True):
            sent = {
                i: read(src, takes, _of_device(rounds.pieces[i]), width)
                for i in _pieces(moves)
            }
            got += [(puts, r, _permuted(sent[r.piece], r)) for r in moves]
        for r in stay:
            take, put = _of_device(rounds.pieces[r.piece]), _of_device(r.puts)
            dst = copy(src, src_ids, take, dst, dst_ids, put, width)
        for ids, r, piece in got:
            dst = write(dst, ids, piece, _of_device(r.puts))
        return dst

    specs = P(AXIS), P(AXIS), P(), P()
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(AXIS))
    return run(dst, src, src_ids, dst_ids)


@functools.partial(jax.jit, static_argnames=("mesh", "firsts", "width"))
def _gather(
    src: KVPool,
    ids: jax.Array,
    *,
    mesh: Mesh,
    firsts: Firsts,
    width: int,
) -> Pieces:
    def local(src: KVPool, ids: jax.Array) -> Pieces:
        return tuple(read(src, ids, _of_device(first), width) for first in firsts)

    specs = P(AXIS), P()
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(AXIS))(src, ids)


@_program("rounds", "width", "chunks")
def _send(
    src: KVPool, ids: jax.Array, *, mesh: Mesh, rounds: Rounds, width: int, chunks: int
) -> tuple[Pieces, ...]:
    """For each chunk and round, what comes to each device."""

    def local(src: KVPool, ids: jax.Array) -> tuple[Pieces, ...]:
        got = []
        for takes in _chunked(ids, chunks):
            pieces = [
                read(src, takes, _of_device(first), width) for first in rounds.pieces
            ]
            got.append(tuple(_permuted(pieces[r.piece], r) for r in rounds.rounds))
        return tuple(got)

    specs = P(AXIS), P()
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(AXIS))(src, ids)


@_program("rounds")
def _exchange(pieces: Pieces, *, mesh: Mesh, rounds: tuple[Round, ...]) -> Pieces:
    """For each round, what comes to each device."""

    def local(pieces: Pieces) -> Pieces:
        return tuple(_permuted(pieces[r.piece], r) for r in rounds)

    return jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))(pieces)


@functools.partial(jax.jit, static_argnames=("mesh", "puts"), donate_argnames="dst")
def _scatter(
    dst: KVPool,
    ids: jax.Array,
    pieces: tuple[Pieces, ...],
    *,
    mesh: Mesh,
    puts: Firsts,
) -> KVPool:
    """Of each chunk of ids, its pieces."""

    def local(dst: KVPool, ids: jax.Array, pieces: tuple[Pieces, ...]) -> KVPool:
        for own, chunk in zip(_chunked(ids, len(pieces)), pieces, strict=True):
            for piece, firsts in zip(chunk, puts, strict=True):
                dst = write(dst, own, piece, _of_device(firsts))
        return dst

    specs = P(AXIS), P(), P(AXIS)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(AXIS))
    return run(dst, ids, pieces)


def _pieces(rounds: Sequence[Round]) -> list[int]:
    return sorted({r.piece for r in rounds})


# ---- one device's part ---------------------------------------------------------------


def _of_device(numbers: tuple[int, ...]) -> Heads:
    """This device's number."""
    if len({*numbers}) == 1:
        return numbers[0]
    return jnp.asarray(numbers, jnp.int32)[jax.lax.axis_index(AXIS)]


def _permuted(piece: jax.Array, round: Round) -> jax.Array:
    """What comes to this device, or its own piece if nothing travels."""
    if not round.pairs:
        return piece
    bits = jax.lax.ppermute(as_bits(piece), AXIS, round.pairs)
    return of_bits(bits, piece.dtype)


def as_bits(x: jax.Array) -> jax.Array:
    """Small floats as integers: XLA:CPU sends them as float32, which quiets NaNs."""
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}.get(x.dtype.itemsize)
    if bits is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jax.lax.bitcast_convert_type(x, bits)


def of_bits(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """The way back."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


# ---- arrays as what each device has --------------------------------------------------


def _flat(parts: ByDevice, mesh: Mesh) -> jax.Array:
    """An array of this process's parts: one after the other along the first axis."""
    arrays = [parts[d] for d in here(mesh.devices.flat)]
    rows, *rest = arrays[0].shape
    sharding = NamedSharding(mesh, P(AXIS))
    shape = (rows * mesh.size, *rest)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _on(part: Part, mesh: Mesh) -> KVPool:
    """The same buffers, as a pool of a flat mesh whose devices have its spec."""
    arrays = [_flat(shards(x), mesh) for x in part.pool.arrays]
    return KVPool._holding(part.joined(arrays), part.spec)


def _updated(part: Part, flat: KVPool) -> KVPool:
    """The pool of these buffers, cut as it was."""
    own = [shards(x) for x in flat.arrays]
    devices = here(part.cut.devices)
    return part.of_each({d: [x[d] for x in own] for d in devices})


def _on_each(ids: Ids, mesh: Mesh) -> jax.Array:
    """The ids, whole on each device."""
    return brought(ids, NamedSharding(mesh, P()))


def _columns(
    table: Sequence[Sequence[int]], devices: Devices, chosen: Devices
) -> Firsts:
    """Of numbers for all devices those of some."""
    at = [devices.index(d) for d in chosen]
    return tuple(tuple(row[i] for i in at) for row in table)


def _empty(src: Part, n: int, width: int, device: jax.Device) -> jax.Array:
    """What a device that sends nothing has in place of a piece."""
    block = UNIVERSAL.shape(src.pool.spec.replace(num_kv_heads=width))
    return jnp.zeros((n, *block), src.pool.dtype, device=device)
