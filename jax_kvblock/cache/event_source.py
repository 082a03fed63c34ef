"""The notes of a pool's books as events: blocks that follow each other are joined."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jax_kvblock.cache.event_types import (
    CPU,
    GPU,
    BlockRemoved,
    BlockStored,
    Event,
)

if TYPE_CHECKING:
    from jax_kvblock.cache.prefix import PrefixCache
    from jax_kvblock.cache.tiers import TieredCache

# Of one block: "stored" or "removed"; its key; its parent's; its tokens; its id.
Note = tuple[str, bytes, bytes, Sequence[int], int]


class Books(Protocol):
    """Where events come from: a `PrefixCache` or a `FreeList` that keeps them."""

    def drain_events(self) -> Sequence[Note]: ...


@dataclasses.dataclass(frozen=True)
class EventSource:
    """The books of one place, and what its events say of themselves.

    Attributes:
      books: a `PrefixCache` with `events=True`, or a `FreeList` after
        `keep_events(True)`.
      block_size: tokens to a block.
      medium: the place, "GPU" unless it is a tier below.
      roots: the roots that readers know, each with its adapter's name or None. A block
        with such a parent begins a sequence, and its parent is told as None. Roots with
        a salt are left out: told as they are, nobody takes their blocks for those of
        others, and the salt is told to nobody.
      group_idx, window: of a cache with several groups of layers, as in `BlockStored`.
    """

    books: Books
    block_size: int
    medium: str = GPU
    roots: Mapping[bytes, str | None] = dataclasses.field(default_factory=dict)
    group_idx: int | None = None
    window: int | None = None

    @classmethod
    def of(
        cls,
        cache: PrefixCache,
        *,
        adapters: Iterable[str] = (),
        group_idx: int | None = None,
        window: int | None = None,
    ) -> EventSource:
        """The source of a cache on the device.

        Args:
          cache: with `events=True`.
          adapters: the names that sequences may be opened with.
          group_idx, window: where it is one of a `GroupedCache`'s.

        Raises:
          TypeError: for adapters that are one text.
          ValueError: for a cache that keeps no events.

        Example:
          >>> sources = [
          ...     EventSource.of(one, group_idx=i, window=grouped.windows.get(name))
          ...     for i, (name, one) in enumerate(grouped.caches.items())
          ... ]
        """
        if isinstance(adapters, (str, bytes)):
            raise TypeError(
                f"EventSource.of: adapters must be several names, got {adapters!r}; "
                f"pass [{adapters!r}]"
            )
        if not cache.manager._memory.keeps_events:
            raise ValueError(
                f"EventSource.of: {cache!r} keeps no events, so that none would be "
                "told; make it with PrefixCache(..., events=True)"
            )
        names: list[str | None] = [None, *adapters]
        return cls(
            cache,
            cache.namespace.spec.block_size,
            roots={cache.namespace.root(name): name for name in names},
            group_idx=group_idx,
            window=window,
        )

    @classmethod
    def of_host(cls, tiers: TieredCache) -> EventSource:
        """The source of the host memory below a cache; its books keep events from now.

        Of a block its key is known there, and no tokens.
        """
        books = tiers.below.host.books
        books.keep_events(True)
        return cls(books, tiers.cache.namespace.spec.block_size, CPU)


class EventReader:
    """Drains the notes of one source, and joins them to events.

    Blocks that were stored one after the other, each the next one's parent, are one
    `BlockStored`; blocks that were removed one after the other one `BlockRemoved`.

    Args:
      source: see `EventSource`.
    """

    def __init__(self, source: EventSource) -> None:
        self._source = source
        # The adapter of each block that has one, for the blocks that come after it.
        self._adapters: dict[bytes, str] = {}

    def read(self) -> Iterator[Event]:
        """What was noted since the last call."""
        run: list[Note] = []
        for note in self._source.books.drain_events():
            if run and not _follows(run[-1], note):
                yield self._event(run)
                run = []
            run.append(note)
        if run:
            yield self._event(run)

    def _event(self, run: list[Note]) -> Event:
        source = self._source
        kind, _, parent, _, _ = run[0]
        keys = tuple(key for _, key, _, _, _ in run)
        if kind == "removed":
            for key in keys:
                self._adapters.pop(key, None)
            return BlockRemoved(keys, source.medium, source.group_idx)
        begins = parent in source.roots
        adapter = source.roots[parent] if begins else self._adapters.get(parent)
        if adapter is not None:
            self._adapters.update(dict.fromkeys(keys, adapter))
        return BlockStored(
            keys,
            None if begins else parent,
            np.array([token for note in run for token in note[3]], np.int32),
            source.block_size,
            source.medium,
            adapter,
            source.group_idx,
            source.window,
        )


def _follows(last: Note, note: Note) -> bool:
    kind, key, _, tokens, _ = last
    if note[0] != kind or kind == "removed":
        return note[0] == kind
    # Either all blocks of an event have tokens, or none has.
    return note[2] == key and bool(note[3]) == bool(tokens)
