"""A step of an engine over many sequences: one call for all of their tables.

What `BlockTable` does for one sequence, at a fraction of the time for each: a step of
decoding has hundreds of sequences and a few hundred microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from jax_kvblock import _native
from jax_kvblock.cache.namespace import token_array
from jax_kvblock.cache.table import BlockTable
from jax_kvblock.cache.taking import attempt, exhausted
from jax_kvblock.core import checks

if TYPE_CHECKING:
    from jaxtyping import Int

Numbers: TypeAlias = "int | Sequence[int] | np.ndarray"


class StepArrays(NamedTuple):
    """What `append_kv` and `paged_attention` take of a step, with T tokens, n tables.

    Attributes:
      slots: int32 `[T]`, where each token lies in the pool.
      block_tables: int32 `[n, max_blocks]`, −1 behind a sequence's last block.
      kv_lens: int32 `[n]`, start + count.
      query_start: int32 `[n + 1]`, where each sequence's tokens start, and T.
    """

    slots: Int[np.ndarray, " T"]
    block_tables: Int[np.ndarray, "n max_blocks"]
    kv_lens: Int[np.ndarray, " n"]
    query_start: Int[np.ndarray, " n_and_one"]


def prepare_step(
    tables: Sequence[BlockTable],
    counts: Numbers = 1,
    *,
    starts: Numbers | None = None,
    max_blocks: int,
    spare: int = 0,
) -> StepArrays:
    """Takes blocks for the tokens of a step, and says where these lie.

    `reserve`, `slots` and `page_table` of each table, in one call. Either all tables
    get their blocks or none does.

    Args:
      tables: of one manager, none twice.
      counts: int `[n]`, how many tokens of each table, from 0 on; or one for all.
      starts: int `[n]`, the first of them; or one for all. When None, the tokens are
        those that were appended last.
      max_blocks: the width of `block_tables`.
      spare: how many blocks have to stay available to others.

    Raises:
      TypeError: for tables or numbers that are none.
      ValueError: for lengths that differ, a table that is there twice, freed, of
        another manager or with fewer tokens, more than `max_blocks` blocks, or a token
        whose block is shared (see `BlockTable.writable`). Then nothing has changed.
      PoolExhaustedError: when too few blocks are free; then none is taken.

    Example:
      >>> append_tokens(tables, new)                     # one for each
      >>> step = prepare_step(tables, max_blocks=64)
      >>> manager.update(decode, new, *step)
      >>> commit_tokens(tables)                          # others find full blocks
    """
    where = "prepare_step"
    natives = _natives(where, tables)
    first = None
    if starts is not None:
        first = _numbers(where, "starts", starts, len(natives))
    count = _numbers(where, "counts", counts, len(natives))
    width = checks.check_count(where, "max_blocks", max_blocks)
    kept = checks.check_count(where, "spare", spare)

    def take() -> tuple[np.ndarray, ...] | None:
        return _native.prepare_step(natives, first, count, width, kept)

    made = attempt(tables[0]._manager, take) if natives else take()
    if made is None:
        apart = f" with {kept} to spare" if kept else ""
        sequences = checks.plural(len(natives), "sequence")
        raise exhausted(
            tables[0]._manager,
            f"{where}: too few blocks for a step of {sequences}{apart}",
        )
    return StepArrays(*made)


def append_tokens(
    tables: Sequence[BlockTable], tokens: Numbers, counts: Numbers = 1
) -> None:
    """Appends tokens to each sequence: `BlockTable.append` of many.

    Args:
      tables: of one manager, none twice.
      tokens: int `[T]`, on the host, those of one table behind those of another.
      counts: int `[n]`, how many tokens each table gets, T together; or one for all.

    Raises:
      TypeError, ValueError: for anything else; then nothing has changed.
    """
    where = "append_tokens"
    natives, new = _natives(where, tables), token_array(where, tokens)
    count = _numbers(where, "counts", counts, len(natives))
    if not _native.append_each(natives, new, count):
        wanted = checks.plural(int(count.sum()), "token")
        raise ValueError(
            f"{where}: counts of {checks.plural(len(natives), 'table')} add up to "
            f"{wanted}, tokens is of length {len(new)}"
        )


def commit_tokens(
    tables: Sequence[BlockTable], num_tokens: Numbers | None = None
) -> list[int]:
    """Says that these tokens are written: `BlockTable.commit` of many.

    Args:
      tables: of one manager, none twice.
      num_tokens: int `[n]`, of how many tokens of each sequence, from its first one on;
        all that were appended when None.

    Returns:
      Which tables have another block by now in the place of one of their own, since an
      equal one was published before: their row of `block_tables` is not that of before.

    Raises:
      TypeError, ValueError: as `BlockTable.commit`; then nothing has changed.
    """
    where = "commit_tokens"
    natives = _natives(where, tables)
    lengths = None
    if num_tokens is not None:
        lengths = _numbers(where, "num_tokens", num_tokens, len(natives))
    return _native.commit_each(natives, lengths)


def _natives(where: str, tables: Sequence[BlockTable]) -> list[_native.BlockTable]:
    try:
        return [table._native for table in tables]
    except (AttributeError, TypeError):
        raise TypeError(
            f"{where}: tables must be a list of BlockTables, got {tables!r}"
        ) from None


def _numbers(where: str, name: str, numbers: Numbers, count: int) -> np.ndarray:
    """Int64 `[count]` of numbers from 0 on."""
    if type(numbers) is int and numbers >= 0:  # the common case, at every step
        return np.full(count, numbers, np.int64)
    if type(numbers) is list and len(numbers) == count:  # so are these
        plain = _native.counts_of(numbers)
        if plain is not None:
            return plain
    array = np.asarray(numbers)
    if array.dtype != np.int64:
        if array.dtype.kind not in "iu" and array.size:
            raise TypeError(f"{where}: {name} must be whole numbers, got {numbers!r}")
        array = array.astype(np.int64)
    if array.ndim == 0:
        array = np.full(count, array)
    if array.shape != (count,):
        raise _lengths(where, name, array.shape, count)
    if count and array.min() < 0:
        raise ValueError(f"{where}: {name} must be at least 0, got {array.min()}")
    return np.ascontiguousarray(array)


def _lengths(where: str, name: str, got: object, count: int) -> ValueError:
    return ValueError(
        f"{where}: pass a number for each of the {checks.plural(count, 'table')}; "
        f"{name} is of length {got}"
    )
