"""`reshard_blocks`: blocks of one pool into another whose heads are cut otherwise."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_kvblock.blocks.layout import BlockSpec
from jax_kvblock.blocks.pool import KVPool, check_pool
from jax_kvblock.blocks.transfer import gather_blocks, scatter_blocks
from jax_kvblock.core import checks, debug
from jax_kvblock.core.checks import to_jax
from jax_kvblock.core.primitive import make_primitives
from jax_kvblock.core.types import Integers
from jax_kvblock.parallel.reshard_moves import as_bits, move, of_bits
from jax_kvblock.parallel.reshard_parts import Ids, Part, own_parts
from jax_kvblock.parallel.reshard_routes import Cut

_WHERE = "reshard_blocks"


def reshard_blocks(
    src_pool: KVPool,
    src_ids: Integers,
    dst_pool: KVPool,
    dst_ids: Integers,
) -> KVPool:
    """Copies blocks into a pool whose KV heads are cut over other devices.

    This is the step from prefill to decode: the heads of one pool are cut over the
    devices of a prefill mesh, the other's over those of a decode mesh. Only these
    blocks travel, as universal blocks `[n, heads, nl, no, nt, hd]`: each head from a
    device that has it to those that want it. What is there already does not travel. No
    pool is copied.

    Called outside of jit it finds the way itself, and `dst_pool` is consumed: its
    memory is donated, so use the pool that is returned. While a DLPack export of it is
    alive, a GPU refuses that, and a CPU copies the pool. There are three ways.

    - Both pools on the same devices: one program. Heads that stay go from pool to pool
      in one pass, the others by permutations (`ppermute`), no more than the busiest
      device has parts to send or to get.
    - Other devices of this process: programs of one device each, and copies in
      between, in chunks that are read and written while others travel. The host waits
      where more than 2 GiB would be under way on a device.
    - Devices of several processes of one `jax.distributed` job: a gather on the
      source's, one program of permutations over the devices of both pools, and a
      scatter on the destination's. Where all devices are the source's, the program
      gathers, too, each chunk of blocks under the way of another. Every process calls
      it with the same ids. One that has no device of the destination gets a handle to
      it; one that has no device of either pool does nothing.

    Inside of jit both pools are on the devices of the program, and one change of
    sharding of the blocks lies between a gather and a scatter. Donate `dst_pool` there
    as for `transfer_blocks`. Cut both by heads alone: automatic mesh axes are not known
    while jit traces, and XLA would move a pool that is cut otherwise.

    Args:
      src_pool, dst_pool: in device memory, in any layouts, as one array or one for each
        layer. They agree in layers, outer, block size, KV heads, head_dim and dtype.
        Heads may be cut over any mesh axes, be whole on some or on all devices, or lie
        on one device; nothing else may be cut. A layout whose heads are merged behind
        another axis, as "operational", lies whole on each device.
      src_ids, dst_ids: integers `[n]`; a source outside its pool reads zeros, a
        destination outside is dropped. Destinations must not repeat.

    Returns:
      The new destination pool, cut as it was. Without ids, `dst_pool` itself.

    Raises:
      TypeError: for something else than pools or integers.
      ValueError: for pools that differ, are one pool, share memory, lie in pinned host
        memory, are cut otherwise than by heads, or are traced on two meshes; for ids of
        two lengths or spread over processes; inside of `jax.shard_map`.
      RuntimeError: for a pool that was donated.

    Example:
      >>> prefill = jax.make_mesh((4,), ("tp",), devices=jax.devices()[:4])
      >>> decode = jax.make_mesh((2,), ("tp",), devices=jax.devices()[4:6])
      >>> heads = PartitionSpec(None, None, None, None, "tp")   # of an NHD pool
      >>> src = KVPool.zeros(spec, 1024, device=NamedSharding(prefill, heads))
      >>> dst = KVPool.zeros(spec, 4096, device=NamedSharding(decode, heads))
      >>> dst = reshard_blocks(src, [5, 6, 7], dst, [40, 2, 90])

    Note:
      Blocks with heads outermost, of which a tensor-parallel slice is one run, are the
      universal blocks of NVIDIA Dynamo's KV block manager.
    """
    check_pool(_WHERE, "src_pool", src_pool)
    check_pool(_WHERE, "dst_pool", dst_pool)
    _check_pair(src_pool, dst_pool)
    ids = [
        checks.check_int32_in_place(_WHERE, name, x, "[n]", 1)
        for name, x in (("src_ids", src_ids), ("dst_ids", dst_ids))
    ]
    if ids[0].shape != ids[1].shape:
        raise ValueError(
            f"{_WHERE}: src_ids and dst_ids must have one length, got {len(ids[0])} "
            f"and {len(ids[1])}; pass a destination for each source, -1 to drop it"
        )
    given = (*src_pool.arrays, *dst_pool.arrays, *ids)
    if any(isinstance(x, jax.core.Tracer) for x in given):
        return _traced(src_pool, to_jax(ids[0]), dst_pool, to_jax(ids[1]))
    src = Part(src_pool, _check_cut("src_pool", src_pool))
    dst = Part(dst_pool, _check_cut("dst_pool", dst_pool))
    _check_memory(src_pool, dst_pool)
    whole = _whole("src_ids", ids[0]), _whole("dst_ids", ids[1])
    _look(src_pool, whole[0], dst_pool, whole[1])
    if not len(whole[0]):
        return dst_pool
    return move(src, whole[0], dst, whole[1])


# ---- checks --------------------------------------------------------------------------

_AXES = {
    "B": "blocks",
    "L": "layers",
    "O": "outer",
    "T": "tokens",
    "H": "heads",
    "D": "head_dim",
}
_EXTENTS = (
    "num_layers",
    "num_outer",
    "block_size",
    "num_kv_heads",
    "head_dim",
    "dtype",
)


def _check_pair(src: KVPool, dst: KVPool) -> None:
    for axis in _EXTENTS:
        if getattr(src.spec, axis) != getattr(dst.spec, axis):
            raise ValueError(
                f"{_WHERE}: the pools must agree in {axis}; src_pool has "
                f"{getattr(src.spec, axis)}, dst_pool has {getattr(dst.spec, axis)}; "
                "make them of one spec (their layouts and cuts may differ)"
            )
    if not {*map(id, src.arrays)}.isdisjoint(map(id, dst.arrays)):
        raise ValueError(
            f"{_WHERE}: src_pool and dst_pool must be two pools, got one; copy_blocks "
            "moves blocks within a pool"
        )
    for name, pool in (("src_pool", src), ("dst_pool", dst)):
        if pool.memory_kind == "pinned_host":
            raise ValueError(
                f"{_WHERE}: {name} must be in device memory, got pinned_host; "
                "transfer_blocks moves blocks between a pool in host memory and one on "
                "the device"
            )


def _check_memory(src: KVPool, dst: KVPool) -> None:
    """No memory is read and donated: JAX would end the process.

    `jax.device_put` gives what lies there already another array, not other memory.
    """
    shapes = {pool.arrays[0].shape for pool in (src, dst)}
    apart = src.sharding.device_set.isdisjoint(dst.sharding.device_set)
    if len(shapes) > 1 or 0 in next(iter(shapes)) or apart:
        return
    if not _places(src).isdisjoint(_places(dst)):
        raise ValueError(
            f"{_WHERE}: src_pool and dst_pool must not share memory, got two arrays of "
            "the same; make dst_pool by KVPool.zeros, or of a copy (jnp.copy)"
        )


def _places(pool: KVPool) -> set[int]:
    """The addresses of what this process has of a pool."""
    return {
        x.unsafe_buffer_pointer() for array in pool.arrays for x in own_parts(array)
    }


def _check_cut(name: str, pool: KVPool) -> Cut:
    """How the heads of a pool that is there lie over its devices."""
    sharding = pool.sharding
    for i, x in enumerate(pool.arrays[1:], 1):
        if not x.sharding.is_equivalent_to(sharding, x.ndim):
            raise ValueError(
                f"{_WHERE}: {name} must have its layers cut alike, got {sharding} for "
                f"layer 0 and {x.sharding} for layer {i}; move them with jax.device_put"
            )
    return _find_cut(name, pool.spec, pool.contiguous, sharding, pool.arrays[0].shape)


@functools.lru_cache(maxsize=256)
def _find_cut(
    name: str,
    spec: BlockSpec,
    contiguous: bool,
    sharding: jax.sharding.Sharding,
    shape: tuple[int, ...],
) -> Cut:
    parts = [n // m for n, m in zip(shape, sharding.shard_shape(shape), strict=True)]
    _check_parts(name, spec, contiguous, shape, parts)
    dim, heads = _head_dim(spec, contiguous), spec.num_kv_heads
    places = sharding.devices_indices_map(shape)
    width, firsts = heads, [0] * len(places)
    if dim is not None:
        run = shape[dim] // heads  # of elements that a head has in this dimension
        width = sharding.shard_shape(shape)[dim] // run
        firsts = [(at[dim].start or 0) // run for at in places.values()]
    return Cut(tuple(places), tuple(firsts), width)


def _check_parts(
    name: str,
    spec: BlockSpec,
    contiguous: bool,
    shape: tuple[int, ...],
    parts: Sequence[int],
) -> None:
    """Only heads may be cut, and no head in two; `parts` has the shards of each dim."""
    heads, groups = _head_dim(spec, contiguous), _groups(spec, contiguous)
    for dim, (group, count) in enumerate(zip(groups, parts, strict=True)):
        if count == 1 or (dim == heads and spec.num_kv_heads % count == 0):
            continue
        axes = " and ".join(_AXES[axis] for axis in group)
        fix = "cut its heads instead, or nothing"
        if "H" in group:
            fix = "use a layout with heads first in a dimension, as NHD or universal"
        raise ValueError(
            f"{_WHERE}: {name} must be cut over devices by whole heads, got {axes} "
            f"(dim {dim} of {checks.show(jax.ShapeDtypeStruct(shape, spec.dtype))}, "
            f"layout {spec.block_layout.name!r}) cut in {count}; {fix}, and move the "
            "pool's arrays with jax.device_put"
        )


def _groups(spec: BlockSpec, contiguous: bool) -> tuple[tuple[str, ...], ...]:
    """The axes of each dimension of a pool's arrays."""
    groups = spec.block_layout.groups
    return (("B",), *(groups if contiguous else groups[1:]))


