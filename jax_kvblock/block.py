"""`BlockManager`, `BlockList`, `Block` and `Layer`: a pool's blocks as Python objects.

A manager owns a `KVPool` and a list of free blocks. Blocks are counted references: when
the last handle to a block is freed or collected, and no DLPack export of it is alive,
the block returns to the free list.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock import _checks, _dlpack
from jax_kvblock.layout import BlockSpec, Layout
from jax_kvblock.pool import KVPool, gather_blocks, scatter_blocks


class PoolExhaustedError(MemoryError):
    """The manager has fewer free blocks than were asked for. Nothing was allocated."""


class PoolDoubledWarning(UserWarning):
    """A pool was replaced while DLPack exports still hold the memory of the old one."""


class _FreeList:
    """Which blocks are free, and how many references hold each of the others."""

    def __init__(self, num_blocks: int) -> None:
        self._lock = threading.RLock()  # a finalizer may run inside a locked region
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        with self._lock:
            if count > len(self._free):
                return None
            ids = [self._free.pop() for _ in range(count)]
            for i in ids:
                self._references[i] = 1
            return ids

    def retain(self, block_id: int) -> None:
        with self._lock:
            self._references[block_id] += 1

    def release(self, block_id: int) -> None:
        with self._lock:
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free.append(block_id)

    def references(self, block_id: int) -> int:
        return self._references[block_id]


class _Lease:
    """One counted reference to a block, given back when it is released or collected."""

    __slots__ = ("block_id", "free_list", "released")

    def __init__(self, free_list: _FreeList, block_id: int) -> None:
        self.free_list = free_list
        self.block_id = block_id
        self.released = False

    def release(self) -> None:
        if not self.released:
            self.released = True
            self.free_list.release(self.block_id)

    def __del__(self) -> None:
        self.release()


class _Export(_Lease):
    """The reference that a DLPack export holds; listed among the live ones."""

    __slots__ = ("live",)

    def __init__(self, view: _View) -> None:
        lease, manager = view._lease, view.manager
        lease.free_list.retain(lease.block_id)
        super().__init__(lease.free_list, lease.block_id)
        self.live = manager._exports
        self.live[id(self)] = view._key

    def release(self) -> None:
        super().release()
        self.live.pop(id(self), None)


@dataclasses.dataclass(frozen=True)
class _Geometry:
    """How blocks and layers lie in the pool's arrays, in elements; computed once."""

    shape: tuple[int, ...]  # of a block
    strides: tuple[int, ...]
    block_stride: int
    layer_stride: int  # 0 when every layer is an array of its own

    @classmethod
    def of(cls, spec: BlockSpec, contiguous: bool, flat_tail: bool) -> _Geometry:
        stored = "".join(axis for group in spec.block_layout.groups for axis in group)
        if not contiguous:
            stored = stored.replace("L", "")
        strides, stride = {"L": 0}, 1
        for axis in reversed(stored):
            strides[axis] = stride
            stride *= spec.sizes[axis]
        # What a user sees: HND blocks show heads before tokens, whatever the pool's
        # layout; a flat tail shows no heads.
        order = "LOHTD" if spec.inner == "HND" else "LOTHD"
        if flat_tail:
            order = order.replace("H", "")
        return cls(
            tuple(spec.sizes[axis] for axis in order),
            tuple(strides[axis] for axis in order),
            stride,
            strides["L"],
        )


