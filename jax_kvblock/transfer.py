"""Moving blocks in, out, within and between pools.

Ids are traced int32 values: new ids never recompile. An id outside the pool (−1 is the
usual padding) reads zeros and is dropped on a write. Every update happens in place when
the pool is donated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_kvblock import _checks
from jax_kvblock._copy import block_copy
from jax_kvblock._plan import Copy, Form, Side
from jax_kvblock.convert import backend_of
from jax_kvblock.layout import BlockSpec, Layout, find_layout
from jax_kvblock.pool import KVPool, check_pool


def gather_blocks(
    pool: KVPool,
    ids: Any,
    layout: str | Layout = "universal",
    heads: tuple[int, int] | None = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Reads blocks of a pool into one array, in any layout.

    Args:
      pool: on the device or in pinned host memory.
      ids: int32 `[n]`, traced or not; an id outside the pool reads zeros.
      layout: how the result's blocks lie.
      heads: `(start, stop)`, to read only a tensor-parallel slice of the heads.
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
    ids = _checks.check_int32(where, "ids", ids, "[n]", 1)
    target = find_layout(where, "layout", layout, pool.spec.inner)
    start, stop = _checks.check_heads(where, heads, pool.spec.num_kv_heads)
    part = pool.spec.replace(num_kv_heads=stop - start)
    extents = (("N", ids.shape[0]), *part.sizes.items())
    copy = Copy(
        extents=extents,
        src=_pool_side(pool, ("B",), None if heads is None else start),
        dst=Side(Form((), (("N",), *target.groups)), extents),
        in_place=False,
        backend=_backend(where, implementation, pool),
    )
    (result,) = block_copy(copy, pool.arrays, (), (ids,))
    return result


def scatter_blocks(
    pool: KVPool,
    ids: Any,
    blocks: Any,
    layout: str | Layout = "universal",
    heads: tuple[int, int] | None = None,
    *,
    implementation: str | None = None,
) -> KVPool:
    """Writes blocks into a pool; in place when the pool is donated.

    Args:
      pool: on the device or in pinned host memory.
      ids: int32 `[n]`, traced or not; an id outside the pool is dropped. Ids must not
        repeat: which of two blocks would win is not defined.
      blocks: `[n, *block]` in `layout`, of the pool's dtype.
      layout: how the given blocks lie.
      heads: `(start, stop)`, to write only a tensor-parallel slice; then the blocks
        have stop − start heads and the pool's other heads stay as they are.
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
    ids = _checks.check_int32(where, "ids", ids, "[n]", 1)
    source = find_layout(where, "layout", layout, pool.spec.inner)
    start, stop = _checks.check_heads(where, heads, pool.spec.num_kv_heads)
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
        backend=_backend(where, implementation, pool),
    )
    results = block_copy(copy, [blocks], pool.arrays, (None, ids))
    return _with_arrays(pool, results)


def copy_blocks(
    pool: KVPool, src_ids: Any, dst_ids: Any, *, implementation: str | None = None
) -> KVPool:
    """Copies blocks to other places of the same pool; in place when it is donated.

    All blocks are read before the first is written, so ids may overlap: `[0, 1]` to
    `[1, 0]` swaps. That takes a temporary of n blocks.

    Args:
      pool: on the device or in pinned host memory.
      src_ids, dst_ids: int32 `[n]`; a source outside the pool reads zeros, a
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
    _backend(where, implementation, pool)
    layout = pool.spec.block_layout
    blocks = gather_blocks(pool, src_ids, layout, implementation=implementation)
    return scatter_blocks(pool, dst_ids, blocks, layout, implementation=implementation)


def transfer_blocks(
    src_pool: KVPool,
    src_ids: Any,
    dst_pool: KVPool,
    dst_ids: Any,
    heads: tuple[int, int] | None = None,
    *,
    implementation: str | None = None,
) -> KVPool:
    """Copies blocks from one pool into another, of any layouts and memories, in one
    pass.

    Args:
      src_pool, dst_pool: on the device or in pinned host memory. They agree in layers,
        outer, block size, head_dim and dtype.
      src_ids, dst_ids: int32 `[n]`; a source outside its pool reads zeros, a
        destination outside is dropped. Destinations must not repeat.
      heads: `(start, stop)`, the tensor-parallel slice to move, counted in the pool
        with more heads. A pool that holds exactly stop − start heads holds just the
        slice.

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
    backend = _backend(where, implementation, src_pool, dst_pool)
    copy = Copy(
        extents=extents,
        src=_pool_side(src_pool, ("B",), starts[0]),
        dst=_pool_side(dst_pool, ("B",), starts[1]),
        in_place=True,
        backend=backend,
    )
    results = block_copy(copy, src_pool.arrays, dst_pool.arrays, (src_ids, dst_ids))
    return _with_arrays(dst_pool, results)


