"""Moving blocks in, out, within and between pools.

Ids are integers of any dtype, and may be traced: new ids never recompile. An id outside
the pool (−1 is the usual padding) reads zeros and is dropped on a write. Every update
happens in place when the pool is donated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from jax_kvblock.blocks.copy import block_copy
from jax_kvblock.blocks.implementations import check_implementation
from jax_kvblock.blocks.layout import BlockSpec, Layout, find_layout
from jax_kvblock.blocks.plan import Copy, Form, Side
from jax_kvblock.blocks.pool import KVPool, check_pool
from jax_kvblock.core import checks, debug
from jax_kvblock.core.types import ArrayIn, Heads, Integers, LayerIndex

if TYPE_CHECKING:
    from jaxtyping import Shaped


def gather_blocks(
    pool: KVPool,
    ids: Integers,
    layout: str | Layout = "universal",
    heads: Heads = None,
    *,
    implementation: str | None = None,
) -> Shaped[jax.Array, "n ..."]:
    """Reads blocks of a pool into one array, in any layout.

    Args:
      pool: on the device or in pinned host memory.
      ids: integers `[n]`, traced or not; an id outside the pool reads zeros.
      layout: how the result's blocks lie.
      heads: `(start, stop)`, a range or a slice, to read only a tensor-parallel slice
        of the heads.
      implementation: "kernel", "xla" or None, which takes the kernel.

    Returns:
      `[n, *block]` in device memory, where the block has stop − start heads.

    Raises:
      TypeError, ValueError: for a wrong pool, ids, layout name or head range.

    Example:
      >>> rank1 = gather_blocks(pool, ids, "universal", heads=(4, 8))
      >>> rank1.shape                                  # [n, heads, nl, no, nt, hd]
      (3, 4, 32, 2, 16, 128)
    """
    where = "gather_blocks"
    check_pool(where, "pool", pool)
    ids = checks.check_int32(where, "ids", ids, "[n]", 1)
    target = find_layout(where, "layout", layout, pool.spec.inner)
    start, stop = checks.check_heads(where, heads, pool.spec.num_kv_heads)
    part = pool.spec.replace(num_kv_heads=stop - start)
    extents = (("N", ids.shape[0]), *part.sizes.items())
    copy = Copy(
        extents=extents,
        src=_pool_side(pool, ("B",), None if heads is None else start),
        dst=Side(Form((), (("N",), *target.groups)), extents),
        in_place=False,
        implementation=_implementation(where, implementation, pool),
    )
    _look(where, pool, ids=ids)
    (result,) = block_copy(copy, pool.arrays, (), (ids,))
    return result


def scatter_blocks(
    pool: KVPool,
    ids: Integers,
    blocks: Shaped[ArrayIn, "n ..."],
    layout: str | Layout = "universal",
    heads: Heads = None,
    *,
    implementation: str | None = None,
) -> KVPool:
    """Writes blocks into a pool; in place when the pool is donated.

    Args:
      pool: on the device or in pinned host memory.
      ids: integers `[n]`, traced or not; an id outside the pool is dropped. Ids must
        not repeat: which of two blocks would win is not defined.
      blocks: `[n, *block]` in `layout`, of the pool's dtype.
      layout: how the given blocks lie.
      heads: `(start, stop)`, a range or a slice, to write only a tensor-parallel slice;
        then the blocks have stop − start heads and the pool's other heads stay as they
        are.
      implementation: "kernel", "xla" or None, which takes the kernel.

    Returns:
      The new pool.

    Raises:
      TypeError, ValueError: for a wrong pool, ids, blocks, layout name or head range.

    Example:
      >>> step = jax.jit(scatter_blocks, donate_argnums=0)
      >>> pool = step(pool, ids, blocks)
    """
    where = "scatter_blocks"
    check_pool(where, "pool", pool)
    ids = checks.check_int32(where, "ids", ids, "[n]", 1)
    source = find_layout(where, "layout", layout, pool.spec.inner)
    start, stop = checks.check_heads(where, heads, pool.spec.num_kv_heads)
    part = pool.spec.replace(num_kv_heads=stop - start)
    blocks = _operand(
        where, "blocks", blocks, (ids.shape[0], *source.shape(part)), pool.spec
    )
    extents = (("N", ids.shape[0]), *part.sizes.items())
    copy = Copy(
        extents=extents,
        src=Side(Form((), (("N",), *source.groups)), extents),
        dst=_pool_side(pool, ("B",), None if heads is None else start),
        in_place=True,
        implementation=_implementation(where, implementation, pool),
    )
    _look(where, pool, written=True, ids=ids)
    results = block_copy(copy, [blocks], pool.arrays, (None, ids))
    return _with_arrays(pool, results)


def copy_blocks(
    pool: KVPool,
    src_ids: Integers,
    dst_ids: Integers,
    *,
    implementation: str | None = None,
) -> KVPool:
    """Copies blocks to other places of the same pool; in place when it is donated.

    All blocks are read before the first is written, so ids may overlap: `[0, 1]` to
    `[1, 0]` swaps. That takes a temporary of n blocks.

    Args:
      pool: on the device or in pinned host memory.
      src_ids, dst_ids: integers `[n]`; a source outside the pool reads zeros, a
        destination outside is dropped. Destinations must not repeat.
      implementation: "kernel", "xla" or None, which takes the kernel.

    Returns:
      The new pool.

    Raises:
      TypeError, ValueError: for a wrong pool or ids.
    """
    where = "copy_blocks"
    check_pool(where, "pool", pool)
    src_ids, dst_ids = _check_id_pair(where, src_ids, dst_ids)
    _implementation(where, implementation, pool)
    layout = pool.spec.block_layout
    _look(where, pool, src_ids=src_ids)
    _look(where, pool, written=True, dst_ids=dst_ids)
    with debug.debug_checks(False):
        blocks = gather_blocks(pool, src_ids, layout, implementation=implementation)
        return scatter_blocks(
            pool, dst_ids, blocks, layout, implementation=implementation
        )


def transfer_blocks(
    src_pool: KVPool,
    src_ids: Integers,
    dst_pool: KVPool,
    dst_ids: Integers,
    heads: Heads = None,
    *,
    implementation: str | None = None,
) -> KVPool:
    """Copies blocks from one pool into another, of any layouts and memories, in one
    pass.

    Args:
      src_pool, dst_pool: on the device or in pinned host memory. They agree in layers,
        outer, block size, head_dim and dtype.
      src_ids, dst_ids: integers `[n]`; a source outside its pool reads zeros, a
        destination outside is dropped. Destinations must not repeat.
      heads: `(start, stop)`, a range or a slice: the tensor-parallel slice to move,
        counted in the pool with more heads. A pool that holds exactly stop − start
        heads holds just the slice.
      implementation: "kernel", "xla" or None, which takes the kernel.

    Returns:
      The new destination pool; updated in place when `dst_pool` is donated.

    Raises:
      TypeError, ValueError: for wrong pools, ids or head range.

    Example:
      >>> offload = jax.jit(transfer_blocks, donate_argnums=2)
      >>> host_pool = offload(pool, ids, host_pool, host_ids)
    """
    where = "transfer_blocks"
    check_pool(where, "src_pool", src_pool)
    check_pool(where, "dst_pool", dst_pool)
    src_ids, dst_ids = _check_id_pair(where, src_ids, dst_ids)
    same = all(
        a is b for a, b in zip(src_pool.arrays, dst_pool.arrays, strict=False)
    ) and (src_pool.spec == dst_pool.spec)
    if same and heads is None:
        return copy_blocks(dst_pool, src_ids, dst_ids, implementation=implementation)
    src, dst = src_pool.spec, dst_pool.spec
    for axis in ("num_layers", "num_outer", "block_size", "head_dim", "dtype"):
        if getattr(src, axis) != getattr(dst, axis):
            raise ValueError(
                f"{where}: the pools must agree in {axis}; src_pool has "
                f"{getattr(src, axis)}, dst_pool has {getattr(dst, axis)}"
            )
    starts, width = _slice_of_pools(where, src.num_kv_heads, dst.num_kv_heads, heads)
    extents = (
        ("N", src_ids.shape[0]),
        *src.replace(num_kv_heads=width).sizes.items(),
    )
    implementation = _implementation(where, implementation, src_pool, dst_pool)
    copy = Copy(
        extents=extents,
        src=_pool_side(src_pool, ("B",), starts[0]),
        dst=_pool_side(dst_pool, ("B",), starts[1]),
        in_place=True,
        implementation=implementation,
    )
    _look(where, src_pool, src_ids=src_ids)
    _look(where, dst_pool, written=True, dst_ids=dst_ids)
    results = block_copy(copy, src_pool.arrays, dst_pool.arrays, (src_ids, dst_ids))
    return _with_arrays(dst_pool, results)


def append_copies(
    where: str,
    pool: KVPool,
    layer: LayerIndex | None,
    k: Shaped[ArrayIn, "*nl tokens nh hd"],
    v: Shaped[ArrayIn, "*nl tokens nh hd"] | None,
    slots: Integers,
    *,
    implementation: str | None = None,
) -> KVPool:
    """The pool with tokens of its dtype copied into their slots; see `append_kv`."""
    check_pool(where, "pool", pool)
    spec = pool.spec
    slots = checks.check_int32(where, "slots", slots, "[tokens]", 1)
    tokens = slots.shape[0]
    layers = (spec.num_layers,) if layer is None else ()
    shape = (*layers, tokens, spec.num_kv_heads, spec.head_dim)
    values = [_operand(where, "k", k, shape, spec)]
    if spec.num_outer == 2:
        values.append(_operand(where, "v", v, shape, spec))
    elif v is not None:
        raise ValueError(
            f"{where}: v must be None for a pool with num_outer 1, got "
            f"{checks.show(v)}; pass the combined cache as k"
        )
    part = layer_part(where, pool, layer, ("B", "T"))
    axes = "LOHD" if layer is None else "OHD"
    extents = (("N", tokens), *((axis, spec.sizes[axis]) for axis in axes))
    stored = (("L",),) if layer is None else ()
    copy = Copy(
        extents=extents,
        src=Side(Form(("O",), (*stored, ("N",), ("H",), ("D",))), extents),
        dst=part.side,
        in_place=True,
        implementation=_implementation(where, implementation, pool),
    )
    look_at_slots(where, pool, slots, part.start)
    results = block_copy(copy, values, part.arrays, (None, slots, None, part.start))
    return part.updated(pool, results)


def gather_kv(
    pool: KVPool,
    layer: LayerIndex,
    ids: Integers,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Reads one layer's keys and values of a sequence, as attention takes them.

    Args:
      pool: on the device or in pinned host memory, in any layout.
      layer: an integer, or a traced integer scalar (as inside `lax.scan` over layers).
      ids: integers `[n]`, traced or not, the sequence's blocks in order; an id outside
        the pool reads zeros.
      implementation: "kernel", "xla" or None, which takes the kernel.

    Returns:
      k and v, each `[n · block_size, nh, hd]` in device memory: position p of the
      sequence is row p. v is None when num_outer is 1. A traced layer outside the pool
      reads zeros.

    Raises:
      IndexError: for a layer outside the pool that is not traced.
      TypeError, ValueError: for a wrong pool, layer or ids.

    Example:
      >>> k, v = gather_kv(pool, layer, ids)
      >>> o = flash_attention(q[None], k[None], v[None], kv_lens=length[None])
    """
    where = "gather_kv"
    check_pool(where, "pool", pool)
    ids = checks.check_int32(where, "ids", ids, "[n]", 1)
    if layer is None:
        raise _no_layer(where, layer)
    part = layer_part(where, pool, layer, ("B",))
    sizes = {axis: n for axis, n in pool.spec.sizes.items() if axis != "L"}
    extents = (("N", ids.shape[0]), *sizes.items())
    copy = Copy(
        extents=extents,
        src=part.side,
        dst=Side(Form(("O",), (("N", "T"), ("H",), ("D",))), extents),
        in_place=False,
        implementation=_implementation(where, implementation, pool),
    )
    _look(where, pool, layer=part.start, ids=ids)
    k, *v = block_copy(copy, part.arrays, (), (ids, None, part.start))
    return k, (v[0] if v else None)


