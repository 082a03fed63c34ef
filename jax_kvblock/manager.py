"""`BlockManager`: a pool, who holds which of its blocks, and safe updates of it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock import _checks, _dlpack
from jax_kvblock._leases import FreeList, Lease
from jax_kvblock.block import Block, BlockList, Geometry
from jax_kvblock.layout import BlockSpec, Layout
from jax_kvblock.pool import KVPool
from jax_kvblock.transfer import gather_blocks, scatter_blocks


class PoolExhaustedError(MemoryError):
    """The manager has fewer free blocks than were asked for. Nothing was allocated."""


class PoolDoubledWarning(UserWarning):
    """A pool was replaced while DLPack exports still hold the memory of the old one."""


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
        sharding = isinstance(device, jax.sharding.Sharding)
        if sharding and len(device.device_set) != 1:
            raise ValueError(
                f"BlockManager: device must be one device, got {device}; for a pool "
                "over several devices use KVPool.zeros with the sharding"
            )
        heads, dim = _head_extents(inner_dim, num_kv_heads, head_dim)
        self._flat_tail = num_kv_heads is None and head_dim is None
        self._spec = BlockSpec(
            num_layers, num_outer, page_size, heads, dim, dtype, layout
        )
        self._pool: KVPool | None = KVPool.zeros(
            self._spec,
            num_blocks,
            contiguous=contiguous,
            memory_kind=memory_kind,
            device=device,
        )
        self._num_blocks = self._pool.num_blocks
        self._free_list = FreeList(self._num_blocks)
        self._exports: dict[int, tuple[int, int | None]] = {}
        self._geometry = Geometry.of(self._spec, contiguous, self._flat_tail)
        self._memory_kind = memory_kind
        self._devices = self._pool.arrays[0].devices()
        self._dl_device = _dlpack.device_of(self._pool.arrays[0])

    # ---- blocks ----

    def allocate_blocks(self, count: int) -> BlockList:
        """Takes `count` free blocks. Their contents are whatever was there before.

        Raises:
          PoolExhaustedError: when fewer blocks are free; then none is taken.
          TypeError, ValueError: when count is not an integer of at least 0.
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
        return BlockList(self, [Block(self, Lease(self._free_list, i)) for i in ids])

    def free(self, blocks: BlockList | Block | Iterable[Block]) -> None:
        """Gives blocks back. A block that is exported by DLPack is reused only later,
        when its last export is gone.

        Raises:
          ValueError: for a block of another manager, or one that is freed already; then
            nothing is freed.
          TypeError: for anything that is not a block.
        """
        if isinstance(blocks, Block):
            blocks = [blocks]
        if not isinstance(blocks, Iterable):
            raise TypeError(
                "free: blocks must be a BlockList, a Block or an iterable of blocks, "
                f"got {type(blocks).__name__}"
            )
        chosen = list(blocks)
        with self._free_list.lock:  # of two threads that free one block, one fails
            self._check_freeable(chosen)
            for block in chosen:
                block._lease.release()

    def _check_freeable(self, chosen: list[Block]) -> None:
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
        if any(x.is_deleted() for x in new.arrays):
            raise RuntimeError(
                "BlockManager.pool: must be a living pool, got one that was donated or "
                "deleted; put back the pool that the donating call returned"
            )
        _check_like("BlockManager.pool", old, new)
        if new.memory_kind != self._memory_kind:
            raise ValueError(
                f"BlockManager.pool: must stay in {self._memory_kind} memory, got a "
                f"pool in {new.memory_kind}"
            )
        if any(x.devices() != self._devices for x in new.arrays):
            raise ValueError(
                "BlockManager.pool: must stay on its device; move it back with "
                "jax.device_put"
            )
        if self._exports and not _same_memory(old, new):
            self._warn_doubled(stacklevel=3)
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
          TypeError, ValueError: when `step` returns something else; then nothing has
            run and the pool is as it was.
          BufferError: on a GPU, when DLPack exports of the pool are alive: their memory
            cannot be given to the step. The message names them. On the CPU XLA copies
            the pool instead, and a `PoolDoubledWarning` says so.
        """
        pool = self._open_pool("update")
        if not self._alive:
            raise RuntimeError(
                "update: the pool was donated or deleted; put the new one back with "
                "manager.pool = ..."
            )
        self._check_donation("update", pool)
        new, result = _donating(step)(pool, *args)
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
            self._warn_doubled(stacklevel=4)
            return
        raise BufferError(
            f"{where}: the pool cannot be donated while DLPack exports of it are "
            f"alive: {'; '.join(self.live_exports)}. Delete those tensors (and "
            "everything that views them) first, or export a copy with copy=True"
        )

    def _warn_doubled(self, stacklevel: int) -> None:
        warnings.warn(
            "the pool was updated while DLPack exports of it are alive: "
            f"{'; '.join(self.live_exports)}. They keep the old memory, so the pool "
            "takes twice its size and they do not see the update; delete them before "
            "updating",
            PoolDoubledWarning,
            stacklevel=stacklevel,
        )

    def _write(self, block_id: int, blocks: jax.Array) -> None:
        """Replaces one block; `blocks` is `[1, nl, no, ...]` in NHD or HND order."""
        self.update(_scatter, np.array([block_id], np.int32), blocks)

    def _write_layer(self, block_id: int, layer: int, piece: jax.Array) -> None:
        place = np.array([block_id, layer], np.int32)
        self.update(_scatter_layer, place, piece)


def _scatter(pool: KVPool, ids: jax.Array, blocks: jax.Array) -> KVPool:
    return scatter_blocks(pool, ids, blocks, pool.spec.inner)


def _scatter_layer(pool: KVPool, place: jax.Array, piece: jax.Array) -> KVPool:
    """One layer is a block of its own, once the others are read and written back."""
    inner = pool.spec.inner
    block = gather_blocks(pool, place[:1], inner)
    block = jax.lax.dynamic_update_slice_in_dim(block, piece[None, None], place[1], 1)
    return scatter_blocks(pool, place[:1], block, inner)


@functools.lru_cache(maxsize=256)
def _donating(step: Callable[..., Any]) -> Any:
    """The jitted step. What it returns is checked while tracing: nothing is lost."""

    def checked(pool: KVPool, *args: Any) -> tuple[KVPool, Any]:
        out = step(pool, *args)
        new, result = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
        if not isinstance(new, KVPool):
            raise TypeError(
                "update: step must return the new KVPool, or (new KVPool, result), got "
                f"{type(out).__name__}"
            )
        _check_like("update: the step's pool", pool, new)
        return new, result

    return jax.jit(checked, donate_argnums=0)


def _check_like(where: str, old: KVPool, new: KVPool) -> None:
    shapes = [[_checks.show(x) for x in pool.arrays] for pool in (old, new)]
    if new.spec != old.spec or shapes[0] != shapes[1]:
        raise ValueError(
            f"{where}: must be like the pool it replaces, {old!r}, got {new!r}"
        )


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