def append_kv(
    pool: KVPool,
    layer: Any,
    k: Any,
    v: Any,
    slots: Any,
    *,
    implementation: str | None = None,
) -> KVPool:
    """Writes the keys and values of new tokens into their slots; in place when donated.

    Args:
      pool: on the device or in pinned host memory.
      layer: a Python int, or a traced int32 scalar (as inside `lax.scan` over layers).
      k, v: `[tokens, nh, hd]` of the pool's dtype. v is None when num_outer is 1.
      slots: int32 `[tokens]`, block · block_size + offset; −1 is dropped. Slots must
        not repeat.
      implementation: "kernel", "xla" or None, which takes the kernel.

    Returns:
      The new pool. A traced layer outside the pool writes nothing.

    Raises:
      IndexError: for a Python layer outside the pool.
      TypeError, ValueError: for a wrong pool, k, v or slots.
    """
    where = "append_kv"
    check_pool(where, "pool", pool)
    spec = pool.spec
    slots = _checks.check_int32(where, "slots", slots, "[tokens]", 1)
    tokens = slots.shape[0]
    shape = (tokens, spec.num_kv_heads, spec.head_dim)
    values = [_operand(where, "k", k, shape, spec)]
    if spec.num_outer == 2:
        values.append(_operand(where, "v", v, shape, spec))
    elif v is not None:
        raise ValueError(
            f"{where}: v must be None for a pool with num_outer 1, got "
            f"{_checks.show(v)}; pass the combined cache as k"
        )

    sizes = {axis: n for axis, n in spec.sizes.items() if axis in "OHD"}
    extents = (("N", tokens), *sizes.items())
    side, arrays, start = _layer_side(where, pool, layer)
    copy = Copy(
        extents=extents,
        src=Side(Form(("O",), (("N",), ("H",), ("D",))), extents),
        dst=side,
        in_place=True,
        backend=_backend(where, implementation, pool),
    )
    results = block_copy(copy, values, arrays, (None, slots, None, start))
    if len(results) == len(pool.arrays):
        return _with_arrays(pool, results)
    layers = list(pool.arrays)
    layers[int(layer)] = results[0]
    return KVPool(tuple(layers), spec)


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


def _layer_side(
    where: str, pool: KVPool, layer: Any
) -> tuple[Side, Sequence[jax.Array], jax.Array | None]:
    """One layer of the pool as a destination of slots, its arrays, a traced start."""
    form, sizes, index = _pool_form(pool), _pool_sizes(pool), ("B", "T")
    number = None if isinstance(layer, jax.Array) else _checks.as_int(layer)
    if number is not None:
        if not 0 <= number < pool.spec.num_layers:
            raise IndexError(
                f"{where}: layer must be 0 to {pool.spec.num_layers - 1}, got {number}"
            )
        if pool.contiguous:
            side = Side(form, tuple(sizes.items()), index, (("L", number),))
            return side, pool.arrays, None
        del sizes["L"]
        side = Side(Form((), form.array), tuple(sizes.items()), index)
        return side, [pool.arrays[number]], None
    if not hasattr(layer, "dtype") or isinstance(layer, np.bool_):
        raise TypeError(
            f"{where}: layer must be a Python int or an int32 scalar, got "
            f"{type(layer).__name__}"
        )
    start = _checks.check_int32(where, "layer", layer, "[]", 0)
    return Side(form, tuple(sizes.items()), index, (), "L"), pool.arrays, start


def _with_arrays(pool: KVPool, arrays: Sequence[jax.Array]) -> KVPool:
    return KVPool(arrays[0] if pool.contiguous else tuple(arrays), pool.spec)


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
    start, stop = _checks.check_heads(where, heads, full)
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


def _backend(where: str, implementation: str | None, *pools: KVPool) -> str:
    backend = backend_of(where, implementation)
    if backend == "xla" and any(p.memory_kind == "pinned_host" for p in pools):
        raise ValueError(
            f"{where}: implementation='xla' does not read or write pinned_host pools; "
            "use implementation='kernel' (or None)"
        )
    return backend


# ---- checks -----------------------------------------------------------------------


def _operand(
    where: str, name: str, x: Any, shape: tuple[int, ...], spec: BlockSpec
) -> jax.Array:
    """The array, of this shape and of the pool's dtype."""
    x = _checks.check_array(where, name, x)
    if tuple(x.shape) != shape:
        raise ValueError(
            f"{where}: {name} must have shape {list(shape)}, got {_checks.show(x)}"
        )
    if x.dtype != spec.dtype:
        raise TypeError(
            f"{where}: {name} must have the pool's dtype {spec.dtype}, got "
            f"{_checks.show(x)}; cast it with .astype({str(spec.dtype)!r})"
        )
    return _checks.to_jax(x)


def _check_id_pair(where: str, src: Any, dst: Any) -> tuple[jax.Array, jax.Array]:
    src = _checks.check_int32(where, "src_ids", src, "[n]", 1)
    dst = _checks.check_int32(where, "dst_ids", dst, "[n]", 1)
    if src.shape != dst.shape:
        raise ValueError(
            f"{where}: src_ids and dst_ids must have one length, got {src.shape[0]} "
            f"and {dst.shape[0]}"
        )
    return src, dst
