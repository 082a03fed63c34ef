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

from jax_kvblock import _checks, _dlpack, _native, _steps
from jax_kvblock._types import Place
from jax_kvblock._view import Geometry, Unpicklable, part_name
from jax_kvblock.block import Block, BlockList, Layer, Piece
from jax_kvblock.layout import BlockSpec, Layout, find_layout
from jax_kvblock.pool import KVPool, check_pool, find_device
from jax_kvblock.transfer import gather_blocks, scatter_blocks


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
        _check_device("BlockManager", device)
        tokens = _one_name(block_size, page_size)
        heads, dim = _head_extents(inner_dim, num_kv_heads, head_dim)
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
        _check_device("BlockManager.from_spec", device)
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
        where = "BlockManager.from_pool"
        check_pool(where, "pool", pool)
        for x in pool.arrays:
            if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
                raise TypeError(
                    f"{where}: pool must be a pool of jax arrays, got "
                    f"{_checks.shown(x)}; call it outside of jit, with arrays that "
                    "jax.device_put has placed"
                )
            if len(x.devices()) != 1:
                raise ValueError(
                    f"{where}: pool must lie on one device, got one on "
                    f"{len(x.devices())}; make a manager for each device's part"
                )
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
        self._programs = _steps.Programs(self._spec, _check_step)
        self._geometry = Geometry.of(self._spec, pool.contiguous, flat_tail)
        self._memory_kind = pool.memory_kind
        self._devices = pool.arrays[0].devices()
        self._dl_device = _dlpack.device_of(pool.arrays[0])

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
            if not isinstance(new, KVPool):
                raise TypeError(
                    f"BlockManager.pool: must be a KVPool, got {type(new).__name__}; "
                    "return the pool from your jitted step"
                )
            if any(isinstance(x, jax.core.Tracer) for x in new.arrays):
                raise TypeError(
                    "BlockManager.pool: must be a pool of arrays, got one that is "
                    "being traced; return the pool from the jitted function and set it "
                    "outside"
                )
            if any(x.is_deleted() for x in new.arrays):
                raise RuntimeError(
                    "BlockManager.pool: must be a living pool, got one that was "
                    "donated or deleted; put back the pool that the donating call "
                    "returned"
                )
            _check_like("BlockManager.pool", old, new)
            if any(x.devices() != self._devices for x in new.arrays):
                raise ValueError(
                    "BlockManager.pool: must stay on its device; move it back with "
                    "jax.device_put"
                )
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
        self, program: _steps.Program, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with self._lock:
            pool = self._check_usable("update")
            args, kwargs = program.map(_without_handles, args, kwargs)
            if self._guarded:
                (device,) = self._devices
                put = functools.partial(_steps.put, device=device)
                args, kwargs = program.map(put, args, kwargs)
            self._check_donation(pool)
            try:
                call = functools.partial(program.call, pool.data, *args, **kwargs)
                _steps.run(call, self._made, pool)
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
        return _steps.unpack(packed)

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

    # ---- the state of the pool; _view.py uses it, too ----

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
        if _platform(pool) == "cpu":
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
        """A copy of a block or a part of it; see `_write_part` for `place`."""
        with self._lock:
            pool = self._open_pool("pool")
            return _read_part(pool, self._on_device(place), flat=self._flat_tail)

    def _write(self, place: np.ndarray, part: jax.Array) -> Any:
        """Replaces a block or a part of it; returns what is ready when it is done."""
        with self._lock:
            self._check_usable("copy_from")
            writer = self._programs.find(_write_part, name="copy_from")
            return self._run(writer, (place, part), {})


@functools.partial(jax.jit, static_argnames="flat")
def _read_part(pool: KVPool, place: jax.Array, *, flat: bool) -> jax.Array:
    inner = pool.spec.inner
    (part,) = gather_blocks(pool, place[:1], inner)
    for index in place[1:]:
        part = jax.lax.dynamic_index_in_dim(part, index, 0, keepdims=False)
    return jnp.squeeze(part, -3 if inner == "HND" else -2) if flat else part


