"""`BlockManager`: a pool, who holds which of its blocks, and safe updates of it."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock import _native
from jax_kvblock.blocks.layout import BlockSpec, Layout
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.core.types import Place
from jax_kvblock.objects import dlpack, steps
from jax_kvblock.objects.arguments import (
    check_device,
    check_first_pool,
    check_next_pool,
    check_step,
    head_extents,
    one_name,
    without_handles,
)
from jax_kvblock.objects.block import Block, BlockList
from jax_kvblock.objects.view import (
    Geometry,
    Unpicklable,
    part_name,
    read_part,
    write_part,
)


class PoolExhaustedError(MemoryError):
    """The manager has fewer free blocks than were asked for. Nothing was allocated."""


class PoolDoubledWarning(UserWarning):
    """A pool was replaced while DLPack exports still hold the memory of the old one."""


class PoolLostError(RuntimeError):
    """A step failed after the pool was donated to it: what the blocks held is lost.

    The blocks themselves stay allocated. Put in a fresh pool and fill them again.
    """


class _Garbage:
    """Blocks in reference cycles, which come back when Python collects garbage.

    A collection takes long in a large program, and an engine may run out of blocks at
    every step. So those that find nothing may take half a second, and beyond that one
    fiftieth of the time.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._wasted = 0.0

    def collect(self, free_list: _native.FreeList) -> None:
        began, before = time.monotonic(), len(free_list)
        if self._wasted > 0.5 + (began - self._start) / 50:
            return
        gc.collect()
        if len(free_list) <= before:
            self._wasted += time.monotonic() - began


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
        dtype: Any = jnp.bfloat16,
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
        self._lock = threading.RLock()
        self._pool: KVPool | None = pool
        self._made: list[Any] = []  # by an update, and not taken over yet
        self._lost: str | None = None  # why the contents are gone
        self._spec = pool.spec
        self._flat_tail = flat_tail
        self._num_blocks = pool.num_blocks
        self._free_list = _native.FreeList(self._num_blocks)
        self._garbage = _Garbage()
        self._programs = steps.Programs(self._spec, check_step)
        self._geometry = Geometry.of(self._spec, pool.contiguous, flat_tail)
        self._memory_kind = pool.memory_kind
        self._devices = pool.arrays[0].devices()
        self._dl_device = dlpack.device_of(pool.arrays[0])

    # ---- blocks ----

    def allocate_blocks(self, count: int) -> BlockList:
        """Takes `count` free blocks. Their contents are whatever was there before.

        Where too few are free it collects garbage first: blocks in reference cycles, as
        exceptions leave them, come back by that.

        Raises:
          PoolExhaustedError: when fewer blocks are free; then none is taken.
          TypeError, ValueError: when count is not an integer of at least 0.
        """
        self._check_open("allocate_blocks")  # takes no lock: another thread may compile
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)):
            raise TypeError(f"allocate_blocks: count must be an integer, got {count!r}")
        if count < 0:
            raise ValueError(f"allocate_blocks: count must be at least 0, got {count}")
        return BlockList(self, [Block(self, x) for x in self._take(int(count))])

    def _take(self, count: int) -> list[_native.Lease]:
        if count <= self.num_blocks:
            leases = self._free_list.take(count)
            if leases is None:
                self._garbage.collect(self._free_list)
                leases = self._free_list.take(count)
            if leases is not None:
                return leases
        kept = _in_words(self._free_list.exports(freed_alone=True))
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
        if isinstance(blocks, Block):
            blocks = [blocks]
        if not isinstance(blocks, Iterable):
            raise TypeError(
                "free: blocks must be a BlockList, a Block or an iterable of blocks, "
                f"got {type(blocks).__name__}"
            )
        chosen = list(blocks)
        for i, block in enumerate(chosen):
            self._check_own("free", f"blocks[{i}]", block, "free it there")
        # In one step: of two threads that free one block, one fails.
        wrong = self._free_list.release([block._lease for block in chosen])
        if wrong >= 0:
            raise ValueError(
                f"free: blocks[{wrong}] (block {chosen[wrong].id}) is freed already; "
                "free each block once"
            )

    def _check_own(self, where: str, name: str, block: Any, fix: str) -> None:
        if not isinstance(block, Block):
            raise TypeError(
                f"{where}: {name} must be a Block, got {type(block).__name__}"
            )
        if block.manager is not self:
            raise ValueError(
                f"{where}: {name} (block {block.id}) belongs to another manager; {fix}"
            )

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
    def lock(self) -> threading.RLock:
        """What every use of the pool's memory holds: updates, reads, exports.

        Updates, `copy_from`, reads and exports of blocks take it by themselves. Hold it
        where you use the pool yourself and other threads update it; the thread that
        holds it may take it again. Counting blocks takes no lock.

        Example:
          >>> with manager.lock:                 # no update comes in between
          ...     cache = gather_blocks(manager.pool, blocks.ids)
        """
        return self._lock

    @property
    def pool(self) -> KVPool:
        """The pool. Take it into a jit, donate it there, and put the new one back."""
        return self._open_pool("pool")

    @pool.setter
    def pool(self, new: KVPool) -> None:
        with self._lock:
            old = self._open_pool("pool")
            check_next_pool("BlockManager.pool", old, new, self._devices)
            if self._free_list.num_exports and not _same_memory(old, new):
                self._warn_doubled()
            self._pool, self._lost = new, None

    def update(
        self,
        step: Callable[..., Any],
        /,
        *args: Any,
        static_argnames: str | Iterable[str] = (),
        **kwargs: Any,
    ) -> Any:
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
        with self._lock:
            self._check_usable("update")
            program = self._programs.find(step, static_argnames)
            return self._run(program, args, kwargs)

    def _run(
        self, program: steps.Program, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with self._lock:
            pool = self._check_usable("update")
            args, kwargs = program.map(without_handles, args, kwargs)
            if self._guarded:
                (device,) = self._devices
                put = functools.partial(steps.put, device=device)
                args, kwargs = program.map(put, args, kwargs)
            self._check_donation(pool)
            try:
                call = functools.partial(program.call, pool.data, *args, **kwargs)
                steps.run(call, self._made, pool)
                packed = self._take_over()
            except BaseException as error:
                self._take_over()
                if not self._alive:
                    self._lose(program.name, error)
                    self._say_lost("update", error)
                raise
            if packed is None:
                raise TypeError(
                    "update: the pool must be an array, got one that is being traced; "
                    "call update and copy_from outside of jit, or take the pool as an "
                    "argument there and return the new one"
                )
        return steps.unpack(packed)

    @property
    def live_exports(self) -> list[str]:
        """The DLPack exports that are alive, in words."""
        return _in_words(self._free_list.exports())

    def close(self) -> None:
        """Drops the pool, and what updates have compiled. Blocks become invalid;
        exports stay valid until they die.
        """
        with self._lock:
            self._made.clear()
            self._pool = None
            self._programs.clear()

    def __enter__(self) -> BlockManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed, " if self._pool is None else ""
        return (
            f"BlockManager({state}{self.num_free_blocks} of {self.num_blocks} blocks "
            f"free, {self._spec})"
        )

    # ---- the state of the pool; view.py uses it, too ----

    def _open_pool(self, where: str) -> KVPool:
        with self._lock:
            self._take_over()
            return self._check_open(where)

    def _check_open(self, where: str) -> KVPool:
        pool = self._pool
        if pool is None:
            raise RuntimeError(
                f"BlockManager.{where}: the manager is closed; build a new one"
            )
        return pool

    def _check_usable(self, where: str) -> KVPool:
        pool = self._open_pool(where)
        trouble = self._trouble()
        if trouble:
            raise RuntimeError(f"{where}: {trouble}")
        return pool

    def _take_over(self) -> dict[Any, Any] | None:
        """Makes what an update has made the pool, also when it was interrupted then.

        It may be interrupted anywhere and called again.

        Returns:
          The packed result; None when nothing was made, or only traced.
        """
        if not self._made:
            return None
        data, packed = self._made[-1]
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(data))
        if not traced:
            self._pool = KVPool(data, self._spec)
        self._made.clear()
        return None if traced else packed

    @property
    def _alive(self) -> bool:
        pool = self._pool
        if pool is None or self._lost:
            return False
        if pool.contiguous:  # the common case, on the path of every export
            return not pool.data.is_deleted()
        return not any(x.is_deleted() for x in pool.data)

    def _trouble(self) -> str | None:
        """Why the pool cannot be used, and what to do; None when it can."""
        if self._alive:
            return None
        if self._pool is None:
            return "its manager is closed; build a new manager and allocate there"
        fresh = self._fresh_pool(self._pool)
        if self._lost:
            return (
                f"what its pool held is lost, {self._lost}; put in a fresh pool with "
                f"manager.pool = {fresh} and fill the blocks again"
            )
        return (
            "its pool was donated; put the new pool back with manager.pool = ..., or, "
            f"if the donating call failed, {fresh}"
        )

    def _fresh_pool(self, pool: KVPool) -> str:
        """How to build a pool of zeros like the old one."""
        (device,) = self._devices
        arguments = ["manager.spec", "manager.num_blocks"]
        if not pool.contiguous:
            arguments.append("contiguous=False")
        if self._memory_kind != "device":
            arguments.append(f"memory_kind={self._memory_kind!r}")
        if device != jax.local_devices()[0]:
            index = jax.local_devices(backend=device.platform).index(device)
            arguments.append(f"device=jax.local_devices(backend={device.platform!r})")
            arguments[-1] += f"[{index}]"
        return f"KVPool.zeros({', '.join(arguments)})"

    def _lose(self, step: str, error: BaseException) -> None:
        first_line = (str(error).splitlines() or [""])[0]
        self._lost = (
            f"since {step!r} failed after the pool was donated to it "
            f"({type(error).__name__}: {first_line})"
        )

    def _say_lost(self, where: str, error: BaseException) -> None:
        message = f"{where}: {self._trouble()}"
        if isinstance(error, Exception):
            raise PoolLostError(message) from error
        error.add_note(message)  # an interrupt stays what it is

    def _look_after(self, where: str, error: Exception) -> None:
        """Raises PoolLostError if the pool is what has failed with `error`.

        A program may fail after its call has returned. Its results then raise when they
        are waited for, and the pool among them is lost.
        """
        with self._lock:
            self._take_over()
            if self._pool is None or not self._alive:
                return
            try:
                jax.block_until_ready(self._pool.data)
            except Exception:
                self._lose("an update", error)
                self._say_lost(where, error)

    @property
    def _guarded(self) -> bool:
        """Whether a transfer guard forbids what a jit does with host arrays."""
        config: Any = jax.config  # mypy does not know its options
        guard = config.jax_transfer_guard_host_to_device
        return guard not in (None, "allow", "log")

    def _on_device(self, x: np.ndarray) -> np.ndarray | jax.Array:
        (device,) = self._devices
        return jax.device_put(x, device) if self._guarded else x

    def _check_donation(self, pool: KVPool) -> None:
        if not self._free_list.num_exports:
            return
        if next(iter(self._devices)).platform == "cpu":
            self._warn_doubled()
            return
        raise BufferError(
            "update: the pool cannot be donated while DLPack exports of it are "
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
            stacklevel=_levels_up(),
        )

    def _read(self, place: np.ndarray) -> jax.Array:
        """A copy of a block or a part of it; see `write_part` for `place`."""
        with self._lock:
            pool = self._open_pool("pool")
            return read_part(pool, self._on_device(place), flat=self._flat_tail)

    def _write(self, place: np.ndarray, part: jax.Array) -> Any:
        """Replaces a block or a part of it; returns what is ready when it is done."""
        with self._lock:
            self._check_usable("copy_from")
            writer = self._programs.find(write_part, name="copy_from")
            return self._run(writer, (place, part), {})


def _in_words(exports: Iterable[tuple[int, Sequence[int]]]) -> list[str]:
    return [part_name(block, part) for block, part in sorted(exports)]


def _levels_up() -> int:
    """The stack level of the first caller outside of this package."""
    level, frame = 0, sys._getframe()
    package = __name__.partition(".")[0] + "."
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(package):
        level, frame = level + 1, frame.f_back
    return level


def _same_memory(old: KVPool, new: KVPool) -> bool:
    """Whether the new pool's arrays are the old ones (an old one may be donated)."""
    return all(a is b for a, b in zip(old.arrays, new.arrays, strict=True))