class BlockManager:
    """A pool of KV-cache blocks and who holds which of them.

    Args:
      num_layers: layers in a block.
      page_size: tokens to a block.
      inner_dim: num_kv_heads · head_dim. Given alone, blocks have the tail
        `[page_size, inner_dim]` instead of `[page_size, num_kv_heads, head_dim]`.
      num_kv_heads, head_dim: the KV heads and their size.
      num_outer: 2 for K and V, 1 for a combined cache.
      dtype: the cache's dtype.
      num_blocks: blocks in the pool.
      layout: "NHD", "HND", "universal", "operational" or a `Layout`.
      memory_kind: "device" or "pinned_host".
      contiguous: one array for the pool, or one per layer.
      device: a jax device; the default device when None.

    Raises:
      ValueError: for extents that do not fit together.

    Example:
      >>> manager = BlockManager(32, 16, num_kv_heads=8, head_dim=128, num_blocks=1024)
      >>> with manager.allocate_blocks(4) as blocks:
      ...     manager.pool = prefill(manager.pool, blocks.ids)   # jitted, pool donated
      ...     keys = torch.from_dlpack(blocks[0][0])             # zero copy
    """

    def __init__(
        self,
        num_layers: int,
        page_size: int,
        inner_dim: int | None = None,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        num_outer: int = 2,
        dtype: Any = jnp.bfloat16,
        num_blocks: int = 64,
        layout: str | Layout = "NHD",
        memory_kind: str = "device",
        contiguous: bool = True,
        device: Any = None,
    ) -> None:
        heads, dim = _head_extents(inner_dim, num_kv_heads, head_dim)
        self._flat_tail = num_kv_heads is None and head_dim is None
        self._spec = BlockSpec(
            num_layers, num_outer, page_size, heads, dim, dtype, layout
        )
        self._pool: KVPool | None = KVPool.zeros(
            self._spec, num_blocks, contiguous, memory_kind, device=device
        )
        self._num_blocks = num_blocks
        self._free_list = _FreeList(num_blocks)
        self._exports: dict[int, tuple[int, int | None]] = {}
        self._geometry = _Geometry.of(self._spec, contiguous, self._flat_tail)
        self._devices = self._pool.arrays[0].devices()
        self._dl_device = _dlpack.device_of(self._pool.arrays[0])

    # ---- blocks ----

    def allocate_blocks(self, count: int) -> BlockList:
        """Takes `count` free blocks. Their contents are whatever was there before.

        Raises:
          PoolExhaustedError: when fewer blocks are free; then none is taken.
          ValueError: when count is not an integer of at least 0.
        """
        self._open_pool("allocate_blocks")
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)):
            raise TypeError(f"allocate_blocks: count must be an integer, got {count!r}")
        if count < 0:
            raise ValueError(f"allocate_blocks: count must be at least 0, got {count}")
        ids = self._free_list.take(int(count))
        if ids is None:
            raise PoolExhaustedError(
                f"allocate_blocks: {count} blocks asked for, "
                f"{self.num_free_blocks} of {self.num_blocks} free; free some, or "
                "build the manager with a larger num_blocks"
            )
        return BlockList(self, [Block(self, _Lease(self._free_list, i)) for i in ids])

    def free(self, blocks: BlockList | Block | Iterable[Block]) -> None:
        """Gives blocks back. A block that is exported by DLPack is reused only later,
        when its last export is gone.

        Raises:
          ValueError: for a block of another manager, or one that is freed already; then
            nothing is freed.
          TypeError: for anything that is not a block.
        """
        chosen = [blocks] if isinstance(blocks, Block) else list(blocks)
        seen: set[int] = set()
        for i, block in enumerate(chosen):
            if not isinstance(block, Block):
                raise TypeError(
                    f"free: blocks[{i}] must be a Block, got {type(block).__name__}"
                )
            if block.manager is not self:
                raise ValueError(
                    f"free: blocks[{i}] (block {block.id}) belongs to another manager; "
                    "free it there"
                )
            if block._lease.released or id(block) in seen:
                raise ValueError(
                    f"free: blocks[{i}] (block {block.id}) is freed already; free each "
                    "block once"
                )
            seen.add(id(block))
        for block in chosen:
            block._lease.release()

    @property
    def num_free_blocks(self) -> int:
        """How many blocks can be allocated now."""
        return len(self._free_list)

    @property
    def num_blocks(self) -> int:
        """How many blocks the pool has."""
        return self._num_blocks

    # ---- the pool ----

    @property
    def spec(self) -> BlockSpec:
        """What a block is."""
        return self._spec

    @property
    def pool(self) -> KVPool:
        """The pool. Take it into a jit, donate it there, and put the new one back."""
        return self._open_pool("pool")

    @pool.setter
    def pool(self, new: KVPool) -> None:
        old = self._open_pool("pool")
        if not isinstance(new, KVPool):
            raise TypeError(
                f"BlockManager.pool: must be a KVPool, got {type(new).__name__}; "
                "return the pool from your jitted step"
            )
        if any(isinstance(x, jax.core.Tracer) for x in new.arrays):
            raise TypeError(
                "BlockManager.pool: must be a pool of arrays, got one that is being "
                "traced; return the pool from the jitted function and set it outside"
            )
        shapes = [_checks.show(x) for x in new.arrays]
        if new.spec != self._spec or shapes != [_checks.show(x) for x in old.arrays]:
            raise ValueError(
                f"BlockManager.pool: must be like the pool it replaces, {old!r}, got "
                f"{new!r}"
            )
        if new.memory_kind != old.memory_kind:
            raise ValueError(
                f"BlockManager.pool: must stay in {old.memory_kind} memory, got a pool "
                f"in {new.memory_kind}"
            )
        if new.arrays[0].devices() != self._devices:
            raise ValueError(
                "BlockManager.pool: must stay on its device; move it back with "
                "jax.device_put"
            )
        if self._exports and not _same_memory(old, new):
            self._warn_doubled()
        self._pool = new

    def update(self, step: Callable[..., Any], *args: Any) -> Any:
        """Runs `step(pool, *args)` jitted with the pool donated, and keeps the new
        pool.

        Args:
          step: returns the new pool, or a tuple (new pool, result).
          *args: further arguments of the jitted call.

        Returns:
          The result, or None when `step` returns the pool alone.

        Raises:
          BufferError: on a GPU, when DLPack exports of the pool are alive: their memory
            cannot be given to the step. The message names them. On the CPU XLA copies
            the pool instead, and a `PoolDoubledWarning` says so.
        """
        pool = self._open_pool("update")
        self._check_donation("update", pool)
        out = _donating(step)(pool, *args)
        new, result = out if isinstance(out, tuple) else (out, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PoolDoubledWarning)  # said already
            self.pool = new
        return result

    @property
    def live_exports(self) -> list[str]:
        """The DLPack exports that are alive, in words."""
        return [
            f"block {block}" if layer is None else f"block {block}, layer {layer}"
            for block, layer in sorted(self._exports.values(), key=str)
        ]

    def close(self) -> None:
        """Drops the pool. Blocks become invalid; exports stay valid until they die."""
        self._pool = None

    def __enter__(self) -> BlockManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"BlockManager({self.num_free_blocks} of {self.num_blocks} blocks free, "
            f"{self._spec})"
        )

    # ---- shared by the objects below ----

    def _open_pool(self, where: str) -> KVPool:
        if self._pool is None:
            raise RuntimeError(f"BlockManager.{where}: the manager is closed")
        return self._pool

    @property
    def _alive(self) -> bool:
        pool = self._pool
        if pool is None:
            return False
        if pool.contiguous:  # the common case, on the path of every export
            return not pool.data.is_deleted()
        return not any(x.is_deleted() for x in pool.data)

    def _check_donation(self, where: str, pool: KVPool) -> None:
        if not self._exports:
            return
        if _platform(pool) == "cpu":
            self._warn_doubled()
            return
        raise BufferError(
            f"{where}: the pool cannot be donated while DLPack exports of it are "
            f"alive: {'; '.join(self.live_exports)}. Delete those tensors (and "
            "everything that views them) first, or export a copy with copy=True"
        )

    def _warn_doubled(self) -> None:
        warnings.warn(
            "the pool was updated while DLPack exports of it are alive: "
            f"{'; '.join(self.live_exports)}. They keep the old memory, so the pool "
            "takes twice its size and they do not see the update; delete them before "
            "updating",
            PoolDoubledWarning,
            stacklevel=3,
        )

    def _write(self, block_id: int, blocks: jax.Array) -> None:
        """Replaces one block; `blocks` is `[1, nl, no, ...]` in NHD or HND order."""
        ids = np.array([block_id], np.int32)
        self.update(functools.partial(_scatter, self._spec.inner), ids, blocks)

    def _write_layer(self, block_id: int, layer: int, piece: jax.Array) -> None:
        place = np.array([block_id, layer], np.int32)
        self.update(functools.partial(_scatter_layer, self._spec.inner), place, piece)


