"""`GroupedCache`: groups of layers, each with a pool and, maybe, a window.

A model may have layers that see all tokens and layers that see a window of them. Each
group keeps its blocks in a pool of its own, and those with a window give blocks back
early. A prefix is of use where every group has what it needs of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from jax_kvblock.cache.namespace import Tokens
from jax_kvblock.cache.prefix import PrefixCache
from jax_kvblock.cache.table import BlockTable
from jax_kvblock.core import checks


class GroupedCache:
    """Several prefix caches that hold one model's layers.

    Args:
      caches: by the groups' names; all with the same block_size.
      windows: how many tokens a layer of a group sees, its own among them; a group
        without an entry sees all.

    Raises:
      TypeError: for caches that are no PrefixCaches by name.
      ValueError: for no group, other names among the windows, windows below 1, block
        sizes that differ, or groups of one pool whose keys would be the same.

    Example:
      >>> cache = GroupedCache({"full": a, "sliding": b}, windows={"sliding": 1024})
      >>> table = cache.open(tokens)
      >>> table.tables["sliding"].page_table(64)      # -1 behind the window
    """

    def __init__(
        self,
        caches: Mapping[str, PrefixCache],
        *,
        windows: Mapping[str, int] | None = None,
    ) -> None:
        given = caches.values() if isinstance(caches, Mapping) else [caches]
        wrong = [x for x in given if not isinstance(x, PrefixCache)]
        if wrong:
            raise TypeError(
                "GroupedCache: caches must be a PrefixCache by each group's name, got "
                f"{wrong[0]!r}; pass {{'full': PrefixCache(manager, model=...)}}"
            )
        self.caches = dict(caches)
        self.windows = {
            name: checks.check_integer(
                "GroupedCache", f"windows[{name!r}]", w, "an int"
            )
            for name, w in (windows or {}).items()
        }
        if not self.caches:
            raise ValueError("GroupedCache: caches is empty; pass one for each group")
        unknown = set(self.windows) - set(self.caches)
        if unknown:
            raise ValueError(
                f"GroupedCache: windows of {sorted(unknown)}, which are no groups; the "
                f"groups are {sorted(self.caches)}"
            )
        if any(window < 1 for window in self.windows.values()):
            raise ValueError(
                f"GroupedCache: windows must be at least 1, got {self.windows}"
            )
        sizes = {x.manager.spec.block_size for x in self.caches.values()}
        if len(sizes) > 1:
            raise ValueError(
                f"GroupedCache: all groups need one block_size, got {sorted(sizes)}"
            )
        (self.block_size,) = sizes
        self._check_apart()

    def set_model_name(self, model: str) -> None:
        """As `PrefixCache.set_model_name`, of all groups: "<model>/<group>" each."""
        for name, each in self.caches.items():
            each.set_model_name(f"{model}/{name}")

    def _check_apart(self) -> None:
        """That no two groups of one pool have the same keys."""
        by_keys: dict[tuple[int, bytes], str] = {}
        for name, each in self.caches.items():
            keys = id(each.manager), each.namespace.digest
            same = by_keys.setdefault(keys, name)
            if same != name:
                own = f"{each.namespace.model}/{name}"
                raise ValueError(
                    f"GroupedCache: {same!r} and {name!r} have one pool, where their "
                    "blocks would have the same keys; give each group's PrefixCache a "
                    f"model of its own, such as model={own!r}"
                )

    def open(
        self,
        tokens: Tokens = (),
        *,
        adapter: str | None = None,
        salt: str | bytes = b"",
    ) -> GroupedTable:
        """A table for a sequence, with the longest beginning that serves all groups.

        Arguments are those of `PrefixCache.open`.

        Raises:
          ValueError: groups of one pool were given one model's name meanwhile.
        """
        self._check_apart()  # a cache may have another name by now
        while True:
            tables = {
                name: cache.empty_table(tokens, adapter, salt)
                for name, cache in self.caches.items()
            }
            end = self._shared_blocks({n: t.keys for n, t in tables.items()}, tables)
            found = True
            for name, table in tables.items():
                table._native.skip(
                    min(self.first_seen(name, end * self.block_size), end)
                )
                found &= table.match(end * self.block_size) == end * self.block_size
            if found:
                return GroupedTable(self, tables)
            for table in tables.values():  # another thread took a block: look again
                table.free()

    def first_seen(self, name: str, token: int) -> int:
        """The first block that this token, the next one, sees in a group."""
        window = self.windows.get(name)
        return 0 if window is None else max(token - window + 1, 0) // self.block_size

    def _shared_blocks(
        self, keys: Mapping[str, list[bytes]], tables: Mapping[str, BlockTable]
    ) -> int:
        """How many blocks from the beginning on need not be computed."""
        some = next(iter(tables.values()))
        end = max(some.num_tokens - 1, 0) // self.block_size
        here = {}
        for name, cache in self.caches.items():
            here[name] = [
                cache._free_list.find(k) is not None for k in keys[name][:end]
            ]
        for name in set(self.caches) - set(self.windows):
            end = min(end, (here[name] + [False]).index(False))
        while end and not all(
            all(here[name][self.first_seen(name, end * self.block_size) : end])
            for name in self.windows
        ):
            end -= 1
        return end


class GroupedTable:
    """The blocks of one sequence in every group; `GroupedCache.open` makes it.

    Attributes:
      tables: the `BlockTable` of each group.
    """

    def __init__(self, cache: GroupedCache, tables: dict[str, BlockTable]) -> None:
        self._cache = cache
        self.tables = tables

    @property
    def num_tokens(self) -> int:
        """How many tokens were appended."""
        return next(iter(self.tables.values())).num_tokens

    @property
    def num_cached_tokens(self) -> int:
        """How many tokens need not be computed, in any group."""
        return min(table.num_cached_tokens for table in self.tables.values())

    def append(self, tokens: Tokens) -> None:
        """Adds the sequence's next tokens, without blocks for them."""
        for table in self.tables.values():
            table.append(tokens)

    def reserve(self, num_tokens: int) -> None:
        """Takes blocks in every group, so that these tokens have a place.

        Raises:
          PoolExhaustedError: when a group has too few; then none is taken.
        """
        before = {name: len(table) for name, table in self.tables.items()}
        try:
            for table in self.tables.values():
                table.reserve(num_tokens)
        except BaseException:
            for name, table in self.tables.items():
                table._native.shrink(before[name])
            raise

    def commit(self, num_tokens: int) -> None:
        """Publishes what these tokens fill, and gives back what windows have left."""
        for name, table in self.tables.items():
            table.commit(num_tokens)
            if name in self._cache.windows:
                first = self._cache.first_seen(name, num_tokens)
                table.free_before(first * self._cache.block_size)

    def writable(self, start: int, count: int) -> int:
        """Gives every group blocks of its own for these tokens (copy on write).

        Returns:
          How many blocks were copied.

        Raises:
          PoolExhaustedError: when a group has too few free ones; groups before it have
            theirs.
        """
        return sum(t.writable(start, count) for t in self.tables.values())

    def truncate(self, num_tokens: int) -> None:
        """Takes tokens from the end, and the blocks of those alone.

        Raises:
          ValueError: for more tokens than there are.
        """
        for table in self.tables.values():
            table.truncate(num_tokens)

    def fork(self) -> GroupedTable:
        """Another table of the same tokens and blocks, which both share from now on."""
        tables = {name: table.fork() for name, table in self.tables.items()}
        return GroupedTable(self._cache, tables)

    def free(self) -> None:
        """Gives all blocks back; again does nothing."""
        for table in self.tables.values():
            table.free()

    def __enter__(self) -> GroupedTable:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()