def _head_dim(spec: BlockSpec, contiguous: bool) -> int | None:
    """The dimension that can be cut by heads: the one that begins with them."""
    groups = _groups(spec, contiguous)
    return next((i for i, group in enumerate(groups) if group[0] == "H"), None)


def _whole(name: str, ids: Ids) -> Ids:
    """Ids that this process has."""
    if isinstance(ids, np.ndarray) or ids.is_fully_addressable:
        return ids
    if not ids.is_fully_replicated or not ids.addressable_shards:
        raise ValueError(
            f"{_WHERE}: {name} must be known to each process, got an array spread over "
            "several; pass the same NumPy array in each of them"
        )
    return ids.addressable_data(0)


def _look(src: KVPool, src_ids: Any, dst: KVPool, dst_ids: Any) -> None:
    """What `debug_checks` looks at."""
    if not debug.enabled():
        return
    for function, name, pool, ids in (
        (debug.check_read, "src_ids", src, src_ids),
        (debug.check_written, "dst_ids", dst, dst_ids),
    ):
        static = (
            _WHERE,
            name,
            pool.num_blocks,
            "the pool's blocks",
            pool.spec.num_layers,
        )
        debug.check(function, *static, ids=ids)


# ---- inside of jit -------------------------------------------------------------------


def _traced(src: KVPool, src_ids: jax.Array, dst: KVPool, dst_ids: jax.Array) -> KVPool:
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            f"{_WHERE}: pools inside of jax.shard_map are each device's own; call it "
            "outside, or transfer_blocks for what one device has"
        )
    meshes = [_check_explicit(n, p) for n, p in (("src_pool", src), ("dst_pool", dst))]
    if None not in meshes and meshes[0] != meshes[1]:
        raise ValueError(
            f"{_WHERE}: pools that jit traces must lie on one mesh, got src_pool on "
            f"{meshes[0]} and dst_pool on {meshes[1]}; call it outside of jit"
        )
    _look(src, src_ids, dst, dst_ids)
    if not len(src_ids):
        return dst
    with debug.debug_checks(False):
        blocks = gather_blocks(src, src_ids)
        return scatter_blocks(dst, dst_ids, _cut_like(dst, blocks))