def _scatter(inner: str, pool: KVPool, ids: jax.Array, blocks: jax.Array) -> KVPool:
    return scatter_blocks(pool, ids, blocks, inner)


def _scatter_layer(
    inner: str, pool: KVPool, place: jax.Array, piece: jax.Array
) -> KVPool:
    """One layer is a block of its own, once the others are read and written back."""
    block = gather_blocks(pool, place[:1], inner)
    block = jax.lax.dynamic_update_slice_in_dim(block, piece[None, None], place[1], 1)
    return scatter_blocks(pool, place[:1], block, inner)


@functools.lru_cache(maxsize=256)
def _donating(step: Callable[..., Any]) -> Any:
    if isinstance(step, functools.partial):  # partials are equal only to themselves
        return _donating_partial(step.func, step.args)
    return jax.jit(step, donate_argnums=0)


@functools.lru_cache(maxsize=256)
def _donating_partial(func: Callable[..., Any], bound: tuple[Any, ...]) -> Any:
    return jax.jit(functools.partial(func, *bound), donate_argnums=0)


class BlockList(Sequence["Block"]):
    """Blocks that were allocated together: a sequence, and a context that frees
    them.
    """

    def __init__(self, manager: BlockManager, blocks: list[Block]) -> None:
        self._manager = manager
        self._blocks = blocks

    @property
    def ids(self) -> np.ndarray:
        """The blocks' ids in the pool, int32 `[n]`: a page table of one sequence.

        Raises:
          ValueError: when one of the blocks is freed.
        """
        for i, block in enumerate(self._blocks):
            block._check_held(f"BlockList.ids: block [{i}]", ValueError)
        return np.array([block.id for block in self._blocks], np.int32)

    def page_table(self, max_blocks: int) -> np.ndarray:
        """The ids, padded with −1 to int32 `[max_blocks]`.

        Raises:
          ValueError: when there are more than `max_blocks` blocks.
        """
        if len(self) > max_blocks:
            raise ValueError(
                f"page_table: {len(self)} blocks do not fit max_blocks={max_blocks}"
            )
        table = np.full(max_blocks, -1, np.int32)
        table[: len(self)] = self.ids
        return table

    def share(self) -> BlockList:
        """New handles to the same blocks, each counted: the blocks outlive either
        list.
        """
        return BlockList(self._manager, [block.share() for block in self._blocks])

    def free(self) -> None:
        """Frees the blocks; see `BlockManager.free`."""
        self._manager.free(self)

    def to_list(self) -> list[Block]:
        """The blocks as a Python list."""
        return list(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> BlockList: ...
    def __getitem__(self, index: int | slice) -> Block | BlockList:
        if isinstance(index, slice):
            return BlockList(self._manager, self._blocks[index])
        return self._blocks[_index("BlockList", index, len(self._blocks), "blocks")]

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def __enter__(self) -> BlockList:
        return self

    def __exit__(self, *exc: object) -> None:
        held = [block for block in self._blocks if not block._lease.released]
        self._manager.free(held)

    def __repr__(self) -> str:
        return f"BlockList({[block.id for block in self._blocks]})"


class _View:
    """What `Block` and `Layer` share: a strided part of the pool, in any layout."""

    manager: BlockManager
    _lease: _Lease
    _key: tuple[int, int | None]  # (block, layer)
    _skip: int  # leading axes of a block that the view does not have

    def _place(self) -> tuple[jax.Array, int]:
        """The array that holds the view, and the view's offset in it, in elements."""
        raise NotImplementedError  # pragma: no cover

    def _read(self) -> jax.Array:
        """A copy, as a jax array."""
        raise NotImplementedError  # pragma: no cover

    # ---- what it is ----

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, whatever the pool's layout."""
        return self.manager._geometry.shape[self._skip :]

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return self.size * self.dtype.itemsize

    @property
    def dtype(self) -> np.dtype:
        """The element type, as NumPy (with ml_dtypes) names it."""
        return self.manager.spec.dtype

    @property
    def device_id(self) -> int:
        """The index of the device: 0 on the CPU."""
        return self.manager._dl_device[1]

    @property
    def _name(self) -> str:
        block, layer = self._key
        return f"block {block}" if layer is None else f"block {block}, layer {layer}"

    def __bool__(self) -> bool:
        return not self._lease.released and self.manager._alive

    def _check_held(self, where: str, error: type[Exception]) -> None:
        if self._lease.released:
            raise error(f"{where} ({self._name}) is freed; allocate a new one")
        if not self.manager._alive:
            raise error(
                f"{where} ({self._name}): its pool was donated or closed; put the new "
                "pool back with manager.pool = ..."
            )

    # ---- out ----

    def __jax_array__(self) -> jax.Array:
        self._check_held(type(self).__name__, RuntimeError)
        return self._read()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """A NumPy copy (NumPy cannot share a buffer of every dtype and device)."""
        if copy is False:
            raise ValueError(
                f"{self._name}: np.asarray copies; for a view of CPU memory use "
                "np.from_dlpack"
            )
        array = np.array(self.__jax_array__())
        return array if dtype is None else array.astype(dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        """(device type, device id), as DLPack numbers them."""
        self._check_held("__dlpack_device__", BufferError)
        return self.manager._dl_device

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule, zero copy unless a copy is asked for or needed.

        The tensor made of it keeps the pool's memory alive and the block allocated.

        Args:
          stream: the consumer's CUDA stream, which will wait for pending writes; None
            waits on the host; -1 does not wait.
          max_version: the newest DLPack version the consumer reads; a versioned capsule
            from (1, 0) on.
          dl_device: the device to export to: the block's own, or the CPU, which copies
            a GPU block and shows pinned host memory as what it is.
          copy: True copies always, False never, None when it must.

        Raises:
          BufferError: for a freed block, a pool that is gone, another device, or a copy
            that is needed while copy is False.
        """
        self._check_held("__dlpack__", BufferError)
        device = self.manager._dl_device
        if dl_device is not None and tuple(dl_device) != device:
            # Pinned host memory is CPU memory, too: shown as such on request.
            if (device[0], tuple(dl_device)) == (_dlpack.CUDA_HOST, _dlpack.CPU_DEVICE):
                device = _dlpack.CPU_DEVICE
            else:
                return self._export_copy(stream, max_version, dl_device, copy)
        if copy:
            return self._export_copy(stream, max_version, dl_device, copy)
        array, offset = self._place()
        geometry = self.manager._geometry
        return _dlpack.export(
            array,
            offset,
            geometry.shape[self._skip :],
            geometry.strides[self._skip :],
            device,
            lease=_Export(self),
            stream=stream,
            max_version=max_version,
        )

    def _export_copy(
        self,
        stream: Any,
        max_version: tuple[int, int] | None,
        dl_device: tuple[int, int] | None,
        copy: bool | None,
    ) -> Any:
        device = self.manager._dl_device
        target = device if dl_device is None else (int(dl_device[0]), int(dl_device[1]))
        if target not in (device, _dlpack.CPU_DEVICE):
            raise BufferError(
                f"__dlpack__: {self._name} is on DLPack device {device}, not {target}; "
                "only its own device and the CPU (1, 0) are served. Move it with "
                "jax.device_put(jnp.asarray(block), device)"
            )
        if copy is False:
            raise BufferError(
                f"__dlpack__: {self._name} is on DLPack device {device}; exporting it "
                f"to {target} needs a copy, and copy=False forbids it. Pass copy=True "
                "or None"
            )
        fresh = self._read()
        if target != device:
            fresh = jax.device_put(fresh, jax.devices("cpu")[0])
            stream = None
        return _dlpack.export(
            fresh,
            0,
            fresh.shape,
            _row_major(fresh.shape),
            _dlpack.device_of(fresh),
            lease=None,
            stream=stream,
            max_version=max_version,
            copied=True,
        )

    def _incoming(self, where: str, x: Any) -> jax.Array:
        """Any array or DLPack object, as a jax array where the pool is."""
        self._check_held(where, ValueError)
        if not isinstance(x, (jax.Array, np.ndarray)) and not isinstance(x, _View):
            if not hasattr(x, "__dlpack__"):
                raise TypeError(
                    f"{where}: x must be an array or a DLPack object, got "
                    f"{type(x).__name__}"
                )
            x = jnp.from_dlpack(x)
        shape, dtype = tuple(x.shape), np.dtype(x.dtype)
        if shape != self.shape:
            raise ValueError(
                f"{where}: x must have shape {list(self.shape)}, got {_checks.show(x)}"
            )
        if dtype != self.dtype:
            raise TypeError(
                f"{where}: x must have dtype {self.dtype}, got {_checks.show(x)}; cast "
                "it"
            )
        array = x.__jax_array__() if isinstance(x, _View) else x
        (device,) = self.manager._devices
        return jax.device_put(array, device)

    def _with_heads(self, array: jax.Array) -> jax.Array:
        """Puts back the axis that a flat tail hides."""
        if not self.manager._flat_tail:
            return array
        return jnp.expand_dims(array, self._head_axis)

    def _without_heads(self, array: jax.Array) -> jax.Array:
        if not self.manager._flat_tail:
            return array
        return jnp.squeeze(array, self._head_axis)

    @property
    def _head_axis(self) -> int:
        return -3 if self.manager.spec.inner == "HND" else -2


class Block(_View):
    """A KV-cache block: a sequence of layers, `[nl, no, nt, nh, hd]` (HND: `nh, nt`).

    It exports itself by DLPack without a copy. It is false once it is freed, or once
    its pool was donated and no new one was put back.
    """

    _skip = 0

    def __init__(self, manager: BlockManager, lease: _Lease) -> None:
        self.manager = manager
        self._lease = lease
        self._key = (lease.block_id, None)

    @property
    def id(self) -> int:
        """The block's index in the pool."""
        return self._lease.block_id

    @property
    def ref_count(self) -> int:
        """How many handles and DLPack exports hold the block."""
        return self._lease.free_list.references(self.id)

    def share(self) -> Block:
        """Another handle to the same block; it is free when all handles are."""
        self._check_held("share", ValueError)
        self._lease.free_list.retain(self.id)
        return Block(self.manager, _Lease(self._lease.free_list, self.id))

    def to_list(self) -> list[Layer]:
        """The layers as a Python list."""
        return list(self)

    def copy_from(self, x: Any) -> None:
        """Replaces the block's contents, in place.

        Args:
          x: an array or any DLPack object of the block's shape and dtype, on any
            device.

        Raises:
          ValueError: for a wrong shape, or when the block is freed.
          TypeError: for a wrong dtype.
          BufferError: on a GPU, while DLPack exports of the pool are alive.
        """
        array = self._with_heads(self._incoming("Block.copy_from", x))
        self.manager._write(self.id, array[None])

    def __len__(self) -> int:
        return self.manager.spec.num_layers

    def __getitem__(self, index: int) -> Layer:
        layers = self.manager.spec.num_layers
        return Layer(self, _index("Block", index, layers, "layers"))

    def __iter__(self) -> Iterator[Layer]:
        return (Layer(self, i) for i in range(self.manager.spec.num_layers))

    def __repr__(self) -> str:
        state = "" if self else ", freed" if self._lease.released else ", no pool"
        return f"Block(id={self.id}, {self.dtype}{list(self.shape)}{state})"

    def _place(self) -> tuple[jax.Array, int]:
        pool = self.manager.pool
        if not pool.contiguous:
            raise BufferError(
                f"{self._name}: its layers are separate arrays, so it is no single "
                "tensor; export its layers, or build the manager with contiguous=True"
            )
        return pool.arrays[0], self.id * self.manager._geometry.block_stride

    def _read(self) -> jax.Array:
        spec = self.manager.spec
        (block,) = _gather(spec.inner)(self.manager.pool, np.array([self.id], np.int32))
        return self._without_heads(block)


class Layer(_View):
    """One layer of a block: `[no, nt, nh, hd]` (HND: `nh, nt`)."""

    _skip = 1

    def __init__(self, block: Block, index: int) -> None:
        self.block = block
        self.index = index
        self.manager = block.manager
        self._lease = block._lease
        self._key = (block.id, index)

    def copy_from(self, x: Any) -> None:
        """Replaces the layer's contents, in place; see `Block.copy_from`."""
        array = self._with_heads(self._incoming("Layer.copy_from", x))
        self.manager._write_layer(self.block.id, self.index, array)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Layer({self._name}, {self.dtype}{list(self.shape)})"

    def _place(self) -> tuple[jax.Array, int]:
        pool, geometry = self.manager.pool, self.manager._geometry
        offset = self.block.id * geometry.block_stride
        if pool.contiguous:
            return pool.arrays[0], offset + self.index * geometry.layer_stride
        return pool.arrays[self.index], offset

    def _read(self) -> jax.Array:
        return self.block.__jax_array__()[self.index]


@functools.cache
def _gather(inner: str) -> Any:
    return jax.jit(lambda pool, ids: gather_blocks(pool, ids, inner))


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, stride = [], 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return tuple(reversed(strides))


def _index(kind: str, index: Any, length: int, noun: str) -> int:
    try:
        i = operator.index(index)
    except TypeError:
        raise TypeError(
            f"{kind} indices must be integers, got {type(index).__name__}"
        ) from None
    if not -length <= i < length:
        raise IndexError(f"{kind} index {i} is out of range: it has {length} {noun}")
    return i % length


def _head_extents(
    inner_dim: int | None, num_kv_heads: int | None, head_dim: int | None
) -> tuple[int, int]:
    where = "BlockManager"
    given = {"inner_dim": inner_dim, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    _checks.check_positive(where, **{k: v for k, v in given.items() if v is not None})
    if num_kv_heads is None and head_dim is None:
        if inner_dim is None:
            raise ValueError(f"{where}: give inner_dim, or num_kv_heads and head_dim")
        return 1, inner_dim
    if inner_dim is not None:
        if num_kv_heads is None and head_dim is not None:
            num_kv_heads = inner_dim // head_dim
        if head_dim is None and num_kv_heads is not None:
            head_dim = inner_dim // num_kv_heads
    if num_kv_heads is None or head_dim is None:
        raise ValueError(
            f"{where}: num_kv_heads and head_dim belong together, got "
            f"num_kv_heads={num_kv_heads}, head_dim={head_dim}"
        )
    if inner_dim is not None and inner_dim != num_kv_heads * head_dim:
        raise ValueError(
            f"{where}: inner_dim must be num_kv_heads * head_dim = "
            f"{num_kv_heads} * {head_dim}, got {inner_dim}"
        )
    return num_kv_heads, head_dim


def _platform(pool: KVPool) -> str:
    return next(iter(pool.arrays[0].devices())).platform


def _same_memory(old: KVPool, new: KVPool) -> bool:
    """Whether the new pool's arrays are the old ones (an old one may be donated)."""
    return all(a is b for a, b in zip(old.arrays, new.arrays, strict=True))