def _write_part(
    pool: KVPool, place: jax.Array, part: jax.Array
) -> tuple[KVPool, jax.Array]:
    """Writes a block, or a part of one: `place` is its id, the layer, the outer.

    A part is written with its block, whose rest is read and written back. `part` may
    lack the axis of the heads.
    """
    inner, depth = pool.spec.inner, place.shape[0] - 1
    shape = find_layout("copy_from", "layout", inner, inner).shape(pool.spec)
    block = part = part.reshape(*[1] * (1 + depth), *shape[depth:])
    if depth:
        block = gather_blocks(pool, place[:1], inner)
        start = [0, *place[1:], *[0] * (len(shape) - depth)]
        block = jax.lax.dynamic_update_slice(block, part, start)
    # Not an argument as it came: JAX would hand that back before the program has run.
    done = place + 1
    return scatter_blocks(pool, place[:1], block, inner), done


def _check_step(old: KVPool, new: KVPool) -> None:
    _check_like("update: the step's pool", old, new)


def _without_handles(tree: Any) -> Any:
    """An argument of a step, with the ids of each `BlockList` in it."""
    handles = (BlockList, Block, Layer, Piece)
    if not any(isinstance(x, handles) for x in jax.tree.leaves(tree)):
        return tree

    def ids_of(x: Any) -> Any:
        if isinstance(x, handles[1:]):
            raise TypeError(
                f"update: the step's arguments must be arrays or a BlockList, got {x}; "
                "pass jnp.asarray of it for its contents, or block.id"
            )
        return x.ids if isinstance(x, BlockList) else x

    return jax.tree.map(ids_of, tree)


def _in_words(exports: Iterable[tuple[int, Sequence[int]]]) -> list[str]:
    return [part_name(block, part) for block, part in sorted(exports)]


def _levels_up() -> int:
    """The stack level of the first caller outside of this package."""
    level, frame = 0, sys._getframe()
    package = __name__.rpartition(".")[0] + "."
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(package):
        level, frame = level + 1, frame.f_back
    return level


def _check_like(where: str, old: KVPool, new: KVPool) -> None:
    shapes = [[_checks.show(x) for x in pool.arrays] for pool in (old, new)]
    if new.spec != old.spec or shapes[0] != shapes[1]:
        raise ValueError(
            f"{where}: must be like the pool it replaces, {old!r}, got {new!r}"
        )
    if new.memory_kind != old.memory_kind:
        raise ValueError(
            f"{where}: must stay in {old.memory_kind} memory, got a pool in "
            f"{new.memory_kind}"
        )


def _check_device(where: str, device: Any) -> None:
    if not isinstance(device, jax.sharding.Sharding):
        find_device(where, device)
    elif len(device.device_set) != 1:
        raise ValueError(
            f"{where}: device must be one device, got {device}; for a pool over "
            "several devices use KVPool.zeros with the sharding"
        )


def _one_name(block_size: int | None, page_size: int | None) -> int:
    """The tokens to a block, by its name or by the old one."""
    if block_size is not None and page_size is not None:
        raise TypeError(
            f"BlockManager: block_size must be given once, got {block_size} and "
            f"page_size={page_size}, which is its old name; leave page_size out"
        )
    tokens = page_size if block_size is None else block_size
    if tokens is None:
        raise TypeError(
            "BlockManager: block_size must be given, the tokens to a block; for "
            "example BlockManager(32, 16, num_kv_heads=8, head_dim=128)"
        )
    return tokens


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
        if num_kv_heads is None:
            num_kv_heads = _other_extent(inner_dim, head_dim=head_dim)
        elif head_dim is None:
            head_dim = _other_extent(inner_dim, num_kv_heads=num_kv_heads)
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


def _other_extent(inner_dim: int, **given: Any) -> int:
    """What inner_dim leaves for the head extent that is not given."""
    ((name, extent),) = given.items()
    if inner_dim % extent:
        raise ValueError(
            f"BlockManager: inner_dim must be a multiple of {name}={extent}, got "
            f"{inner_dim}; leave inner_dim out and give num_kv_heads and head_dim, or "
            "give it alone"
        )
    return inner_dim // extent


def _platform(pool: KVPool) -> str:
    return next(iter(pool.arrays[0].devices())).platform


def _same_memory(old: KVPool, new: KVPool) -> bool:
    """Whether the new pool's arrays are the old ones (an old one may be donated)."""
    return all(a is b for a, b in zip(old.arrays, new.arrays, strict=True))