# ---- how a pool lies in memory -------------------------------------------------------


def _pool_form(pool: KVPool) -> Form:
    groups = pool.spec.block_layout.groups
    if pool.contiguous:
        return Form((), (("B",), *groups))
    return Form(("L",), (("B",), *groups[1:]))


def _pool_sizes(pool: KVPool) -> dict[str, int]:
    return {"B": pool.num_blocks, **pool.spec.sizes}


def _pool_side(pool: KVPool, index: tuple[str, ...], head: int | None) -> Side:
    first = () if head is None else (("H", head),)
    return Side(_pool_form(pool), tuple(_pool_sizes(pool).items()), index, first)


class LayerPart(NamedTuple):
    """One layer of a pool, or all of them, as a side of a copy.

    Attributes:
      side: the side, with ids that address `index`.
      arrays: the pool's arrays that the side is about.
      start: the layer, when it is an operand.
      number: the layer, when it is static.
    """

    side: Side
    arrays: Sequence[jax.Array]
    start: jax.Array | None = None
    number: int | None = None

    def updated(self, pool: KVPool, results: Sequence[jax.Array]) -> KVPool:
        """The pool with `results` in place of this part's arrays."""
        if self.number is None or pool.contiguous:
            return _with_arrays(pool, results)
        arrays = list(pool.arrays)
        (arrays[self.number],) = results
        return _with_arrays(pool, arrays)


