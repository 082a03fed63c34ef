"""`KVPool`, the memory of a KV cache, and the functions that move blocks in and out.

A pool is a pytree: take it into a jit, donate it, and every update happens in place.
  Ids
are traced int32 values: new ids never recompile. An id outside the pool (−1 is the
usual padding) reads zeros and is dropped on a write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock import _checks
from jax_kvblock._copy import block_copy
from jax_kvblock._plan import Copy, Form, Side
from jax_kvblock.convert import backend_of
from jax_kvblock.layout import BlockSpec, Layout, find_layout

MEMORY_KINDS = ("device", "pinned_host")


@jax.tree_util.register_pytree_with_keys_class
class KVPool:
    """The blocks of a KV cache, as one array or as one array per layer.

    Attributes:
      spec: what a block is, and its layout in the pool.
      data: one array `[num_blocks, *spec.block_shape]`, or a tuple of num_layers arrays
        `[num_blocks, *spec.block_shape[1:]]`.

    Build one with `KVPool.zeros` or `KVPool.wrap`.
    """

    def __init__(self, data: Any, spec: BlockSpec) -> None:
        self.data = data
        self.spec = spec

    @classmethod
    def zeros(
        cls,
        spec: BlockSpec,
        num_blocks: int,
        contiguous: bool = True,
        memory_kind: str = "device",
        *,
        device: Any = None,
    ) -> KVPool:
        """A pool of zeros.

        Args:
          spec: what a block is.
          num_blocks: blocks in the pool, at least 1.
          contiguous: one array, best to transfer; False gives one array per layer, as
            many engines hold them.
          memory_kind: "device", or "pinned_host" for host memory that kernels read and
            write over the link.
          device: a jax device or sharding; the default device when None.

        Raises:
          ValueError: for a bad count or memory kind, or a layout whose layers cannot be
            separate arrays.
        """
        where = "KVPool.zeros"
        _check_spec(where, spec)
        _checks.check_positive(where, num_blocks=num_blocks)
        _checks.check_choice(where, "memory_kind", memory_kind, MEMORY_KINDS)
        if num_blocks * spec.block_size >= 2**31:
            raise ValueError(
                f"{where}: num_blocks * block_size must be below 2**31 (slots are "
                f"int32), got {num_blocks} * {spec.block_size}"
            )
        sharding = _sharding(device, memory_kind)
        if contiguous:
            return cls(_zeros((num_blocks, *spec.block_shape), spec, sharding), spec)
        _check_layered(where, spec)
        shape = (num_blocks, *spec.block_shape[1:])
        layers = range(spec.num_layers)
        return cls(tuple(_zeros(shape, spec, sharding) for _ in layers), spec)

    @classmethod
    def wrap(cls, arrays: Any, spec: BlockSpec) -> KVPool:
        """A pool over arrays that exist already; nothing is copied.

        Args:
          arrays: one array `[num_blocks, *spec.block_shape]`, or a sequence of
            num_layers arrays `[num_blocks, *spec.block_shape[1:]]`.
          spec: what a block is.

        Raises:
          ValueError: when a shape does not fit the spec, or the arrays differ.
          TypeError: when a dtype is not the spec's.
        """
        where = "KVPool.wrap"
        _check_spec(where, spec)
        if not isinstance(arrays, (list, tuple)):
            _check_pool_array(where, "arrays", arrays, spec.block_shape, spec)
            return cls(jnp.asarray(arrays), spec)
        _check_layered(where, spec)
        if len(arrays) != spec.num_layers:
            raise ValueError(
                f"{where}: arrays must be one array, or one for each of the spec's "
                f"{spec.num_layers} layers, got {len(arrays)}"
            )
        for i, x in enumerate(arrays):
            _check_pool_array(where, f"arrays[{i}]", x, spec.block_shape[1:], spec)
            if x.shape != arrays[0].shape:
                raise ValueError(
                    f"{where}: all layers must hold the same blocks; arrays[0] is "
                    f"{_checks.show(arrays[0])}, arrays[{i}] is {_checks.show(x)}"
                )
        return cls(tuple(jnp.asarray(x) for x in arrays), spec)

    @property
    def contiguous(self) -> bool:
        """Whether the pool is one array."""
        return not isinstance(self.data, tuple)

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The pool's arrays: one, or one per layer."""
        return self.data if isinstance(self.data, tuple) else (self.data,)

    @property
    def num_blocks(self) -> int:
        """How many blocks the pool holds."""
        return int(self.arrays[0].shape[0])

    @property
    def memory_kind(self) -> str:
        """ "device" or "pinned_host"."""
        space = jax.typeof(self.arrays[0]).memory_space
        return "pinned_host" if space == jax.memory.Space.Host else "device"

    @property
    def nbytes(self) -> int:
        """The bytes of all blocks."""
        return self.num_blocks * self.spec.block_bytes

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey("data"), self.data)], self.spec

    @classmethod
    def tree_unflatten(cls, spec: BlockSpec, children: Sequence[Any]) -> KVPool:
        return cls(children[0], spec)

    def __repr__(self) -> str:
        held = "one array" if self.contiguous else f"{len(self.arrays)} layer arrays"
        return f"KVPool({held} of {_checks.show(self.arrays[0])}, {self.spec})"


