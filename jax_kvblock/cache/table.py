"""`BlockTable`: the blocks of one sequence, found, shared, written and published."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jax_kvblock import _native
from jax_kvblock.blocks.transfer import copy_blocks
from jax_kvblock.cache.namespace import Tokens, token_array
from jax_kvblock.cache.taking import attempt, exhausted, take_hold
from jax_kvblock.core import checks
from jax_kvblock.objects.manager import BlockManager

if TYPE_CHECKING:
    from jaxtyping import Int


class BlockTable:
    """The blocks of one sequence of tokens; `PrefixCache.open` makes it.

    Its blocks go back to the manager when it is freed, collected, or at the end of a
    `with`. Those that are published stay in memory until their place is needed.

    A step of an engine: `append` the tokens, `reserve` blocks for them, compute with
    `slots` and `page_table`, `commit` what was written.

    Example:
      >>> with cache.open(prompt) as table:
      ...     start = table.num_cached_tokens         # these need not be computed
      ...     table.reserve(len(prompt))
      ...     slots = table.slots(start, len(prompt) - start)
      ...     manager.update(prefill, prompt[start:], slots, table.page_table(64))
      ...     table.commit(len(prompt))               # others find them from now on
    """

    def __init__(self, manager: BlockManager, native: _native.BlockTable) -> None:
        self._manager = manager
        self._native = native

    # ---- what it has ----

    @property
    def ids(self) -> Int[np.ndarray, " n"]:
        """The blocks in order, int32 `[n]`; −1 where `free_before` gave one back."""
        return self._native.ids

    def __len__(self) -> int:
        return len(self._native)

    @property
    def tokens(self) -> Int[np.ndarray, " num_tokens"]:
        """The sequence so far, int32 `[num_tokens]`."""
        return self._native.tokens

    @property
    def num_tokens(self) -> int:
        """How many tokens were appended."""
        return self._native.num_tokens

    @property
    def num_cached_tokens(self) -> int:
        """How many tokens others had computed: whole blocks, from the first on."""
        return self._native.num_cached

    @property
    def num_committed_tokens(self) -> int:
        """How many tokens lie in blocks that are published, from the first on."""
        return self._native.num_committed

    @property
    def keys(self) -> list[bytes]:
        """The keys of the full blocks, 32 bytes each."""
        return self._native.keys

    @property
    def root(self) -> bytes:
        """What the keys start from, 32 bytes."""
        return self._native.root

    @property
    def freed(self) -> bool:
        """Whether its blocks are given back."""
        return self._native.released

    # ---- what an engine does with it ----

    def append(self, tokens: Tokens) -> None:
        """Adds the sequence's next tokens, without blocks for them.

        Args:
          tokens: a token, or int32 `[n]` of them, on the host.

        Raises:
          TypeError, ValueError: for anything else.
        """
        self._native.append(token_array("BlockTable.append", tokens))

    def match(self, max_tokens: int | None = None) -> int:
        """Takes blocks that were published meanwhile, and follow those it has.

        Args:
          max_tokens: at most so many tokens; all but the last one when None, since the
            last one's logits are wanted.

        Returns:
          How many tokens are cached by now.

        Raises:
          ValueError: when blocks were reserved that are not published.
        """
        limit = self.num_tokens - 1
        if max_tokens is not None:
            limit = checks.check_count("BlockTable.match", "max_tokens", max_tokens)
        return self._native.match(limit)

    def reserve(self, num_tokens: int, *, spare: int = 0) -> None:
        """Takes blocks, so that the first `num_tokens` tokens have a place.

        Args:
          num_tokens: of the sequence, those not appended yet among them.
          spare: how many blocks have to stay available to others.

        Raises:
          PoolExhaustedError: when too few are free; then none is taken.
        """
        where = "BlockTable.reserve"
        tokens = checks.check_count(where, "num_tokens", num_tokens)
        kept = checks.check_count(where, "spare", spare)
        manager = self._manager
        if attempt(manager, lambda: self._native.reserve(tokens, kept)):
            return
        wanted = -(-tokens // self._native.block_size) - len(self)
        apart = f" with {kept} to spare" if kept else ""
        raise exhausted(
            manager, f"{where}: {checks.plural(wanted, 'block')} asked for{apart}"
        )

    def slots(self, start: int, count: int) -> Int[np.ndarray, " count"]:
        """Where the tokens start, start + 1, … lie in the pool.

        Returns:
          int32 `[count]`, block · block_size + offset: what `append_kv` takes.

        Raises:
          IndexError: for tokens beyond the reserved blocks.
          ValueError: when a block of theirs is shared with others or published, so that
            writing there would change what others read; see `writable`.
        """
        where = "BlockTable.slots"
        first, number = (
            checks.check_count(where, "start", start),
            checks.check_count(where, "count", count),
        )
        return self._native.slots(first, number)

    def page_table(self, max_blocks: int) -> Int[np.ndarray, " max_blocks"]:
        """The ids, padded with −1 to int32 `[max_blocks]`.

        Raises:
          ValueError: when there are more than `max_blocks` blocks.
        """
        where = "BlockTable.page_table"
        return self._native.page_table(
            checks.check_count(where, "max_blocks", max_blocks)
        )

    def commit(self, num_tokens: int) -> list[int]:
        """Says that the keys and values of the first `num_tokens` tokens are written.

        The blocks that they fill are published. Call it when the step that writes them
        is dispatched: programs run in order.

        Returns:
          The places in the table whose block is another one now, since an equal one
          was published before; its own was given back.

        Raises:
          ValueError: for more tokens than were appended, or have blocks.
        """
        return self._native.commit(
            checks.check_count("BlockTable.commit", "num_tokens", num_tokens)
        )

    def fork(self) -> BlockTable:
        """Another table of the same tokens and blocks, which both share from now on."""
        return BlockTable(self._manager, self._native.fork())

    def writable(self, start: int, count: int) -> int:
        """Gives the table blocks of its own for these tokens (copy on write).

        What the shared blocks held is copied.

        Returns:
          How many blocks were copied.

        Raises:
          IndexError: for tokens beyond the reserved blocks.
          PoolExhaustedError: when too few blocks are free; then nothing has changed.
        """
        where = "BlockTable.writable"
        first, number = (
            checks.check_count(where, "start", start),
            checks.check_count(where, "count", count),
        )
        places = self._native.shared(first, number)
        if not places:
            return 0
        manager = self._manager
        told = f"{where}: {checks.plural(len(places), 'block')} to copy to"
        with take_hold(manager, len(places), told) as fresh:
            # Few shapes, so that few programs are made; -1 copies nothing.
            size = 1 << (len(places) - 1).bit_length()
            old, new = np.full((2, size), -1, np.int32)
            old[: len(places)] = self.ids[places]
            new[: len(places)] = fresh.ids
            manager.update(copy_blocks, old, new)
            self._native.put(places, fresh)
        return len(places)

    def free_before(self, token: int) -> None:
        """Gives back the blocks whose tokens all come before this one.

        Windows leave them behind. Their places in `ids` are −1.
        """
        self._native.free_before(
            checks.check_count("BlockTable.free_before", "token", token)
        )

    def truncate(self, num_tokens: int) -> None:
        """Takes tokens from the end, and the blocks of those alone.

        Drafts that were refused go this way.

        Raises:
          ValueError: for more tokens than there are.
        """
        self._native.truncate(
            checks.check_count("BlockTable.truncate", "num_tokens", num_tokens)
        )

    def free(self) -> None:
        """Gives all blocks back; again does nothing."""
        self._native.release()

    def __enter__(self) -> BlockTable:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()

    def __repr__(self) -> str:
        if self.freed:
            return "BlockTable(freed)"
        return (
            f"BlockTable({checks.plural(len(self), 'block')}, {self.num_tokens} "
            f"tokens, {self.num_cached_tokens} of them cached)"
        )