def _check_explicit(name: str, pool: KVPool) -> Any:
    """The mesh of a traced pool whose explicit axes cut heads alone; None for none."""
    sharding: Any = jax.typeof(pool.arrays[0]).sharding
    if sharding.mesh.empty:
        return None
    size = dict(sharding.mesh.shape)
    parts = [_product(size, entry) for entry in sharding.spec]
    shape = pool.arrays[0].shape
    _check_parts(name, pool.spec, pool.contiguous, shape, parts)
    return sharding.mesh


def _product(size: dict[str, int], entry: Any) -> int:
    """The parts that an entry of a PartitionSpec makes."""
    names = entry if isinstance(entry, tuple) else (entry,)
    return math.prod(size.get(name, 1) for name in names)


def _cut_like(pool: KVPool, blocks: jax.Array) -> jax.Array:
    """Universal blocks, cut over devices as the pool's heads are."""
    (cut,) = _respread_p.bind(blocks, sharding=_explicit_cut(pool))
    return cut


def _explicit_cut(pool: KVPool) -> NamedSharding | None:
    """How the blocks must lie over explicit axes; None where there are none."""
    sharding: Any = jax.typeof(pool.arrays[0]).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    dim = _head_dim(pool.spec, pool.contiguous)
    heads = None if dim is None else sharding.spec[dim]
    return NamedSharding(sharding.mesh, P(None, heads, None, None, None, None))