# ---- moving blocks -------------------------------------------------------------------


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
    _check_pool(where, "pool", pool)
    ids = _checks.check_int32(where, "ids", ids, "[n]", 1)
    target = find_layout(where, "layout", layout, pool.spec.inner)
    start, stop = _checks.check_heads(where, heads, pool.spec.num_kv_heads)
    part = pool.spec.replace(num_kv_heads=stop - start)
    extents = (("N", ids.shape[0]), *part.sizes.items())
    copy = Copy(
        extents=extents,
        src=_pool_side(pool, ("B",), start if heads else None),
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
    _check_pool(where, "pool", pool)
    ids = _checks.check_int32(where, "ids", ids, "[n]", 1)
    source = find_layout(where, "layout", layout, pool.spec.inner)
    start, stop = _checks.check_heads(where, heads, pool.spec.num_kv_heads)
    part = pool.spec.replace(num_kv_heads=stop - start)
    _check_operand(
        where, "blocks", blocks, (ids.shape[0], *source.shape(part)), pool.spec
    )
    extents = (("N", ids.shape[0]), *part.sizes.items())
    copy = Copy(
        extents=extents,
        src=Side(Form((), (("N",), *source.groups)), extents),
        dst=_pool_side(pool, ("B",), start if heads else None),
        in_place=True,
        backend=_backend(where, implementation, pool),
    )
    results = block_copy(copy, [jnp.asarray(blocks)], pool.arrays, (None, ids))
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
    _check_pool(where, "pool", pool)
    src_ids, dst_ids = _check_id_pair(where, src_ids, dst_ids)
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
    _check_pool(where, "src_pool", src_pool)
    _check_pool(where, "dst_pool", dst_pool)
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
    _check_pool(where, "pool", pool)
    spec = pool.spec
    slots = _checks.check_int32(where, "slots", slots, "[tokens]", 1)
    tokens = slots.shape[0]
    shape = (tokens, spec.num_kv_heads, spec.head_dim)
    _check_operand(where, "k", k, shape, spec)
    if spec.num_outer == 1:
        if v is not None:
            raise ValueError(
                f"{where}: v must be None for a pool with num_outer 1, got "
                f"{_checks.show(v)}; pass the combined cache as k"
            )
        values = [jnp.asarray(k)]
    else:
        _check_operand(where, "v", v, shape, spec)
        values = [jnp.asarray(k), jnp.asarray(v)]

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
    if isinstance(layer, (int, np.integer)) and not isinstance(layer, bool):
        if not 0 <= layer < pool.spec.num_layers:
            raise IndexError(
                f"{where}: layer must be 0 to {pool.spec.num_layers - 1}, got {layer}"
            )
        if pool.contiguous:
            side = Side(form, tuple(sizes.items()), index, (("L", int(layer)),))
            return side, pool.arrays, None
        del sizes["L"]
        side = Side(Form((), form.array), tuple(sizes.items()), index)
        return side, [pool.arrays[int(layer)]], None
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


# ---- building and checking -----------------------------------------------------------


def _sharding(device: Any, memory_kind: str) -> Any:
    if isinstance(device, jax.sharding.Sharding):
        return device.with_memory_kind(memory_kind)
    if device is None:
        device = jnp.zeros(()).devices().pop()
    return jax.sharding.SingleDeviceSharding(device, memory_kind=memory_kind)


def _zeros(shape: tuple[int, ...], spec: BlockSpec, sharding: Any) -> jax.Array:
    if sharding.memory_kind == "device":
        return jnp.zeros(shape, spec.dtype, device=sharding)
    # Straight from host memory: a jit would stage the whole pool on the device.
    return jax.device_put(np.zeros(shape, spec.dtype), sharding)


def _check_spec(where: str, spec: Any) -> None:
    if not isinstance(spec, BlockSpec):
        raise TypeError(
            f"{where}: spec must be a BlockSpec, got {type(spec).__name__}; build one "
            "with BlockSpec(num_layers, num_outer, block_size, num_kv_heads, head_dim, "
            "dtype)"
        )


def _check_pool(where: str, name: str, pool: Any) -> None:
    if not isinstance(pool, KVPool):
        raise TypeError(
            f"{where}: {name} must be a KVPool, got {type(pool).__name__}; wrap arrays "
            "with KVPool.wrap(arrays, spec)"
        )
    for i, x in enumerate(pool.arrays):
        traced = isinstance(x, jax.core.Tracer)
        if isinstance(x, jax.Array) and not traced and x.is_deleted():
            raise RuntimeError(
                f"{where}: {name} was donated or deleted (array {i}); use the pool "
                "that the donating call returned"
            )


def _check_layered(where: str, spec: BlockSpec) -> None:
    if spec.block_layout.groups[0] != ("L",):
        raise ValueError(
            f"{where}: a pool of one array per layer needs a layout with layers "
            f"outermost, like 'NHD' or 'HND', got {spec.block_layout.name!r}; use a "
            "contiguous pool"
        )


def _check_pool_array(
    where: str, name: str, x: Any, block_shape: tuple[int, ...], spec: BlockSpec
) -> None:
    _checks.check_array(where, name, x)
    if x.ndim != 1 + len(block_shape) or tuple(x.shape[1:]) != block_shape:
        shape = ", ".join(map(str, block_shape))
        raise ValueError(
            f"{where}: {name} must have shape [num_blocks, {shape}] "
            f"({spec.block_layout.name} of the spec), got {_checks.show(x)}"
        )
    if x.dtype != spec.dtype:
        raise TypeError(
            f"{where}: {name} must have the spec's dtype {spec.dtype}, got "
            f"{_checks.show(x)}"
        )


def _check_operand(
    where: str, name: str, x: Any, shape: tuple[int, ...], spec: BlockSpec
) -> None:
    _checks.check_array(where, name, x)
    if tuple(x.shape) != shape:
        raise ValueError(
            f"{where}: {name} must have shape {list(shape)}, got {_checks.show(x)}"
        )
    if x.dtype != spec.dtype:
        raise TypeError(
            f"{where}: {name} must have the pool's dtype {spec.dtype}, got "
            f"{_checks.show(x)}; cast it with .astype({str(spec.dtype)!r})"
        )


def _check_id_pair(where: str, src: Any, dst: Any) -> tuple[jax.Array, jax.Array]:
    src = _checks.check_int32(where, "src_ids", src, "[n]", 1)
    dst = _checks.check_int32(where, "dst_ids", dst, "[n]", 1)
    if src.shape != dst.shape:
        raise ValueError(
            f"{where}: src_ids and dst_ids must have one length, got {src.shape[0]} "
            f"and {dst.shape[0]}"
        )
    return src, dst
