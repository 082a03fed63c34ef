"""`Below`: the tiers below the device, as bytes: what comes down, and what is read.

Here is no pool and no program: rows of bytes, their keys, and threads. One for each way
begins copies, so that neither waits for the other, and the link has the next one when
one ends; a third publishes what has come down.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    CancelledError,
    Future,
    ThreadPoolExecutor,
    wait,
)
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from jax_kvblock import _native
from jax_kvblock.cache.copies import Copies, Cut
from jax_kvblock.cache.copy_lines import Copy, CopyError
from jax_kvblock.cache.host import HostTier
from jax_kvblock.cache.rooms import Rooms
from jax_kvblock.core import checks

SPARE_ROOMS = 2  # for tickets that come while all are booked
MOST_WRITES = 4  # to the store at a time; what comes down waits for them


class Store(Protocol):
    """What a tier below host memory does: blocks by key, as rows of bytes.

    One that is only read may say so by an attribute, `takes = False`: nothing is put.
    One that reads straight into the device's memory says so by `reads_to_device`, and
    has `get_to_device` as `DiskTier` has it. One that may be slow to tell has
    `ask_seconds`: engines, who cannot wait, ask it by `has(keys, timeout=ask_seconds)`.
    What it takes for a miss then it counts in `unanswered`.
    """

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Of each key, whether its block is there."""
        ...

    def put(self, keys: Sequence[bytes], rows: np.ndarray) -> Future[Any]:
        """Keeps blocks, uint8 `[n, block_bytes]`, which stay as they are."""
        ...

    def get(self, keys: Sequence[bytes], out: np.ndarray) -> Future[Any]:
        """Reads blocks into `out`; of each, whether it was there and is right."""
        ...


@dataclass
class TierCounters:
    """What went through a tier since the start.

    Attributes:
      blocks_in, blocks_out, bytes_in, bytes_out: written there, read from there.
      skipped: blocks that found no room in it.
      failed: blocks whose copy failed, either way, or that could not be looked up.
      lost: blocks that were said to be there, and were not, were not what was put, or
        could not be read.
    """

    blocks_in: int = 0
    blocks_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    skipped: int = 0
    failed: int = 0
    lost: int = 0


@dataclass
class Placed:
    """Blocks in pinned host memory, of which `hold` holds those in slots.

    Attributes:
      slots: the rows of `HostTier.rows` where they lie, int64 `[n]`.
      in_room: those that the store has read into their room itself.
    """

    hold: _native.Hold
    slots: np.ndarray
    in_room: Sequence[int] = ()


@dataclass
class Arrival:
    """Blocks whose copy into a room has begun."""

    room: jax.Array
    copy: Copy


