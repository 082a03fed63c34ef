"""`BlockManager`: a pool, who holds which of its blocks, and safe updates of it."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable
from typing import overload

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_kvblock import _native
from jax_kvblock.blocks.layout import BlockSpec, Layout
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.core.types import Place
from jax_kvblock.objects.arguments import (
    check_device,
    check_first_pool,
    head_extents,
    one_name,
)
from jax_kvblock.objects.block import Block, BlockList, Result, free, without_handles
from jax_kvblock.objects.memory import Memory, in_words
from jax_kvblock.objects.view import Unpicklable


class PoolExhaustedError(MemoryError):
    """The manager has fewer free blocks than were asked for. Nothing was allocated."""


class _Garbage:
    """Blocks in reference cycles, which come back when Python collects garbage.

    A collection takes long in a large program, and an engine may run out of blocks at
    every step. So those that find nothing may take half a second, and beyond that one
    fiftieth of the time.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._wasted = 0.0

    def collect(self, free_list: _native.FreeList) -> bool:
        """Whether blocks came back."""
        began, before = time.monotonic(), len(free_list)
        if self._wasted > 0.5 + (began - self._start) / 50:
            return False
        gc.collect()
        if len(free_list) > before:
            return True
        self._wasted += time.monotonic() - began
        return False


