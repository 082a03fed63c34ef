"""`PrefixCache`: sequences that begin alike share the blocks of their beginning."""

from __future__ import annotations

from jax_kvblock import _native
from jax_kvblock.cache.namespace import Namespace, Tokens, token_array
from jax_kvblock.cache.table import BlockTable
from jax_kvblock.core import checks
from jax_kvblock.objects.manager import BlockManager

POLICIES = ("lru", "lfu")


class PrefixCache:
    """The blocks of a manager, found by what they hold.

    A block is found by the tokens that it holds and all tokens before them. When the
    last sequence gives it back it stays in memory, idle, and its place is taken when no
    other block is free. Threads may share a cache; a table belongs to one at a time.

    Args:
      manager: whose blocks these are. `allocate_blocks` goes on working beside it.
        Caches of one manager share its books: the last one's policy holds for all, and
        once one of them keeps events they are kept.
      model: the model's name, with its revision where weights may change.
      num_kv_heads: the model's KV heads, where the manager has a shard of them.
      policy: whose place is taken first: "lru", who was idle for longest; "lfu", who
        was found least often, then who was idle for longest.
      reserve: the part of the blocks that `can_admit` leaves to sequences that run.
      events: whether what is stored and removed is kept for `drain_events`.

    Raises:
      TypeError: when `manager` is no `BlockManager`.
      ValueError: for another policy, or a reserve outside of 0 to 1.

    Example:
      >>> cache = PrefixCache(manager, model="SmolLM2-135M")
      >>> table = cache.open(tokens)
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        model: str,
        num_kv_heads: int | None = None,
        policy: str = "lru",
        reserve: float = 0.0,
        events: bool = False,
    ) -> None:
        if not isinstance(manager, BlockManager):
            raise TypeError(
                f"PrefixCache: manager must be a BlockManager, got {manager!r}"
            )
        if policy not in POLICIES:
            raise ValueError(
                f"PrefixCache: policy must be one of {', '.join(POLICIES)}, got "
                f"{policy!r}"
            )
        if isinstance(reserve, bool) or not isinstance(reserve, (int, float)):
            raise TypeError(
                f"PrefixCache: reserve must be a number, a part of the blocks, got "
                f"{reserve!r}"
            )
        if not 0 <= reserve < 1:
            raise ValueError(
                f"PrefixCache: reserve is a part of the blocks, 0 to 1, got {reserve!r}"
            )
        self.manager = manager
        self.namespace = Namespace(model, manager.spec, num_kv_heads)
        self.policy = policy
        self._reserve = int(reserve * manager.num_blocks)
        self._free_list.set_policy(policy)
        if events:
            self._free_list.keep_events(True)
            manager._memory.keeps_events = True

    @property
    def _free_list(self) -> _native.FreeList:
        return self.manager._memory.free_list

    # ---- sequences ----

    def open(
        self,
        tokens: Tokens = (),
        *,
        adapter: str | None = None,
        salt: str | bytes = b"",
        max_cached_tokens: int | None = None,
    ) -> BlockTable:
        """A table for a sequence, with the blocks of its beginning that are here.

        Args:
          tokens: the sequence so far, integers of 32 bits.
          adapter: the name of an adapter that changes keys and values.
          salt: whatever else tells sequences apart, such as a tenant.
          max_cached_tokens: how many tokens may be found; all but the last one when
            None, since the last one's logits are wanted.

        Raises:
          TypeError, ValueError: for tokens that are not.
        """
        self.manager._memory.check_open("open")
        table = self.empty_table(tokens, adapter, salt)
        table.match(max_cached_tokens)
        return table

    def empty_table(
        self, tokens: Tokens, adapter: str | None = None, salt: str | bytes = b""
    ) -> BlockTable:
        """A table for a sequence, without blocks."""
        root = self.namespace.root(adapter, salt)
        size = self.namespace.spec.block_size
        native = _native.BlockTable(self._free_list, root, size)
        native.append(token_array("PrefixCache.open", tokens))
        return BlockTable(self.manager, native)

    def cached_tokens(
        self, tokens: Tokens, *, adapter: str | None = None, salt: str | bytes = b""
    ) -> int:
        """How many of these tokens `open` would find now; nothing is taken."""
        numbers = token_array("PrefixCache.cached_tokens", tokens)
        keys = self.namespace.keys(numbers, adapter=adapter, salt=salt)
        size, found = self.namespace.spec.block_size, 0
        limit = max(len(numbers) - 1, 0) // size
        while found < limit and self._free_list.find(keys[found]) is not None:
            found += 1
        return found * size

    def can_admit(self, num_blocks: int) -> bool:
        """Whether so many blocks are available, with the reserve left."""
        wanted = checks.check_integer(
            "PrefixCache.can_admit", "num_blocks", num_blocks, "pass an int"
        )
        return wanted + self._reserve <= len(self._free_list)

    # ---- the books ----

    @property
    def num_idle_blocks(self) -> int:
        """How many blocks are found by their keys and held by nobody."""
        return self._free_list.num_idle

    @property
    def num_free_blocks(self) -> int:
        """How many blocks hold nothing. `manager.num_free_blocks` has the idle, too."""
        return self._free_list.num_free

    def clear(self) -> None:
        """Forgets all idle blocks.

        Those that sequences hold stay, and so does what tiers below have: where weights
        have changed, `set_model_name`.
        """
        self._free_list.forget_idle()

    def set_model_name(self, model: str) -> None:
        """Has weights changed: nothing that was computed by others is found any more.

        Sequences that are opened from now on have keys of this name, on the device and
        in all tiers below it. Those that are open keep their blocks, of the weights
        before, and publish what only sequences like them find: call it between steps,
        and recompute what is to go on with the new weights; `park` refuses what was
        opened before. Idle blocks are forgotten; tiers evict theirs as they do any that
        nobody asks for. A name that comes back finds what is still there of its own. An
        `EventSource`, a connector, a `BlockServer` or a `DiskTier` of the name before
        stays one of it: make it anew. Groups of one pool have names of their own:
        `GroupedCache.set_model_name`.

        Args:
          model: the model's name with its new revision.

        Raises:
          TypeError, ValueError: as the constructor.
        """
        before = self.namespace
        self.namespace = Namespace(model, before.spec, before.num_kv_heads)
        self.clear()

    def stats(self) -> dict[str, int]:
        """What has happened so far, and what the blocks are doing.

        Returns:
          Counted since the start: `lookups` of tables, `queried_blocks` and
          `hit_blocks` of them, `allocated`, `published` and `evicted` blocks,
          `duplicates` that collapsed, `copied_on_write` blocks, and allocations that
          were `refused`. Now: `num_blocks`, and of them `free`, `idle` and `held`.
        """
        free_list = self._free_list
        now = {
            "num_blocks": free_list.num_blocks,
            "free": free_list.num_free,
            "idle": free_list.num_idle,
        }
        held = free_list.num_blocks - free_list.num_free - free_list.num_idle
        return {**free_list.counters(), **now, "held": held}

    def drain_events(self) -> list[tuple[str, bytes, bytes, list[int], int]]:
        """What was stored and removed since the last call, in order.

        Returns:
          Tuples (kind, key, parent, tokens, block); kind is "stored" or "removed".
        """
        return self._free_list.drain_events()

    def check(self) -> None:
        """Recounts the books.

        Raises:
          RuntimeError: when they are wrong, which is a mistake of this library.
        """
        wrong = self._free_list.check()
        if wrong:
            raise RuntimeError("PrefixCache.check: " + "; ".join(wrong))

    def __repr__(self) -> str:
        return (
            f"PrefixCache({self.namespace.model}, {self.num_free_blocks} free and "
            f"{self.num_idle_blocks} idle of {self.manager.num_blocks} blocks)"
        )
