"""A prefix cache and its model, side by side: each operation is done to both.

What lies in the blocks is modelled, too. A step of an engine writes the number of a
beginning (`cache_model.Words`) into the slot of its last token, so that a block which
is found by a key can be asked what it holds. Operations take whole numbers and choose
by them, so that `random` and hypothesis can both draw.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from cache_model import BooksModel, Words

import jax_kvblock as kv
from jax_kvblock import _native
from jax_kvblock.cache import StepArrays, prepare_step

SIZE, SALTS = 2, ("", "a")


class CopyingManager(kv.BlockManager):
    """Its updates copy what the model says the blocks hold."""

    contents: np.ndarray

    def update(self, step: Any, /, old: Any, new: Any, **_: Any) -> Any:
        assert step is kv.copy_blocks
        here = new >= 0
        self.contents[new[here]] = self.contents[old[here]]


@dataclasses.dataclass
class Table:
    """A table, and what it should be."""

    real: kv.BlockTable
    salt: str
    tokens: list[int]
    words: list[int]
    ids: list[int]
    committed: int = 0  # blocks
    cached: int = 0
    asked: int = -1


@dataclasses.dataclass
class Held:
    """Blocks that something else holds: `release()` gives them back."""

    what: Any
    release: Callable[[], None]
    blocks: list[int]
    exports: bool = False


class World:
    """A small pool with everything that may happen to it."""

    def __init__(self, policy: str = "lru", num_blocks: int = 12) -> None:
        manager = CopyingManager(
            1, SIZE, num_kv_heads=1, head_dim=1, num_blocks=num_blocks,
            dtype=jnp.float32,
        )  # fmt: skip
        manager._garbage._wasted = np.inf  # the model has no garbage
        manager.contents = np.full((num_blocks, SIZE), -1)
        self.manager, self.contents = manager, manager.contents
        self.cache = kv.PrefixCache(manager, model="x", policy=policy, events=True)
        self.free_list = self.cache._free_list
        self.books, self.words = BooksModel(num_blocks, policy), Words()
        self.tables: list[Table] = []
        self.held: list[Held] = []
        self.told: dict[bytes, int] = {}  # key to block, as events tell
        self._keys: dict[int, bytes] = {}

    # ---- sequences ----

    def open(self, salt: int, tokens: list[int], limit: int | None = None) -> None:
        name = SALTS[salt % len(SALTS)]
        real = self.cache.open(tokens, salt=name, max_cached_tokens=limit)
        words = self.words.along(name, tokens)
        table = Table(real, name, list(tokens), words, [])
        self._match(table, limit)
        self.tables.append(table)

    def match(self, table: Table, limit: int | None = None) -> None:
        if len(table.ids) > table.committed:
            with refused(ValueError, "match before you reserve"):
                table.real.match(limit)
            return
        found = table.real.match(limit)
        self._match(table, limit)
        assert found == table.committed * SIZE

    def _match(self, table: Table, limit: int | None) -> None:
        limit = len(table.tokens) - 1 if limit is None else limit
        end = min(len(table.tokens), max(limit, 0)) // SIZE
        counters = self.books.counters
        counters["lookups"] += table.asked < 0
        asked = max(table.asked, table.committed)
        counters["queried_blocks"] += max(end - asked, 0)
        table.asked = max(table.asked, end)
        while table.committed < end:
            block = self.books.match(self.key(table, table.committed))
            if block is None:
                break
            table.ids.append(block)
            table.committed += 1
            table.cached += 1
            counters["hit_blocks"] += 1

    def key(self, table: Table, place: int) -> int:
        return table.words[(place + 1) * SIZE - 1]

    def append(self, table: Table, tokens: list[int]) -> None:
        table.real.append(tokens)
        table.tokens += tokens
        table.words = self.words.along(table.salt, table.tokens)

    def reserve(self, table: Table, more: int, spare: int = 0) -> None:
        """Blocks for the tokens so far and some more."""
        tokens = len(table.tokens) + more
        wanted = -(-tokens // SIZE) - len(table.ids)
        if wanted > 0 and wanted + spare > self.books.num_available:
            self.books.counters["refused"] += 1
            with refused(kv.PoolExhaustedError, "asked for"):
                table.real.reserve(tokens, spare=spare)
            return
        table.real.reserve(tokens, spare=spare)
        taken = table.real.ids.tolist()[len(table.ids) :]
        assert len(taken) == max(wanted, 0)
        self.books.take(taken)
        table.ids += taken

    def written(self, table: Table) -> int:
        """How many tokens' keys and values are there, or were given back."""
        for i, word in enumerate(table.words):
            place, offset = divmod(i, SIZE)
            if place >= len(table.ids):
                return i
            block = table.ids[place]
            if block >= 0 and self.contents[block, offset] != word:
                return i
        return len(table.words)

    def step(self, table: Table, count: int) -> None:
        """An engine's step: the next tokens that are not there are written."""
        start = self.written(table)
        stop = min(start + count, len(table.words), len(table.ids) * SIZE)
        if start >= stop:
            return
        places = range(start // SIZE, (stop - 1) // SIZE + 1)
        blocks = [table.ids[place] for place in places]
        shared = [b for b in blocks if self.books.is_shared(b)]
        if shared:
            with refused(ValueError, "is shared; call writable"):
                table.real.slots(start, stop - start)
        if not self.books.can_take(len(shared)):
            with refused(kv.PoolExhaustedError, "to copy to"):
                table.real.writable(start, stop - start)
            return
        assert table.real.writable(start, stop - start) == len(shared)
        ids = table.real.ids.tolist()
        self.books.take([ids[p] for p in places if ids[p] != table.ids[p]])
        # Who was shared goes in the order of the table, from its end.
        for place in reversed(places):
            if ids[place] != table.ids[place]:
                self.books.drop(table.ids[place])
        self.books.counters["copied_on_write"] += len(shared)
        table.ids = ids
        slots = table.real.slots(start, stop - start)
        wanted = [ids[i // SIZE] * SIZE + i % SIZE for i in range(start, stop)]
        assert slots.tolist() == wanted
        self.contents.reshape(-1)[slots] = table.words[start:stop]

    def step_of_all(self, counts: list[int], spare: int) -> None:
        """A step over all tables, in one call: the next tokens of each are written."""
        starts = [self.written(table) for table in self.tables]
        pairs = zip(self.tables, starts, counts, strict=False)
        counts = [min(n, len(table.words) - start) for table, start, n in pairs]
        reals = [table.real for table in self.tables[: len(counts)]]
        starts = starts[: len(counts)]

        def prepare() -> StepArrays:
            return prepare_step(
                reals, counts, starts=starts, max_blocks=64, spare=spare
            )

        wanted = shared = 0
        for table, start, count in zip(self.tables, starts, counts, strict=False):
            ids = table.ids[start // SIZE : -(-(start + count) // SIZE) if count else 0]
            shared += any(self.books.is_shared(block) for block in ids)
            wanted += max(-(-(start + count) // SIZE) - len(table.ids), 0)
        if shared:
            with refused(ValueError, "is shared; call writable"):
                prepare()
            return
        if wanted and wanted + spare > self.books.num_available:
            self.books.counters["refused"] += 1
            with refused(kv.PoolExhaustedError, "too few blocks for a step of"):
                prepare()
            return
        got = prepare()
        # Taken as one, and handed out table after table.
        new = [real.ids.tolist() for real in reals]
        pairs = list(zip(self.tables, new, strict=False))
        self.books.take([b for table, ids in pairs for b in ids[len(table.ids) :]])
        slots, words = [], []
        for (table, ids), start, count in zip(pairs, starts, counts, strict=True):
            assert ids[: len(table.ids)] == table.ids
            assert len(ids) == max(len(table.ids), -(-(start + count) // SIZE))
            table.ids = ids
            slots += [
                ids[i // SIZE] * SIZE + i % SIZE for i in range(start, start + count)
            ]
            words += table.words[start : start + count]
        assert got.slots.tolist() == slots
        assert [row[row >= 0].tolist() for row in got.block_tables] == [
            [block for block in ids if block >= 0] for ids in new
        ]
        assert got.kv_lens.tolist() == np.add(starts, counts).tolist()
        assert np.diff(got.query_start, prepend=0).tolist() == [0, *counts]
        self.contents.reshape(-1)[slots] = words

    def commit(self, table: Table, tokens: int) -> None:
        """Of at most what is written, or of a published block with other tokens."""
        tokens = min(tokens, len(table.words), len(table.ids) * SIZE)
        for place in range(table.committed, tokens // SIZE):
            held = self.books.key_of.get(table.ids[place])
            if held is not None and held != self.key(table, place):
                with refused(ValueError, r"holds other tokens; call writable"):
                    table.real.commit(tokens)
                return
        tokens = min(tokens, self.written(table))
        replaced = []
        for place in range(table.committed, tokens // SIZE):
            block = table.ids[place]
            if block < 0 or block in self.books.key_of:
                continue
            there = self.books.publish(block, self.key(table, place))
            if there != block:
                self.books.hold(there)
                table.ids[place] = there
                self.books.drop(block)
                replaced.append(place)
        table.committed = max(table.committed, tokens // SIZE)
        assert table.real.commit(tokens) == replaced

    def fork(self, table: Table) -> None:
        for block in table.ids:
            if block >= 0:
                self.books.hold(block)
        copied = dataclasses.replace(
            table, real=table.real.fork(), tokens=list(table.tokens),
            words=list(table.words), ids=list(table.ids),
        )  # fmt: skip
        self.tables.append(copied)

    def truncate(self, table: Table, tokens: int) -> None:
        table.real.truncate(tokens)
        del table.tokens[tokens:], table.words[tokens:]
        kept = -(-tokens // SIZE)
        self._drop(table.ids[kept:])
        del table.ids[kept:]
        table.committed = min(table.committed, tokens // SIZE)
        table.cached = min(table.cached, table.committed)
        table.asked = min(table.asked, tokens // SIZE)

    def free_before(self, table: Table, token: int) -> None:
        table.real.free_before(token)
        end = min(token // SIZE, len(table.ids))
        self._drop(table.ids[:end])
        table.ids[:end] = [-1] * end

    def free(self, table: Table, collected: bool) -> None:
        self.tables = [other for other in self.tables if other is not table]
        if not collected:
            table.real.free()
        del table.real
        self._drop(table.ids)

    def _drop(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            if block >= 0:
                self.books.drop(block)

    # ---- whoever else holds blocks ----

    def _keep(self, what: Any, release: Any, blocks: list[int], **kind: bool) -> None:
        self.held.append(Held(what, release, blocks, **kind))

    def hold(self, blocks: list[int]) -> None:
        """A reference to each of these, for a copy in flight; to all or none."""
        ids = np.array(blocks, np.int32)
        if set(blocks) & self.books.free:
            with refused(ValueError, "a block is free"):
                _native.hold(self.free_list, ids)
            return
        hold = _native.hold(self.free_list, ids)
        for block in blocks:
            self.books.hold(block)
        self._keep(hold, hold.release, blocks)

    def hold_places(self, table: Table, places: list[int]) -> None:
        blocks = [table.ids[place] for place in places]
        if -1 in blocks:
            with refused(IndexError, "no block is in this place"):
                table.real._native.hold(places)
            return
        hold = table.real._native.hold(places)
        for block in blocks:
            self.books.hold(block)
        self._keep(hold, hold.release, blocks)

    def victims(self, count: int) -> None:
        wanted = [
            (block, self.bytes_of(self.books.key_of[block]))
            for block in self.books.victims(count)
        ]
        assert _native.victims(self.free_list, count) == wanted

    def hold_keys(self, words: list[int]) -> None:
        """What is there of these, for a copy to elsewhere."""
        keys = [self.bytes_of(word) for word in words]
        hold, places = _native.hold_keys(self.free_list, keys)
        found = [self.books.match(word) for word in words]
        blocks = [block for block in found if block is not None]
        assert places == [i for i, block in enumerate(found) if block is not None]
        assert hold.ids.tolist() == blocks
        self._keep(hold, hold.release, blocks)

    def onboard(self, salt: int, tokens: list[int], handles: bool = False) -> None:
        """Blocks come from elsewhere, and are published without a table."""
        name, count = SALTS[salt % len(SALTS)], len(tokens) // SIZE
        if handles:
            before = len(self.held)
            self.allocate(count)
            if len(self.held) == before:
                return
            blocks = self.held[-1].blocks
        else:
            hold = _native.take_hold(self.free_list, count)
            if not self.books.can_take(count):
                assert hold is None
                return
            assert hold is not None
            blocks = hold.ids.tolist()
            self.books.take(blocks)
            self._keep(hold, hold.release, blocks)
        words = self.words.along(name, tokens)
        parent = self.cache.namespace.root(salt=name)
        for i, block in enumerate(blocks):
            self.contents[block] = words[i * SIZE : (i + 1) * SIZE]
            word = words[(i + 1) * SIZE - 1]
            key = self.bytes_of(word)
            there = self.free_list.publish(block, key, parent)
            assert there == self.books.publish(block, word)
            parent = key

    def allocate(self, count: int) -> None:
        if count > self.books.num_available:
            if count <= self.books.num_blocks:  # else nobody is asked
                self.books.counters["refused"] += 1
            with refused(kv.PoolExhaustedError, "asked for"):
                self.manager.allocate_blocks(count)
            return
        blocks = self.manager.allocate_blocks(count)
        self.books.take(blocks.ids.tolist())
        self._keep(blocks, blocks.free, blocks.ids.tolist())

    def share(self, held: Held) -> None:
        """Another handle to each block, or an export of it."""
        if isinstance(held.what, kv.BlockList):
            shared = held.what.share()
            for block in held.blocks:
                self.books.hold(block)
            self._keep(shared, shared.free, held.blocks)

    def export(self, held: Held) -> None:
        if isinstance(held.what, kv.BlockList) and held.blocks:
            exports = [held.what[0]._lease.export([0])]
            self.books.hold(held.blocks[0])
            self.books.exports[held.blocks[0]] += 1
            self._keep(exports, exports.clear, held.blocks[:1], exports=True)

    def release(self, held: Held, collected: bool) -> None:
        self.held = [other for other in self.held if other is not held]
        in_order = isinstance(held.what, kv.BlockList) and not collected
        if held.exports or not collected:
            held.release()
        held.what = held.release = None  # type: ignore[assignment]
        blocks = held.blocks[::-1] if in_order else held.blocks
        self._drop(blocks)
        if held.exports:
            self.books.exports.subtract(held.blocks)

    # ---- keys ----

    def bytes_of(self, word: int) -> bytes:
        """The key of a block that ends with this."""
        if word not in self._keys:
            salt, tokens = self.words.sequence(word)
            self._keys[word] = self.cache.namespace.keys(tokens, salt=salt)[-1]
        return self._keys[word]

    def forget(self, words: list[int]) -> None:
        here = [word for word in words if word in self.books.published]
        count = self.free_list.forget([self.bytes_of(word) for word in words])
        assert count == len(here)
        for word in here:
            self.books.forget(self.books.published[word])

    def clear(self) -> None:
        self.cache.clear()
        for block in self.books.victims(self.books.num_blocks):
            self.books.forget(block)

    def set_policy(self, policy: str) -> None:
        self.free_list.set_policy(policy)
        self.books.set_policy(policy)

    # ---- compared ----

    def check(self) -> None:
        """Both say the same of how many blocks there are of each kind."""
        books = self.books
        self.cache.check()
        assert self.free_list.num_free == len(books.free)
        assert self.free_list.num_idle == books.num_idle
        assert self.free_list.counters() == books.counters

    def check_all(self) -> None:
        """And of each block and table; what is found holds what its key says."""
        self.check()
        books = self.books
        references = [self.free_list.references(b) for b in range(books.num_blocks)]
        assert references == books.references
        assert self.free_list.num_exports == books.exports.total()
        for table in self.tables:
            assert table.real.ids.tolist() == table.ids
            assert table.real.tokens.tolist() == table.tokens
            assert table.real.num_committed_tokens == table.committed * SIZE
            assert table.real.num_cached_tokens == table.cached * SIZE
            assert self.written(table) >= table.committed * SIZE
        for word, block in books.published.items():
            assert self.free_list.find(self.bytes_of(word)) == block
            salt, tokens = self.words.sequence(word)
            held = self.words.along(salt, tokens)[-SIZE:]
            assert self.contents[block].tolist() == held
        for kind, key, _, _, block in self.cache.drain_events():
            if kind == "stored":
                assert key not in self.told
                self.told[key] = block
            else:
                assert self.told.pop(key) == block
        wanted = {self.bytes_of(word): block for word, block in books.published.items()}
        assert self.told == wanted

    def end(self) -> None:
        """Everything is given back, and everything is there."""
        for held in self.held:
            self.release(held, collected=False)
        for table in self.tables:
            self.free(table, collected=False)
        self.check_all()
        assert self.books.references == [0] * self.books.num_blocks
        assert self.books.num_available == self.books.num_blocks
        self.clear()
        self.check_all()
        assert self.free_list.num_free == self.books.num_blocks


@contextlib.contextmanager
def refused(error: type[Exception], words: str) -> Any:
    """As `pytest.raises`, in a tenth of its time."""
    try:
        yield
    except error as raised:
        assert words in str(raised), raised
        # Its frames hold tables, and one of contextlib's holds it, from Python 3.12 on.
        raised.__traceback__ = None
    else:
        raise AssertionError(f"nothing was refused, and should be: {words}")