class BlockManager(Unpicklable):
    """A pool of KV-cache blocks and who holds which of them.

    Threads may share it; see `lock`.

    Args:
      num_layers: layers in a block.
      block_size: tokens to a block.
      inner_dim: num_kv_heads · head_dim. Given alone, blocks have the tail
        `[block_size, inner_dim]` instead of `[block_size, num_kv_heads, head_dim]`.
      num_kv_heads, head_dim: the KV heads and their size.
      num_outer: 2 for K and V, 1 for a combined cache.
      dtype: the cache's dtype.
      num_blocks: blocks in the pool.
      layout: "NHD", "HND", "universal", "operational" or a `Layout`.
      memory_kind: "device" or "pinned_host".
      contiguous: one array for the pool, or one per layer.
      device: a jax device, or a platform's name like "cpu"; the default device when
        None.
      page_size: the old name of block_size.

    Raises:
      ValueError: for extents that do not fit together.
      TypeError: for anything but a device, or when block_size is missing or given
        twice.

    Example:
      >>> manager = BlockManager(32, 16, num_kv_heads=8, head_dim=128, num_blocks=1024)
      >>> with manager.allocate_blocks(4) as blocks:
      ...     manager.update(prefill, blocks.ids)   # prefill(pool, ids) -> new pool
      ...     keys = torch.from_dlpack(blocks[0][0].k)   # zero copy
    """

    def __init__(
        self,
        num_layers: int,
        block_size: int | None = None,
        inner_dim: int | None = None,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        num_outer: int = 2,
        dtype: DTypeLike = jnp.bfloat16,
        num_blocks: int = 64,
        layout: str | Layout = "NHD",
        memory_kind: str = "device",
        contiguous: bool = True,
        device: Place = None,
        page_size: int | None = None,
    ) -> None:
        check_device("BlockManager", device)
        tokens = one_name(block_size, page_size)
        heads, dim = head_extents(inner_dim, num_kv_heads, head_dim)
        spec = BlockSpec(num_layers, num_outer, tokens, heads, dim, dtype, layout)
        pool = KVPool.zeros(
            spec,
            num_blocks,
            contiguous=contiguous,
            memory_kind=memory_kind,
            device=device,
        )
        self._start(pool, flat_tail=num_kv_heads is None and head_dim is None)

    @classmethod
    def from_spec(
        cls,
        spec: BlockSpec,
        num_blocks: int = 64,
        *,
        contiguous: bool = True,
        memory_kind: str = "device",
        device: Place = None,
    ) -> BlockManager:
        """A manager of a new pool of zeros whose blocks are what `spec` says.

        Args:
          spec: what a block is.
          num_blocks, contiguous, memory_kind, device: as for `BlockManager`.

        Raises:
          TypeError, ValueError: as `KVPool.zeros` does.

        Example:
          >>> spec = BlockSpec(32, 2, 16, 8, 128, jnp.bfloat16)
          >>> manager = BlockManager.from_spec(spec, 1024)
        """
        check_device("BlockManager.from_spec", device)
        pool = KVPool.zeros(
            spec,
            num_blocks,
            contiguous=contiguous,
            memory_kind=memory_kind,
            device=device,
        )
        return cls._of(pool)

    @classmethod
    def from_pool(cls, pool: KVPool) -> BlockManager:
        """A manager of a pool that exists already; nothing is copied, all are free.

        The pool is the manager's from now on: its updates donate it.

        Args:
          pool: a `KVPool` of jax arrays on one device, contents and all.

        Raises:
          TypeError: when `pool` is no pool of jax arrays.
          ValueError: when it lies on several devices.
          RuntimeError: when it was donated or deleted.

        Example:
          >>> manager = BlockManager.from_pool(KVPool.wrap(cache, spec))
        """
        check_first_pool("BlockManager.from_pool", pool)
        return cls._of(pool)

    @classmethod
    def _of(cls, pool: KVPool) -> BlockManager:
        self = cls.__new__(cls)
        self._start(pool, flat_tail=False)
        return self

    def _start(self, pool: KVPool, flat_tail: bool) -> None:
        self._memory = Memory(pool, flat_tail=flat_tail)
        self._garbage = _Garbage()

    # ---- blocks ----

    def allocate_blocks(self, count: int) -> BlockList:
        """Takes `count` free blocks. Their contents are whatever was there before.

        Where too few are free it collects garbage first: blocks in reference cycles, as
        exceptions leave them, come back by that.

        Raises:
          PoolExhaustedError: when fewer blocks are free; then none is taken.
          TypeError, ValueError: when count is not an integer of at least 0.
        """
        # It takes no lock: another thread may compile.
        self._memory.check_open("allocate_blocks")
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)):
            raise TypeError(f"allocate_blocks: count must be an integer, got {count!r}")
        if count < 0:
            raise ValueError(f"allocate_blocks: count must be at least 0, got {count}")
        return BlockList(self, [Block(self, x) for x in self._take(int(count))])

    def _take(self, count: int) -> list[_native.Lease]:
        if count <= self.num_blocks:
            leases = self._memory.free_list.take(count)
            if leases is None and self._garbage.collect(self._memory.free_list):
                leases = self._memory.free_list.take(count)
            if leases is not None:
                return leases
        kept = in_words(self._memory.free_list.exports(freed_alone=True))
        kept_by = f" DLPack exports keep freed blocks: {'; '.join(kept)}." * bool(kept)
        raise PoolExhaustedError(
            f"allocate_blocks: {count} blocks asked for, {self.num_free_blocks} of "
            f"{self.num_blocks} free; free some, or build the manager with a larger "
            f"num_blocks.{kept_by}"
        )

    def free(self, blocks: BlockList | Block | Iterable[Block]) -> None:
        """Gives blocks back. A block that is exported by DLPack is reused only later,
        when its last export is gone.

        Raises:
          ValueError: for a block of another manager, or one that is freed already; then
            nothing is freed.
          TypeError: for anything that is not a block.
        """
        free(self, [blocks] if isinstance(blocks, Block) else blocks)

    @property
    def num_free_blocks(self) -> int:
        """How many blocks can be allocated now."""
        return len(self._memory.free_list)

    @property
    def num_blocks(self) -> int:
        """How many blocks the pool has."""
        return self._memory.num_blocks

    # ---- the pool ----

    @property
    def spec(self) -> BlockSpec:
        """What a block is."""
        return self._memory.spec

    @property
    def lock(self) -> threading.RLock:
        """What every use of the pool's memory holds: updates, reads, exports.

        Updates, `copy_from`, reads and exports of blocks take it by themselves. Hold it
        where you use the pool yourself and other threads update it; the thread that
        holds it may take it again. Counting blocks takes no lock.

        Example:
          >>> with manager.lock:                 # no update comes in between
          ...     cache = gather_blocks(manager.pool, blocks.ids)
        """
        return self._memory.lock

    @property
    def pool(self) -> KVPool:
        """The pool. Take it into a jit, donate it there, and put the new one back."""
        return self._memory.open_pool("pool")

    @pool.setter
    def pool(self, new: KVPool) -> None:
        self._memory.replace(new)

    @overload
    def update(
        self,
        step: Callable[..., KVPool],
        /,
        *args: object,
        static_argnames: str | Iterable[str] = ...,
        **kwargs: object,
    ) -> None: ...
    @overload
    def update(
        self,
        step: Callable[..., tuple[KVPool, Result]],
        /,
        *args: object,
        static_argnames: str | Iterable[str] = ...,
        **kwargs: object,
    ) -> Result: ...
    def update(
        self,
        step: Callable[..., KVPool | tuple[KVPool, Result]],
        /,
        *args: object,
        static_argnames: str | Iterable[str] = (),
        **kwargs: object,
    ) -> Result | None:
        """Runs `step(pool, *args, **kwargs)` jitted with the pool donated, and keeps
        the new pool.

        The pool is replaced as a whole or not at all, whatever interrupts the call.

        Args:
          step: returns the new pool, or a tuple (new pool, result). It is jitted once
            for each `static_argnames` and found again by identity, a method by its
            function and owner.
          *args, **kwargs: further arguments of the jitted call. A `BlockList` in
            them stands for its ids.
          static_argnames: names of the step's parameters that are static, as in
            `jax.jit`, however they are passed. It is the one keyword that does not
            reach the step.

        Returns:
          The result, or None when `step` returns the pool alone.

        Raises:
          TypeError, ValueError: when `step` returns something else; then nothing has
            run and the pool is as it was.
          BufferError: on a GPU, when DLPack exports of the pool are alive: their memory
            cannot be given to the step. The message names them. On the CPU XLA copies
            the pool instead, and a `PoolDoubledWarning` says so.
          PoolLostError: when the program failed after the pool was donated to it.

        Example:
          >>> manager.update(copy_blocks, old.ids, new.ids)
          >>> manager.update(decode, tokens, layers=4, static_argnames="layers")
        """
        if not callable(step):
            raise TypeError(
                f"update: step must be a function of the pool, got {step!r}; its "
                "arguments come after it"
            )
        with self._memory.lock:
            self._memory.check_usable("update")
            program = self._memory.programs.find(step, static_argnames)
            args, kwargs = program.map(without_handles, args, kwargs)
            return self._memory.run(program, args, kwargs)

    @property
    def live_exports(self) -> list[str]:
        """The DLPack exports that are alive, in words."""
        return self._memory.live_exports

    def close(self) -> None:
        """Drops the pool, and what updates have compiled. Blocks become invalid;
        exports stay valid until they die.
        """
        self._memory.close()

    def __enter__(self) -> BlockManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed, " if self._memory.closed else ""
        return (
            f"BlockManager({state}{self.num_free_blocks} of {self.num_blocks} blocks "
            f"free, {self._memory.spec})"
        )