def layer_part(
    where: str, pool: KVPool, layer: Any, index: tuple[str, ...]
) -> LayerPart:
    side = _pool_side(pool, index, None)
    if layer is None:
        return LayerPart(side, pool.arrays)
    if isinstance(layer, jax.Array):
        start = checks.check_int32(where, "layer", layer, "[]", 0)
        return LayerPart(dataclasses.replace(side, start="L"), pool.arrays, start)
    number = checks.as_int(layer)
    if number is None:
        raise _no_layer(where, layer)
    if not 0 <= number < pool.spec.num_layers:
        raise IndexError(
            f"{where}: layer must be 0 to {pool.spec.num_layers - 1}, got {number}"
        )
    if pool.contiguous:
        side = dataclasses.replace(side, first=(("L", number),))
        return LayerPart(side, pool.arrays, number=number)
    sizes = tuple((axis, n) for axis, n in side.sizes if axis != "L")
    side = Side(Form((), side.form.array), sizes, index)
    return LayerPart(side, [pool.arrays[number]], number=number)


def _no_layer(where: str, layer: Any) -> TypeError:
    return TypeError(
        f"{where}: layer must be an integer or an int32 scalar, got "
        f"{checks.show(layer)}; pass an int, or jnp.int32(layer) not to recompile"
    )


