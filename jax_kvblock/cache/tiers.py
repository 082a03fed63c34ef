"""`TieredCache`: a prefix cache whose blocks go down to host memory and disk, and back.

Nothing here writes into the pool beside XLA: a program gathers blocks into an array of
its own, which a thread copies down; what comes up is an array that a program scatters.
So programs run in the order of their calls, and a block may be given away as soon as
the program that reads it was dispatched.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jax_kvblock import _native
from jax_kvblock.cache import arriving, programs
from jax_kvblock.cache.below import Below, Placed, Store
from jax_kvblock.cache.host import HostTier
from jax_kvblock.cache.namespace import Tokens
from jax_kvblock.cache.prefix import PrefixCache
from jax_kvblock.cache.store_check import check_store
from jax_kvblock.cache.table import BlockTable
from jax_kvblock.cache.taking import take_hold
from jax_kvblock.cache.tickets import Offload, Onboard, Part
from jax_kvblock.core import checks

LOOK_REST = 20  # `write_through` looks for idle blocks a twentieth of the time at most


class TieredCache:
    """A prefix cache over three tiers: the device, pinned host memory, and a store.

    An engine calls `maintain` once between its steps, and holds `manager.lock` where it
    takes `manager.pool` itself.

    Args:
      cache: the device's tier.
      host_bytes: pinned memory for blocks on the host, at most, and one block more.
        With a store it is staging_bytes more, for what comes from there; and up to four
        times as much of ordinary memory holds what is on its way there.
      store: below it, a `DiskTier` for example; each block that comes to the host goes
        on to it at once, so that nothing is lost when its slot is taken. That of a
        shard tells which heads it has (`DiskConnector`, `Namespace.of_heads`).
      staging_bytes: how much is copied at a time, by way of an array on the device.
      ahead_bytes: how much of what comes up may lie in such arrays until `poll` or
        `wait` takes it: between two steps no more comes up than this. Tickets share it;
        two that find all taken have staging_bytes each, and others wait for their turn.
        So much memory is taken on the device, and twice staging_bytes more, though no
        more than four times the pool's; a thread that waits for a ticket may take
        staging_bytes besides.
      low, high: watermarks, parts of the device's blocks: where fewer than `low` are
        free, `maintain` moves idle ones down until `high` are.
      write_through: whether `maintain` copies idle blocks down before their place is
        needed, so that taking it costs no time.

    Raises:
      TypeError: when `cache` is no `PrefixCache`, or `store` lacks a method of a store.
      ValueError: for watermarks that are none, memory in which nothing fits, or a store
        of other blocks.

    Example:
      >>> tiers = TieredCache(cache, host_bytes=8 << 30)
      >>> table, ticket = tiers.open(prompt)          # what lies below is on its way
      >>> ticket.wait()
      >>> table.match()
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        host_bytes: int,
        store: Store | None = None,
        staging_bytes: int = 64 << 20,
        ahead_bytes: int = 768 << 20,
        low: float = 0.0,
        high: float = 0.0,
        write_through: bool = False,
    ) -> None:
        for name, part in (("low", low), ("high", high)):
            if isinstance(part, bool) or not isinstance(part, (int, float, np.number)):
                raise TypeError(
                    f"TieredCache: {name} must be a number, a part of the blocks, got "
                    f"{part!r}"
                )
        if not 0 <= low <= high <= 1:
            raise ValueError(
                "TieredCache: low and high are parts of the blocks, 0 <= low <= high "
                f"<= 1, got low={low}, high={high}"
            )
        for name, value in (
            ("host_bytes", host_bytes),
            ("staging_bytes", staging_bytes),
            ("ahead_bytes", ahead_bytes),
        ):
            checks.check_integer("TieredCache", name, value, "pass a number of bytes")
        if not isinstance(cache, PrefixCache):
            raise TypeError(f"TieredCache: cache must be a PrefixCache, got {cache!r}")
        manager = cache.manager
        if host_bytes < manager.spec.block_bytes:
            raise ValueError(
                f"TieredCache: host_bytes must hold a block of "
                f"{manager.spec.block_bytes} bytes, got {host_bytes}"
            )
        if store is not None:
            check_store("TieredCache", store, cache.namespace)
        (device,) = manager._memory.devices
        self.cache = cache
        self.write_through = write_through
        fit = min(
            staging_bytes // manager.spec.block_bytes,
            manager.num_blocks,
            (2**31 - 1) // math.prod(manager.spec.block_shape),  # places are int32
        )
        self._chunk = 1 << (max(int(fit), 1).bit_length() - 1)  # few programs' shapes
        most = -(-manager.num_blocks // self._chunk)
        chunk_bytes = self._chunk * manager.spec.block_bytes
        num_rooms = max(1, min(int(ahead_bytes) // chunk_bytes, most))
        landing = self._chunk if store is not None else 1  # one: see `resume`
        host = HostTier(manager.spec, host_bytes, device, landing)
        self.below = Below(host, store, self._chunk, num_rooms)
        self._low, self._high = (int(x * manager.num_blocks) for x in (low, high))
        self._written: set[bytes] = set()  # of `write_through`, as far as they are idle
        self._next_look = 0.0

    def compile(self) -> None:
        """Compiles the programs by which whole blocks go down and come up.

        Before the first request: else a step waits for them later. Those of single
        layers (`by_layer`) are compiled when they are needed.
        """
        manager, size = self.cache.manager, 1
        while size <= self._chunk:
            none = np.full(size, -1, np.int32)
            programs.staged(manager, none).block_until_ready()
            room = self.below.rooms.take()
            read = programs.write_blocks(manager, none, room)
            self.below.rooms.give_back(room, read)
            size *= 2

    # ---- down ----

    def offload(self, what: BlockTable | Iterable[bytes]) -> Offload:
        """Copies published blocks down. They stay on the device.

        Args:
          what: a table, or keys. Keys whose block is not on the device are left out, as
            are those whose block is below or on its way there.

        Raises:
          TypeError: for what is neither.
          RuntimeError: when this is closed.
        """
        self.below.check_open("offload")
        if isinstance(what, BlockTable):
            self.check_own("offload", what)
        keys = what.keys if isinstance(what, BlockTable) else _checked("offload", what)
        with self.cache.manager.lock, self.below.lock:
            new = [key for key in keys if not self.below.on_host(key)]
            ids = [self.cache._free_list.find(key) for key in new]
            here = [(k, i) for k, i in zip(new, ids, strict=True) if i is not None]
            return self._send([key for key, _ in here], [i for _, i in here])

    def make_room(self, num_blocks: int) -> None:
        """Has so many blocks of the device free, if there are idle ones to move down.

        Call it before `reserve`, which takes the place of idle blocks as they are. It
        may have to: a block for which host memory has no room stays where it is.
        """
        wanted = checks.check_integer(
            "TieredCache.make_room", "num_blocks", num_blocks, "pass an int"
        )
        missing = wanted - self.cache.num_free_blocks
        if missing <= 0:
            return
        with self.cache.manager.lock, self.below.lock:
            victims = _native.victims(self.cache._free_list, missing)
            keys = [key for _, key in victims]
            self.offload(keys)  # the program that reads them is dispatched now
            moved = [key for key in keys if self.below.on_host(key)]
            self.cache._free_list.forget(moved)

    def maintain(self) -> bool:
        """What an engine calls once a step: watermarks, and copies ahead of need.

        Returns:
          Whether there may be more to copy: call it again, also where no step comes.
          False without `write_through`, and where host memory has no room.
        """
        if self.cache.num_free_blocks < self._low:
            self.make_room(self._high)
        now = time.monotonic()
        if not self.write_through or now < self._next_look:
            return self.write_through
        with self.cache.manager.lock, self.below.lock:
            if self.below.coming:  # one at a time: the link is for what is needed, too
                return True
            idle = self._idle_keys()
            # Once each: where host memory is small, one takes the other's place there.
            self._written &= set(idle)
            new = [key for key in idle if key not in self._written]
            new = [key for key in new if not self.below.on_host(key)][: self._chunk]
            sent = self.offload(new).keys if new else ()
            self._written.update(sent)
        ended = time.monotonic()
        self._next_look = ended + LOOK_REST * (ended - now)
        return bool(sent)

    def flush(self) -> None:
        """Copies down all idle blocks that are not below, and waits for the store.

        Before a process ends, so that the next one finds them there.
        """
        with self.below.lock:
            idle = self._idle_keys()
        there = self.below.has(idle)
        keys = [key for key, below in zip(idle, there, strict=True) if not below]
        size = min(self._chunk, self.below.host.num_slots)
        for first in range(0, len(keys), size):  # those that go first come last
            self.offload(keys[first : first + size]).wait()
        self.drain()

    def _idle_keys(self) -> list[bytes]:
        free_list = self.cache._free_list
        victims = _native.victims(free_list, free_list.num_idle)
        return [key for _, key in victims]

    def _send(
        self, keys: Sequence[bytes], ids: Sequence[int], *, published: bool = True
    ) -> Offload:
        """Copies blocks of the device to slots of the host.

        published: the blocks are found by these keys; if not, the caller holds them.
        """
        sent, futures, skipped = [], [], 0
        for first in range(0, len(keys), self._chunk):
            part = list(keys[first : first + self._chunk])
            slots = self.below.slots(len(part))
            if slots is None:
                skipped += len(part)
                continue
            skipped += len(part) - len(slots)
            part = part[: len(slots)]
            places = np.array(ids[first : first + len(part)], np.int32)
            staged = programs.staged(self.cache.manager, places)
            if published:
                # Who takes a block's place has it forgotten first. Those that are found
                # still were read before anybody could write there.
                find = self.cache._free_list.find
                kept = [
                    find(k) == i for k, i in zip(part, places.tolist(), strict=True)
                ]
            else:
                kept = [True] * len(part)
            futures.append(self.below.send(staged, part, kept, slots))
            sent += [key for key, keep in zip(part, kept, strict=True) if keep]
        self.below.host_counters.skipped += skipped
        return Offload(sent, futures, skipped)

    # ---- up ----

    def lookup(
        self, tokens: Tokens, *, adapter: str | None = None, salt: str | bytes = b""
    ) -> dict[str, int]:
        """How many tokens of a sequence lie where: the longest beginning, tier by tier.

        Returns:
          `device`, `host` (or on the way there) and `store`: tokens in whole blocks,
          each after those before it.
        """
        table = self.cache.empty_table(tokens, adapter, salt)
        size, end = table._native.block_size, max(table.num_tokens - 1, 0)
        keys = table.keys[: end // size]
        found = {}
        for name, has in (
            ("device", self._on_device),
            ("host", lambda keys: [self.below.on_host(key) for key in keys]),
            ("store", self.below.in_store),
        ):
            count = _run(has(keys))
            found[name], keys = count * size, keys[count:]
        return found

    def _on_device(self, keys: Sequence[bytes]) -> list[bool]:
        return [self.cache._free_list.find(key) is not None for key in keys]

    def open(
        self,
        tokens: Tokens,
        *,
        adapter: str | None = None,
        salt: str | bytes = b"",
        by_layer: bool = False,
    ) -> tuple[BlockTable, Onboard]:
        """A table for a sequence, and what of its beginning is on its way up.

        Arguments are those of `PrefixCache.open` and `onboard`. When the ticket is
        done, `table.match()` takes what has come: all, or what lies before a block that
        the store has lost meanwhile (`ticket.num_missing`).
        """
        table = self.cache.open(tokens, adapter=adapter, salt=salt)
        return table, self.onboard(table, by_layer=by_layer)

    def onboard(
        self,
        what: BlockTable | Iterable[bytes],
        *,
        parent: bytes | None = None,
        by_layer: bool = False,
    ) -> Onboard:
        """Brings up blocks that lie below, from the first on that the device has not.

        Args:
          what: a table without blocks that are reserved and not published; of its
            tokens all blocks but the last one's may come. Or keys of blocks that follow
            each other, before anybody asks for them.
          parent: what the first of the keys follows: a block's key, or `table.root`;
            None: a prompt begins with it, without adapter and salt.
          by_layer: whether layers come one after the other, for programs of one layer
            that call `wait(layer)` and find the blocks in the ticket's `ids`; blocks of
            keys and values (num_outer 2) alone.

        Raises:
          TypeError: for keys, or a parent, that are none.
          ValueError: for `by_layer` where blocks have no keys and values; for a
            `parent` of a table, which has its own; for a table of another manager.
          RuntimeError: when this is closed.
          PoolExhaustedError: when too few blocks are free or idle for those that come.
        """
        self.below.check_open("onboard")
        spec = self.below.host.spec
        if by_layer and spec.num_outer != 2:
            raise ValueError(
                "onboard: by_layer needs blocks of keys and values, num_outer=2, got "
                f"num_outer={spec.num_outer}; leave it out"
            )
        if isinstance(what, BlockTable):
            if parent is not None:
                raise ValueError(
                    "onboard: parent is for keys; a table knows what its blocks follow"
                )
            self.check_own("onboard", what)
            first, known, size = what.root, what.keys, spec.block_size
            start = what.num_committed_tokens // size
            wanted = known[: max((what.num_tokens - 1) // size, start)]
            return self._onboard(wanted, first, start, by_layer)
        wanted = _checked("onboard", what)
        first = self.cache.namespace.root() if parent is None else parent
        if not isinstance(first, bytes) or len(first) != 32:
            raise TypeError(
                "onboard: parent must be 32 bytes, a block's key or `table.root`, got "
                f"{parent!r}"
            )
        # Held, so that those that come do not take their place.
        there, _ = _native.hold_keys(self.cache._free_list, wanted, beginning=True)
        with there:
            return self._onboard(wanted, first, len(there), by_layer)

    def _onboard(
        self, known: Sequence[bytes], root: bytes, start: int, by_layer: bool
    ) -> Onboard:
        """Blocks from `start` on of those that follow each other from a root on."""
        keys = known[start:]
        # Before others make room for them on the device: those go down, too.
        kept = self.below.keep(keys)
        count = len(kept.slots)
        parents = [root, *known][start : start + count]
        return self._bring(keys[:count], parents, kept, by_layer)

    def _bring(
        self,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        kept: Placed,
        by_layer: bool,
    ) -> Onboard:
        """kept: what of the blocks is in host memory."""
        free_list = self.cache._free_list
        self.make_room(len(keys))
        told = f"onboard: {checks.plural(len(keys), 'block')} to come"
        try:
            blocks = take_hold(self.cache.manager, len(keys), told)
        except BaseException:
            kept.hold.release()
            raise
        ids, numbers = blocks.ids, blocks.ids.tolist()
        whole = len(keys)  # how many are there, from the first on
        others = 0  # that stay found in place of these

        def lost(place: int) -> None:
            nonlocal whole
            whole = min(whole, place)

        def publish(places: Sequence[int]) -> None:
            nonlocal others
            others += free_list.publish_each(
                [numbers[i] for i in places],
                [keys[i] for i in places],
                [parents[i] for i in places],
            )

        def came(first: int, end: int) -> None:
            publish(range(first, min(end, whole)))

        if by_layer:  # programs read blocks before all have come: they come together
            parts = self._layers(keys, ids, kept)
        else:
            parts = self._whole(keys, ids, kept, lost, came)

        def finish() -> int:
            with blocks, kept.hold:
                if by_layer:
                    came(0, len(keys))
                elif others:  # some of which may be gone by now
                    found = free_list.are_published(keys[:whole])
                    publish([i for i, has in enumerate(found) if not has])
            return len(keys) - whole

        def drop() -> None:
            blocks.release()
            kept.hold.release()

        return Onboard(ids, parts, self.below.rooms, finish, drop)

    def _layers(
        self, keys: Sequence[bytes], ids: np.ndarray, kept: Placed
    ) -> list[Part]:
        """kept: what of the blocks is in host memory."""
        manager, below = self.cache.manager, self.below
        if (kept.slots >= 0).all():
            return arriving.layers_of_all(manager, below, kept, ids, self._chunk)
        return [
            arriving.layers_of_some(manager, below, keys[some], ids[some])
            for some in self._chunks(len(keys))
        ]

    def _whole(
        self,
        keys: Sequence[bytes],
        ids: np.ndarray,
        kept: Placed,
        lost: Callable[[int], None],
        came: Callable[[int, int], None],
    ) -> list[Part]:
        """Whole blocks, part by part.

        Args:
          kept: what of them is in host memory; nobody looks for that again.
          lost: told the place of one that is not there any more.
          came: told the places, from and to, of a part that has come.
        """
        manager, below = self.cache.manager, self.below
        parts = []
        for some in self._chunks(len(keys)):
            if (slots := kept.slots[some]).min() >= 0:
                place = functools.partial(below.place_kept, slots)
            else:
                tell = functools.partial(_behind, lost, some.start)
                place = functools.partial(below.place, keys[some], tell)
            done = functools.partial(came, some.start, some.stop)
            part = arriving.whole_blocks(manager, below, place, ids[some], done)
            parts.append(part)
        return parts

    def _chunks(self, count: int) -> list[slice]:
        """So many blocks, as many at a time as a room holds."""
        firsts = range(0, count, self._chunk)
        return [slice(first, first + self._chunk) for first in firsts]

    def check_own(self, where: str, table: BlockTable) -> None:
        """That a table has its blocks in the pool of this cache.

        Raises:
          ValueError: when it has not.
        """
        if table._manager is not self.cache.manager:
            raise ValueError(
                f"{where}: the table has its blocks in another pool than the tiers, "
                f"which are below {self.cache!r}; pass the tiers of the table's own "
                "cache"
            )

    # ---- its state ----

    def drain(self) -> None:
        """Waits until nothing is on its way down."""
        self.below.drain()

    def stats(self) -> dict[str, dict[str, int]]:
        """What went through `host` and `store` since the start, and is there now.

        Returns:
          Of each: `blocks_in`, `blocks_out`, `bytes_in` and `bytes_out`; blocks
          `skipped` for want of room, `failed` and `lost`; what is `pending`. Of the
          host, too: `num_blocks`, and of them `idle` and `held`. Of the store: blocks
          that are `unanswered`, misses since it did not tell of them in time.
        """
        return self.below.stats()

    @property
    def store_error(self) -> BaseException | None:
        """What the store failed with last; what it could not read was a miss."""
        return self.below.store_error

    def check(self) -> None:
        """Recounts the books of device and host.

        Raises:
          RuntimeError: when they are wrong, which is a mistake of this library.
        """
        self.cache.check()
        wrong = self.below.host.books.check()
        if wrong:
            raise RuntimeError("TieredCache.check: host: " + "; ".join(wrong))

    def close(self) -> None:
        """Waits for what is under way, and ends the threads."""
        self.below.close()

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _behind(lost: Callable[[int], None], first: int, place: int) -> None:
    lost(first + place)


def _run(found: Sequence[bool]) -> int:
    """How many are found from the first on."""
    return [*found, False].index(False)


def _checked(name: str, what: Iterable[bytes]) -> list[bytes]:
    """Keys of blocks."""
    if not isinstance(what, Iterable) or isinstance(what, (str, bytes)):
        raise TypeError(
            f"{name}: pass a table, or keys of 32 bytes as `table.keys` has them, got "
            f"{what!r}; tiers are below one PrefixCache, and take no tables of groups"
        )
    keys = list(what)
    wrong = [key for key in keys if not isinstance(key, bytes) or len(key) != 32]
    if wrong:
        raise TypeError(
            f"{name}: pass a table, or keys of 32 bytes as `table.keys` has them, got "
            f"{wrong[0]!r}"
        )
    return keys
