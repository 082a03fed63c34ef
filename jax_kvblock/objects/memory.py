"""`Memory`: the pool of a manager, which updates replace while others read it.

Here is the state of the pool: who may use it now, what an update has made of it, and
why it is gone. A manager and its blocks stand on it.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jax_kvblock import _native
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.objects import dlpack, steps
from jax_kvblock.objects.arguments import check_next_pool, check_step
from jax_kvblock.objects.parts import Geometry, part_name, read_part, write_part


class PoolDoubledWarning(UserWarning):
    """A pool was replaced while DLPack exports still hold the memory of the old one."""


class PoolLostError(RuntimeError):
    """A step failed after the pool was donated to it: what the blocks held is lost.

    The blocks themselves stay allocated. Put in a fresh pool and fill them again.
    """


class Memory:
    """A pool that is donated to updates, and who may use it.

    Args:
      pool: the pool, on one device.
      flat_tail: whether blocks show tokens and heads without the axis of the heads.
    """

    def __init__(self, pool: KVPool, *, flat_tail: bool) -> None:
        self.lock = threading.RLock()
        self.spec = pool.spec
        self.num_blocks = pool.num_blocks
        self.geometry = Geometry.of(pool.spec, pool.contiguous, flat_tail)
        self.devices = pool.arrays[0].devices()
        self.dl_device = dlpack.device_of(pool.arrays[0])
        self.free_list = _native.FreeList(pool.num_blocks)
        self.keeps_events = False  # what `free_list` was told last
        self.programs = steps.Programs(pool.spec, check_step)
        self._flat_tail = flat_tail
        self._memory_kind = pool.memory_kind
        self._pool: KVPool | None = pool
        self._made: list[Any] = []  # by an update, and not taken over yet
        self._lost: str | None = None  # why the contents are gone

    # ---- used ----

    def open_pool(self, where: str) -> KVPool:
        """The pool, unless its manager is closed; it may be donated or lost."""
        with self.lock:
            self.take_over()
            return self.check_open(where)

    def check_open(self, where: str) -> KVPool:
        """The same without the lock, which another thread may hold for long."""
        pool = self._pool
        if pool is None:
            raise RuntimeError(
                f"BlockManager.{where}: the manager is closed; build a new one"
            )
        return pool

    def check_usable(self, where: str) -> KVPool:
        """The pool, whose contents are there."""
        pool = self.open_pool(where)
        trouble = self.trouble()
        if trouble:
            raise RuntimeError(f"{where}: {trouble}")
        return pool

    def run(
        self, program: steps.Program, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs an update, which replaces the pool as a whole or not at all."""
        with self.lock:
            pool = self.check_usable("update")
            if self._guarded:
                (device,) = self.devices
                put = functools.partial(steps.put, device=device)
                args, kwargs = program.map(put, args, kwargs)
            self._check_donation(pool)
            try:
                call = functools.partial(program.call, pool.data, *args, **kwargs)
                steps.run(call, self._made, pool)
                packed = self.take_over()
            except BaseException as error:
                self.take_over()
                if not self.alive:
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

    def read(self, place: np.ndarray) -> jax.Array:
        """A copy of a block or a part of it; see `write_part` for `place`."""
        with self.lock:
            pool = self.open_pool("pool")
            return read_part(pool, self._on_device(place), flat=self._flat_tail)

    def write(self, place: np.ndarray, part: jax.Array) -> Any:
        """Replaces a block or a part of it; returns what is ready when it is done."""
        with self.lock:
            self.check_usable("copy_from")
            writer = self.programs.find(write_part, name="copy_from")
            return self.run(writer, (place, part), {})

    def replace(self, new: KVPool) -> None:
        """Puts another pool in the place of this one."""
        with self.lock:
            old = self.open_pool("pool")
            check_next_pool("BlockManager.pool", old, new, self.devices)
            if self.free_list.num_exports and not _same_memory(old, new):
                self._warn_doubled()
            self._pool, self._lost = new, None

    def close(self) -> None:
        """Drops the pool, and what updates have compiled."""
        with self.lock:
            self._made.clear()
            self._pool = None
            self.programs.clear()

    @property
    def live_exports(self) -> list[str]:
        """The DLPack exports that are alive, in words."""
        return in_words(self.free_list.exports())

    # ---- its state ----

    def take_over(self) -> dict[Any, Any] | None:
        """Makes what an update has made the pool, also when it was interrupted then.

        It may be interrupted anywhere and called again.

        Returns:
          The packed result; None when nothing was made, or only traced.
        """
        if not self._made:
            return None
        data, packed = self._made[-1]
        arrays = data if isinstance(data, tuple) else (data,)
        traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
        if not traced:
            # Checked as it was traced; without jit a step may return NumPy's arrays.
            known = all(isinstance(x, jax.Array) for x in arrays)
            make = KVPool._holding if known else KVPool
            self._pool = make(data, self.spec)
        self._made.clear()
        return None if traced else packed

    @property
    def closed(self) -> bool:
        """Whether the pool is dropped."""
        return self._pool is None

    @property
    def alive(self) -> bool:
        """Whether the pool's contents are there."""
        pool = self._pool
        if pool is None or self._lost:
            return False
        if pool.contiguous:  # the common case, on the path of every export
            return not pool.data.is_deleted()
        return not any(x.is_deleted() for x in pool.data)

    def trouble(self) -> str | None:
        """Why the pool cannot be used, and what to do; None when it can."""
        if self.alive:
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
        (device,) = self.devices
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
        message = f"{where}: {self.trouble()}"
        if isinstance(error, Exception):
            raise PoolLostError(message) from error
        error.add_note(message)  # an interrupt stays what it is

    def look_after(self, where: str, error: Exception) -> None:
        """Raises PoolLostError if the pool is what has failed with `error`.

        A program may fail after its call has returned. Its results then raise when they
        are waited for, and the pool among them is lost.
        """
        with self.lock:
            self.take_over()
            if self._pool is None or not self.alive:
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
        (device,) = self.devices
        return jax.device_put(x, device) if self._guarded else x

    def _check_donation(self, pool: KVPool) -> None:
        if not self.free_list.num_exports:
            return
        if next(iter(self.devices)).platform == "cpu":
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


def in_words(exports: Iterable[tuple[int, Sequence[int]]]) -> list[str]:
    """Exports of the free list, by what each holds."""
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