# A change of sharding: to explicit axes as `sharding` says, to automatic ones as XLA
# finds. In between lies an identity across which XLA carries nothing over. Without it
# the cut of either pool would reach the other by way of the blocks, and XLA would move
# that pool.


def _abstract_eval(x: Any, sharding: NamedSharding | None) -> list[Any]:
    return [x if sharding is None else x.update(sharding=sharding)]


_respread_p, _ = make_primitives("kvblock_respread", _abstract_eval)


def _lower(x: jax.Array, *, sharding: NamedSharding | None) -> list[jax.Array]:
    bits = _respread(as_bits(x))
    if sharding is not None:
        bits = jax.sharding.reshard(bits, sharding)
    return [of_bits(bits, x.dtype)]


mlir.register_lowering(_respread_p, mlir.lower_fun(_lower, multiple_results=True))


@custom_partitioning
def _respread(x: jax.Array) -> jax.Array:
    return x


def _partition(mesh: Any, operands: Any, result: Any) -> Any:
    # XLA moves the blocks to where the destination wants them; then nothing is left.
    sharding = NamedSharding(mesh, result.sharding.spec)
    return mesh, lambda x: x, sharding, (sharding,)


def _sharding_rule(mesh: Any, operands: Any, result: Any) -> SdyShardingRule:
    dims = range(len(operands[0].shape))
    before, after = (ArrayMapping(*[f"{of}{i}" for i in dims]) for of in ("x", "y"))
    return SdyShardingRule((before,), (after,))


_respread.def_partition(partition=_partition, sharding_rule=_sharding_rule)


def _batch(
    operands: Any, dims: Any, *, sharding: NamedSharding | None
) -> tuple[list[jax.Array], list[int]]:
    (x,), (dim,) = operands, dims
    if sharding is not None:
        spec = list(sharding.spec)
        spec.insert(dim, jax.typeof(x).sharding.spec[dim])
        sharding = NamedSharding(sharding.mesh, P(*spec))
    return _respread_p.bind(x, sharding=sharding), [dim]


def _transpose(
    cotangents: Any, x: Any, *, sharding: NamedSharding | None
) -> list[jax.Array]:
    (cotangent,) = map(ad.instantiate_zeros, cotangents)
    back = None if sharding is None else x.aval.sharding
    return _respread_p.bind(cotangent, sharding=back)


batching.primitive_batchers[_respread_p] = _batch
ad.deflinear2(_respread_p, _transpose)