class Below:
    """Host memory, and maybe a store under it.

    Args:
      host, store: the tiers.
      chunk: how many blocks a room holds.
      num_rooms: how many arrays of so many blocks tickets share on the device.

    Attributes:
      lock: what every change of the fields here holds. Who needs the pool's as well,
        `manager.lock`, takes that first: users hold it around calls.
      down, up: the threads that begin copies; `landed` ends those that go down.
      rooms: what is copied up goes there.
      in_order: who hands `up` jobs that belong together holds it, and nothing else.
      coming: on the way to the host, by key.
      store_error: what the store failed with last.
    """

    def __init__(
        self, host: HostTier, store: Store | None, chunk: int, num_rooms: int
    ) -> None:
        self.host, self.store = host, store
        self._copies = Copies(host.device)
        shape = (chunk * math.prod(host.spec.block_shape),)
        make = functools.partial(self._copies.room, shape, host.spec.dtype)
        self.rooms = Rooms(make, num_rooms, SPARE_ROOMS)
        self._landing: list[weakref.ref[Copy]] = []  # they read the landing places
        self._rising: weakref.WeakSet[Copy] = weakref.WeakSet()
        self.in_order = threading.Lock()
        self.lock = threading.RLock()
        self.down = ThreadPoolExecutor(1, "kvblock-offload")
        self.landed = ThreadPoolExecutor(1, "kvblock-landed")
        self.up = ThreadPoolExecutor(1, "kvblock-onboard")
        self.coming: dict[bytes, Future[None]] = {}
        self.host_counters, self.store_counters = TierCounters(), TierCounters()
        self.store_error: BaseException | None = None
        self._writing: set[Future[Any]] = set()  # to the store
        self._closed = False

    # ---- found ----

    def on_host(self, key: bytes) -> bool:
        """Whether a block is in host memory, or on its way there."""
        return key in self.coming or self.host.books.find(key) is not None

    def in_store(self, keys: Sequence[bytes], *, waits: bool = False) -> list[bool]:
        """Of each key, whether the store has its block; asked once for all.

        waits: for a store that is slow to tell, which is no engine's way.
        """
        if self.store is None or not keys:
            return [False] * len(keys)
        store: Any = self.store
        seconds = None if waits else getattr(store, "ask_seconds", None)
        within = {} if seconds is None else {"timeout": seconds}
        try:
            return _of_each("has", store.has(keys, **within), keys)
        except Exception as error:  # what it cannot tell of is a miss
            with self.lock:
                self.store_counters.failed += len(keys)
                self.store_error = error
            return [False] * len(keys)

    def has(self, keys: Sequence[bytes], *, waits: bool = False) -> list[bool]:
        """Of each key, whether its block is in any tier here; `waits` as above."""
        found = self.host.books.are_published(keys)
        if self.coming:
            coming = map(self.coming.__contains__, keys)
            found = list(map(operator.or_, found, coming))
        if all(found):
            return found
        others = [key for key, here in zip(keys, found, strict=True) if not here]
        stored = dict(zip(others, self.in_store(others, waits=waits), strict=True))
        if not stored:
            return found
        return [here or stored[k] for k, here in zip(keys, found, strict=True)]

    # ---- down ----

    def slots(self, count: int) -> _native.Hold | None:
        """Slots of the host, `count` of them or as many as there are; None for none."""
        available = min(count, len(self.host.books))
        return _native.take_hold(self.host.books, available) if available else None

    def send(
        self,
        staged: jax.Array,
        keys: Sequence[bytes],
        kept: Sequence[bool],
        slots: _native.Hold,
    ) -> Future[None]:
        """Copies blocks of an array on the device, `[n or more, …]`, into slots.

        kept: which of them are found below then.
        """
        rows = [row for row, keep in enumerate(kept) if keep]
        found = [keys[row] for row in rows]
        taken, host = slots.ids[: len(found)], self.host.rows
        begin = functools.partial(self._copies.start_down, staged, rows, host, taken)
        with self.lock:
            begun = self.down.submit(begin)
            future = self.landed.submit(self._land, begun, found, slots)
            for key in found:
                self.coming[key] = future
            future.add_done_callback(functools.partial(self._arrived, found))
        return future

    def _land(
        self, begun: Future[Copy], keys: Sequence[bytes], slots: _native.Hold
    ) -> None:
        """In a thread of its own: publishes what has come down, and stores it."""
        with slots:
            begun.result().wait()
            for key, slot in zip(keys, slots.ids.tolist(), strict=False):
                self.host.publish(slot, key)  # all of them, or none
            with self.lock:
                self.host_counters.blocks_in += len(keys)
                self.host_counters.bytes_in += len(keys) * self.host.block_bytes
            # Nobody takes the slots while the store is slow.
            store = self.store
            if store is not None and keys and getattr(store, "takes", True):
                self._put(keys)

    def _put(self, keys: Sequence[bytes]) -> None:
        """Hands blocks of the host to the store."""
        assert self.store is not None
        with self.lock:
            writing = set(self._writing)
        if len(writing) >= MOST_WRITES:
            wait(writing, return_when=FIRST_COMPLETED)
        size = 0
        try:
            known = _of_each("has", self.store.has(keys), keys)
            new = [key for key, there in zip(keys, known, strict=True) if not there]
            hold, places = _native.hold_keys(self.host.books, new)
            with hold:
                rows = self.host.rows[hold.ids]  # a copy, so that the slots are free
            size = len(rows)
            if not size:
                return
            future = self.store.put([new[i] for i in places], rows)
            if not hasattr(future, "add_done_callback"):
                raise TypeError(f"put of a store must give a Future, got {future!r}")
        except Exception as error:  # the blocks are on the host all the same
            self._count_put(size or len(keys), error)
            return
        with self.lock:
            self._writing.add(future)
        future.add_done_callback(functools.partial(self._put_ended, size))

    def _put_ended(self, count: int, future: Future[Any]) -> None:
        with self.lock:
            self._writing.discard(future)
        gone = future.cancelled()
        self._count_put(count, CancelledError() if gone else future.exception())

    def _count_put(self, count: int, error: BaseException | None) -> None:
        with self.lock:
            counters = self.store_counters
            if error is not None:
                counters.failed += count
                self.store_error = error
            else:
                counters.blocks_in += count
                counters.bytes_in += count * self.host.block_bytes

    def _arrived(self, keys: Sequence[bytes], future: Future[None]) -> None:
        with self.lock:
            for key in keys:
                self.coming.pop(key, None)
            if future.cancelled() or future.exception() is not None:
                self.host_counters.failed += len(keys)

    # ---- up ----

    @functools.cached_property
    def _verifying(self) -> Copies:
        """Lines of its own: who reads does not wait behind what goes down."""
        return Copies(self.host.device)

    @property
    def reads_to_device(self) -> bool:
        """Whether the store reads into rooms itself."""
        return bool(getattr(self.store, "reads_to_device", False))

    def place(
        self,
        keys: Sequence[bytes],
        lost: Callable[[int], None] | None = None,
        room: jax.Array | None = None,
    ) -> Placed:
        """In the thread that copies up: where blocks of the tiers below lie, pinned.

        What the store has is read into landing places, which are good until the next
        call: what reads them is begun in the same job, or in those right behind it.

        lost: told the place of the first block that is not there any more, or is not
          what was put; what lies there and behind may be anything.
        room: where whole blocks go, one behind the other: a store that reads to the
          device reads there what is not on the host, and the landing places have it,
          too, by which it was verified.

        Raises:
          KeyError: for such a block, when nobody is told.
        """
        hold, places = self._held(keys)
        slots = np.zeros(len(keys), np.int64)
        slots[places] = hold.ids
        missing = sorted(set(range(len(keys))) - set(places))
        gone, in_room = missing, False
        if missing and self.store is not None:
            self._await(each() for each in self._landing)
            self._landing.clear()
            first = self.host.num_slots
            slots[missing] = first + np.arange(len(missing))
            landed = self.host.rows[first : first + len(missing)]
            found = None
            if room is not None and self.reads_to_device:
                found = self._read_to_device(keys, missing, landed, room)
            in_room = found is not None
            gone = self._fetch(keys, missing, landed, found)
        self.count_out(len(places), len(missing), len(gone))
        if gone and lost is None:
            hold.release()
            raise _lost(len(gone), len(keys))
        if gone and lost is not None:
            lost(gone[0])
        return Placed(hold, slots, missing if in_room else ())

    def bring(
        self, placed: Placed, cut: Cut, room: jax.Array, first: int = 0
    ) -> Arrival:
        """In the thread that copies up: begins to copy parts of blocks into a room.

        first: where they begin in it, in bytes.
        """
        rows, slots, at = self.host.rows, placed.slots, None
        if len(placed.in_room):
            at = np.setdiff1d(np.arange(len(slots)), placed.in_room)
            slots = slots[at]
        keep = (placed.hold, self.host)
        copy = self._copies.start_up(rows, slots, cut, room, first, at, keep)
        self._rising.add(copy)
        if (slots >= self.host.num_slots).any():
            self._landing.append(weakref.ref(copy))  # one that is dropped has ended
        return Arrival(room, copy)

    def _await(self, copies: Iterable[Copy | None]) -> None:
        """Waits for copies whose errors are told to those who asked for them."""
        for copy in copies:
            if copy is not None:
                with contextlib.suppress(CopyError):
                    copy.wait()

    def keep(self, keys: Sequence[bytes]) -> Placed:
        """In any thread: the beginning of some blocks, as far as it lies in tiers here.

        Returns:
          Where they lie in host memory; -1 for those that are not there by now.
        """
        hold, _ = _native.hold_keys(self.host.books, keys, beginning=True)
        here = len(hold)
        more = [*self.has(keys[here:]), False].index(False)
        slots = np.full(here + more, -1, np.int64)
        slots[:here] = hold.ids
        if more:  # on their way to the host, in the store, or on the host behind such
            hold, places = _native.hold_keys(self.host.books, keys[: here + more])
            slots[places] = hold.ids
        return Placed(hold, slots)

    def place_kept(self, slots: np.ndarray, room: jax.Array | None = None) -> Placed:
        """`place` of blocks that somebody keeps in slots: nobody looks for them again.

        Whose ticket ends meanwhile is told of an error, or reads what nobody takes. All
        of them are on the host: nothing is read into a room.

        Raises:
          ValueError: for a slot that is free by now.
        """
        hold = _native.hold(self.host.books, slots.astype(np.int32))
        self.count_out(len(slots))
        return Placed(hold, slots)

    def read(self, keys: Sequence[bytes]) -> np.ndarray:
        """In any thread: blocks of the tiers below, uint8 `[n, block_bytes]`.

        Raises:
          KeyError: when one is not there any more.
        """
        rows = np.empty((len(keys), self.host.block_bytes), np.uint8)
        hold, places = self._held(keys)
        with hold:
            for place, slot in zip(places, hold.ids, strict=True):
                np.copyto(rows[place], self.host.rows[slot])
        missing = sorted(set(range(len(keys))) - set(places))
        gone = missing
        if missing and self.store is not None:
            read = np.empty((len(missing), self.host.block_bytes), np.uint8)
            gone = self._fetch(keys, missing, read)
            rows[missing] = read
        self.count_out(len(places), len(missing), len(gone))
        if gone:
            raise _lost(len(gone), len(keys))
        return rows

    def _held(self, keys: Sequence[bytes]) -> tuple[_native.Hold, list[int]]:
        """Those that are in host memory, once what is on its way there has come."""
        with self.lock:
            coming = {self.coming[key] for key in keys if key in self.coming}
        for future in coming:
            future.exception()  # whatever has come of it, we look again
        return _native.hold_keys(self.host.books, keys)

    def _read_to_device(
        self,
        keys: Sequence[bytes],
        missing: list[int],
        read: np.ndarray,
        room: jax.Array,
    ) -> list[bool] | None:
        """Has the store read blocks into their room; None where it fails.

        They are copied down, since checksums are held on the host: the link has a way
        for each direction.
        """
        store: Any = self.store

        def to_host(places: list[int]) -> list[np.ndarray]:
            rows = [missing[i] for i in places]
            self._verifying.down(room, rows, read, places)
            return [read[i] for i in places]

        try:
            memory = self._copies.places(room, missing, self.host.block_bytes)
            wanted = [keys[i] for i in missing]
            told = store.get_to_device(wanted, memory, to_host)
            return _of_each("get_to_device", told, wanted)
        except Exception as error:  # they are read to the host instead
            with self.lock:
                self.store_error = error
            return None

    def _fetch(
        self,
        keys: Sequence[bytes],
        missing: list[int],
        read: np.ndarray,
        found: list[bool] | None = None,
    ) -> list[int]:
        """Reads blocks from the store, and copies them into slots that are free.

        found: which of `missing` lie in `read` already, where the store was asked.

        Returns:
          Which of `missing` the store has not, or could not read.
        """
        assert self.store is not None
        if found is None:
            found = [False] * len(missing)
            try:
                wanted = [keys[i] for i in missing]
                told = self.store.get(wanted, read).result()
                found = _of_each("get", told, wanted)
            except Exception as error:  # a disk that fails: what lies there is a miss
                with self.lock:
                    self.store_counters.failed += len(missing)
                    self.store_error = error
        here = [(i, row) for i, row, ok in zip(missing, read, found, strict=True) if ok]
        with self.lock:
            slots = self.slots(len(here))
        if slots is not None:
            with slots:
                for (i, row), slot in zip(here, slots.ids, strict=False):
                    np.copyto(self.host.rows[slot], row)
                    self.host.publish(int(slot), keys[i])
        return [i for i, ok in zip(missing, found, strict=True) if not ok]

    def count_out(self, held: int, fetched: int = 0, gone: int = 0) -> None:
        """Counts what was read: of the host, and asked of the store in vain or not."""
        size, came = self.host.block_bytes, fetched - gone
        with self.lock:
            self.host_counters.blocks_out += held
            self.host_counters.bytes_out += held * size
            self.store_counters.blocks_out += came
            self.store_counters.bytes_out += came * size
            self.store_counters.lost += gone

    # ---- its state ----

    def check_open(self, where: str) -> None:
        """That it is not closed."""
        if self._closed:
            raise RuntimeError(
                f"TieredCache.{where}: the tiers are closed; make a new TieredCache"
            )

    def drain(self) -> None:
        """Waits until nothing is on its way down."""
        while True:
            with self.lock:
                pending = [*self.coming.values(), *self._writing]
            if not pending:
                return
            wait(pending)

    def stats(self) -> dict[str, dict[str, int]]:
        """See `TieredCache.stats`."""
        with self.lock:
            books = self.host.books
            host = {
                **vars(self.host_counters),
                "num_blocks": self.host.num_slots,
                "held": books.num_blocks - books.num_free - books.num_idle,
                "idle": books.num_idle,
                "pending": len(self.coming),
            }
            store = {**vars(self.store_counters), "pending": len(self._writing)}
            store["unanswered"] = getattr(self.store, "unanswered", 0)
        return {"host": host, "store": store}

    def close(self) -> None:
        """Waits for what is under way, and ends the threads."""
        self._closed = True
        self.drain()
        for threads in (self.up, self.down, self.landed):
            threads.shutdown()
        self._await(list(self._rising))
        self.rooms.close()


def _of_each(name: str, told: Iterable[bool], keys: Sequence[bytes]) -> list[bool]:
    """What a store says of each key."""
    found = list(told)
    if len(found) != len(keys):
        raise ValueError(
            f"{name} of a store must tell of each of {len(keys)} keys, got "
            f"{len(found)} answers"
        )
    return found


def _lost(count: int, of: int) -> KeyError:
    return KeyError(
        f"onboard: {count} of {checks.plural(of, 'block')} are not below any more; "
        "compute them again"
    )