def _with_arrays(pool: KVPool, arrays: Sequence[jax.Array]) -> KVPool:
    return KVPool._holding(arrays[0] if pool.contiguous else tuple(arrays), pool.spec)


def _slice_of_pools(
    where: str, src: int, dst: int, heads: Any
) -> tuple[tuple[int | None, int | None], int]:
    """The first head on each side (None for all of them), and how many are moved."""
    if heads is None:
        if src != dst:
            raise ValueError(
                f"{where}: src_pool has {src} KV heads, dst_pool has {dst}; pass "
                "heads=(start, stop), the slice of the larger pool to move"
            )
        return (None, None), src
    full = max(src, dst)
    start, stop = checks.check_heads(where, heads, full)
    for name, count in (("src_pool", src), ("dst_pool", dst)):
        if count not in (full, stop - start):
            raise ValueError(
                f"{where}: heads=({start}, {stop}) moves {stop - start} of {full} "
                f"heads, but {name} has {count}; a pool holds either all or exactly "
                "the slice"
            )
    return (
        start if src == full else None,
        start if dst == full else None,
    ), stop - start


def _implementation(
    where: str, implementation: str | None, *pools: KVPool
) -> str | None:
    """What was asked for, which has to reach the pools' memory."""
    check_implementation(where, implementation)
    if implementation == "xla" and any(p.memory_kind == "pinned_host" for p in pools):
        raise ValueError(
            f"{where}: implementation='xla' does not read or write pinned_host pools; "
            "use implementation='kernel' (or None)"
        )
    return implementation


# ---- checks -----------------------------------------------------------------------


def _look(
    where: str, pool: KVPool, *, written: bool = False, layer: Any = None, **ids: Any
) -> None:
    """What `debug_checks` looks at: block ids by their name, and a traced layer."""
    ((name, of),) = ids.items()
    function = debug.check_written if written else debug.check_read
    static = (where, name, pool.num_blocks, "the pool's blocks", pool.spec.num_layers)
    debug.check(function, *static, ids=of, layer=layer)


def look_at_slots(where: str, pool: KVPool, slots: Any, layer: Any) -> None:
    """The same of slots that are written."""
    count = pool.num_blocks * pool.spec.block_size
    static = (where, "slots", count, "the pool's slots", pool.spec.num_layers)
    debug.check(debug.check_written, *static, ids=slots, layer=layer)


def _operand(
    where: str, name: str, x: Any, shape: tuple[int, ...], spec: BlockSpec
) -> jax.Array:
    """The array, of this shape and of the pool's dtype."""
    x = checks.check_array(where, name, x)
    if tuple(x.shape) != shape:
        raise ValueError(
            f"{where}: {name} must have shape {list(shape)}, got {checks.show(x)}"
        )
    if x.dtype != spec.dtype:
        raise TypeError(
            f"{where}: {name} must have the pool's dtype {spec.dtype}, got "
            f"{checks.show(x)}; cast it with .astype({str(spec.dtype)!r})"
        )
    return checks.to_jax(x)


def _check_id_pair(where: str, src: Any, dst: Any) -> tuple[jax.Array, jax.Array]:
    src = checks.check_int32(where, "src_ids", src, "[n]", 1)
    dst = checks.check_int32(where, "dst_ids", dst, "[n]", 1)
    if src.shape != dst.shape:
        raise ValueError(
            f"{where}: src_ids and dst_ids must have one length, got {src.shape[0]} "
            f"and {dst.shape[0]}"
        )
    return src, dst
