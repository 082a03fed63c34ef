"""`BlockList`, `Block`, `Layer` and `Piece`: handles to parts of a manager's pool.

A block is a counted reference: when its last handle is freed or collected, and no
DLPack export of it is alive, it returns to the manager's free list.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import jax
import numpy as np

from jax_kvblock import _native
from jax_kvblock.blocks.layout import BlockSpec
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.core import checks
from jax_kvblock.core.types import ArrayIn
from jax_kvblock.objects.memory import Memory
from jax_kvblock.objects.steps import has_leaf
from jax_kvblock.objects.view import Unpicklable, View

if TYPE_CHECKING:
    from jaxtyping import Int, Shaped

Result = TypeVar("Result")  # of a step


class Manager(Protocol):
    """What blocks know of a `BlockManager`, and their users find in `block.manager`.

    Blocks themselves need its memory alone.
    """

    _memory: Memory

    def allocate_blocks(self, count: int) -> BlockList: ...
    def free(self, blocks: BlockList | Block | Iterable[Block]) -> None: ...
    @overload
    def update(
        self,
        step: Callable[..., KVPool],
        /,
        *args: object,
        static_argnames: str | Iterable[str] = ...,
        **kwargs: object,
    ) -> None: ...
    @overload
    def update(
        self,
        step: Callable[..., tuple[KVPool, Result]],
        /,
        *args: object,
        static_argnames: str | Iterable[str] = ...,
        **kwargs: object,
    ) -> Result: ...
    def close(self) -> None: ...

    @property
    def pool(self) -> KVPool: ...
    @pool.setter
    def pool(self, new: KVPool) -> None: ...
    @property
    def spec(self) -> BlockSpec: ...
    @property
    def lock(self) -> RLock: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free_blocks(self) -> int: ...
    @property
    def live_exports(self) -> list[str]: ...


class BlockList(Unpicklable, Sequence["Block"]):
    """Blocks of one manager, such as those of a sequence of tokens, and a context that
    frees them.

    It grows by `append`, `extend` and `+=`; `+` and slices make new lists of the same
    handles.

    Example:
      >>> blocks = manager.allocate_blocks(2)
      >>> blocks += manager.allocate_blocks(1)      # the sequence has grown
      >>> slots = blocks.slots(start=40, count=3)   # of its tokens 40, 41 and 42
    """

    def __init__(self, manager: Manager, blocks: list[Block]) -> None:
        self._manager = manager
        self._blocks = blocks

    @property
    def ids(self) -> Int[np.ndarray, " n"]:
        """The blocks' ids in the pool, int32 `[n]`: a page table of one sequence.

        Raises:
          ValueError: when one of the blocks is freed.
        """
        return self._ids("BlockList.ids", 0, len(self))

    def _ids(self, where: str, start: int, stop: int) -> np.ndarray:
        blocks = self._blocks[start:stop]
        for i, block in enumerate(blocks, start):
            if i == start or block._lease.released:  # they share one pool
                block._check_held(f"{where}: block [{i}]", ValueError)
        return np.array([block.id for block in blocks], np.int32)

    def page_table(self, max_blocks: int) -> Int[np.ndarray, " max_blocks"]:
        """The ids, padded with −1 to int32 `[max_blocks]`.

        Raises:
          ValueError: when there are more than `max_blocks` blocks.
        """
        if len(self) > max_blocks:
            raise ValueError(
                f"page_table: {len(self)} blocks do not fit max_blocks={max_blocks}"
            )
        table = np.full(max_blocks, -1, np.int32)
        table[: len(self)] = self.ids
        return table

    def slots(self, start: int, count: int) -> Int[np.ndarray, " count"]:
        """Where the tokens start, start + 1, … of the sequence lie in the pool.

        Args:
          start: the first token, counted from the beginning of the list.
          count: how many tokens.

        Returns:
          int32 `[count]`, block · block_size + offset: what `append_kv` takes.

        Raises:
          IndexError: for tokens beyond the list's blocks.
          ValueError: for a negative start or count, or when a block of these tokens is
            freed.
          TypeError: when start or count is no integer.

        Example:
          >>> slots = blocks.slots(length, 1)           # the next token's
          >>> manager.update(append_kv, layer, k, v, slots)
        """
        where = "BlockList.slots"
        for name, value in (("start", start), ("count", count)):
            if checks.check_integer(where, name, value, "pass an int") < 0:
                raise ValueError(f"{where}: {name} must be at least 0, got {value}")
        start, count = int(start), int(count)
        size = self._manager._memory.spec.block_size
        if start + count > len(self) * size:
            what = f"tokens {start} to {start + count - 1} do"
            if count < 2:
                what = f"token {start} does" if count else f"start={start} does"
            raise IndexError(
                f"{where}: {what} not fit "
                f"{checks.plural(len(self), 'block')} of {size} tokens; append blocks "
                "first"
            )
        first = start // size
        ids = self._ids(where, first, -(-(start + count) // size) if count else first)
        tokens = np.arange(start, start + count) - first * size
        return ids[tokens // size] * np.int32(size) + (tokens % size).astype(np.int32)

    def append(self, block: Block) -> None:
        """Adds a block at the end; the list frees it with the others.

        Raises:
          ValueError: for a block of another manager, or a handle that is here already.
          TypeError: for anything that is not a block.
        """
        self._grow("append", [block])

    def extend(self, blocks: Iterable[Block]) -> None:
        """Adds blocks at the end, all or none; see `append`."""
        self._grow("extend", blocks)

    def _grow(self, where: str, blocks: Iterable[Block]) -> None:
        self._blocks.extend(self._checked(f"BlockList.{where}", blocks))

    def _checked(self, where: str, blocks: Iterable[Block]) -> list[Block]:
        """The blocks, which would be freed twice if a handle came twice."""
        if not isinstance(blocks, Iterable):
            raise TypeError(
                f"{where}: blocks must be a BlockList or an iterable of blocks, got "
                f"{type(blocks).__name__}"
            )
        added = list(blocks)
        here = {id(block) for block in self._blocks}
        for i, block in enumerate(added):
            fix = "a list holds blocks of one"
            check_own(self._manager, where, f"blocks[{i}]", block, fix)
            if id(block) in here:
                raise ValueError(
                    f"{where}: blocks[{i}] (block {block.id}) is in the list already; "
                    "share() makes another handle to it"
                )
            here.add(id(block))
        return added

    def share(self) -> BlockList:
        """New handles to the same blocks, each counted: the blocks outlive either
        list.
        """
        return BlockList(self._manager, [block.share() for block in self._blocks])

    def free(self) -> None:
        """Frees the blocks; see `BlockManager.free`."""
        free(self._manager, self)

    def to_list(self) -> list[Block]:
        """The blocks as a Python list."""
        return list(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> BlockList: ...
    def __getitem__(self, index: int | slice) -> Block | BlockList:
        if isinstance(index, slice):
            return BlockList(self._manager, self._blocks[index])
        return self._blocks[_index("BlockList", index, len(self._blocks), "block")]

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def __add__(self, blocks: Iterable[Block]) -> BlockList:
        added = self._checked("BlockList +", blocks)
        return BlockList(self._manager, [*self._blocks, *added])

    def __iadd__(self, blocks: Iterable[Block]) -> BlockList:
        self._grow("+=", blocks)
        return self

    def __enter__(self) -> BlockList:
        return self

    def __exit__(self, *exc: object) -> None:
        leases = [block._lease for block in self._blocks]
        self._manager._memory.free_list.release(leases, skip_released=True)

    def __repr__(self) -> str:
        return f"BlockList({[block.id for block in self._blocks]})"


class Block(View, Sequence["Layer"]):
    """A KV-cache block: a sequence of layers, `[nl, no, nt, nh, hd]` (HND: `nh, nt`).

    It exports itself by DLPack without a copy. It is false once it is freed, or once
    its pool was donated and no new one was put back.
    """

    _part = ()

    def __init__(self, manager: Manager, lease: _native.Lease) -> None:
        self.manager = manager
        self._memory = manager._memory
        self._lease = lease

    @property
    def id(self) -> int:
        """The block's index in the pool."""
        return self._lease.block_id

    @property
    def ref_count(self) -> int:
        """How many handles and DLPack exports hold the block."""
        return self._memory.free_list.references(self.id)

    def share(self) -> Block:
        """Another handle to the same block; it is free when all handles are."""
        self._check_held("share", ValueError)
        return Block(self.manager, self._hold("share", ValueError))

    def to_list(self) -> list[Layer]:
        """The layers as a Python list."""
        return list(self)

    def copy_from(self, x: Shaped[ArrayIn, "..."]) -> None:
        """Replaces the block's contents, in place.

        Args:
          x: an array or any DLPack object of the block's shape and dtype, on any
            device.

        Raises:
          ValueError: for a wrong shape, or when the block is freed.
          TypeError: for a wrong dtype.
          BufferError: on a GPU, while DLPack exports of the pool are alive.
          PoolLostError: when the write failed after the pool was donated to it.
        """
        self._replace("Block.copy_from", x)

    def __len__(self) -> int:
        return self._memory.spec.num_layers

    @overload
    def __getitem__(self, index: int) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> list[Layer]: ...
    def __getitem__(self, index: int | slice) -> Layer | list[Layer]:
        found = _indices("Block", index, len(self), "layer")
        if isinstance(found, int):
            return Layer(self, found)
        return [Layer(self, i) for i in found]

    def __iter__(self) -> Iterator[Layer]:
        return (Layer(self, i) for i in range(len(self)))

    def __repr__(self) -> str:
        return f"Block(id={self.id}, {self.dtype}{list(self.shape)}{self._state()})"


class _Part(View):
    """What `Layer` and `Piece` share: they live as long as their block."""

    def __init__(self, block: Block, *part: int) -> None:
        self.block = block
        self.manager = block.manager
        self._memory = block._memory
        self._lease = block._lease
        self._part = part

    @property
    def index(self) -> int:
        """Which of its sequence it is."""
        return self._part[-1]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Part):
            return NotImplemented
        return self.block is other.block and self._part == other._part

    def __hash__(self) -> int:
        return hash((id(self.block), self._part))

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"{kind}({self._name}, {self.dtype}{list(self.shape)}{self._state()})"


class Layer(_Part):
    """One layer of a block: a sequence of pieces, `[no, nt, nh, hd]` (HND: `nh, nt`).

    `k` and `v` are its keys and values. Unlike another sequence's, its `index` is no
    method: it is the number of the layer.
    """

    @property
    def k(self) -> Piece:
        """The keys, or the combined cache where `num_outer` is 1."""
        return self[0]

    @property
    def v(self) -> Piece:
        """The values; AttributeError where `num_outer` is 1."""
        if len(self) == 1:
            raise AttributeError(
                "Layer.v: a combined cache (num_outer=1) has no values of its own; "
                "use layer.k or layer[0]"
            )
        return self[1]

    def to_list(self) -> list[Piece]:
        """The pieces as a Python list."""
        return list(self)

    def count(self, value: object) -> int:
        """How many of the pieces are `value`: 1 or 0."""
        return list(self).count(value)  # type: ignore[arg-type]

    def copy_from(self, x: Shaped[ArrayIn, "..."]) -> None:
        """Replaces the layer's contents, in place; see `Block.copy_from`."""
        self._replace("Layer.copy_from", x)

    def __len__(self) -> int:
        return self._memory.spec.num_outer

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> list[Piece]: ...
    def __getitem__(self, index: int | slice) -> Piece | list[Piece]:
        found = _indices("Layer", index, len(self), "piece")
        if isinstance(found, int):
            return Piece(self.block, *self._part, found)
        return [Piece(self.block, *self._part, i) for i in found]

    def __iter__(self) -> Iterator[Piece]:
        return (Piece(self.block, *self._part, i) for i in range(len(self)))

    def __reversed__(self) -> Iterator[Piece]:
        return reversed(self.to_list())


# So that `case [k, v]` matches. It cannot be a base: it has a method `index`.
Sequence.register(Layer)


class Piece(_Part):
    """The keys or the values of one layer of a block, `[nt, nh, hd]` (HND: `nh, nt`).

    It is exported and written like a layer.
    """

    def copy_from(self, x: Shaped[ArrayIn, "..."]) -> None:
        """Replaces the piece's contents, in place; see `Block.copy_from`."""
        self._replace("Piece.copy_from", x)

    def __len__(self) -> int:
        return self.shape[0]


# ---- blocks as arguments ----


def free(manager: Manager, blocks: Any) -> None:
    """Gives blocks back; see `BlockManager.free`."""
    if not isinstance(blocks, Iterable):
        raise TypeError(
            "free: blocks must be a BlockList, a Block or an iterable of blocks, "
            f"got {type(blocks).__name__}"
        )
    chosen = list(blocks)
    for i, block in enumerate(chosen):
        check_own(manager, "free", f"blocks[{i}]", block, "free it there")
    # In one step: of two threads that free one block, one fails.
    wrong = manager._memory.free_list.release([block._lease for block in chosen])
    if wrong >= 0:
        raise ValueError(
            f"free: blocks[{wrong}] (block {chosen[wrong].id}) is freed already; "
            "free each block once"
        )


def check_own(manager: Manager, where: str, name: str, block: Any, fix: str) -> None:
    """Checks that a block is one of this manager."""
    if not isinstance(block, Block):
        raise TypeError(f"{where}: {name} must be a Block, got {type(block).__name__}")
    if block.manager is not manager:
        raise ValueError(
            f"{where}: {name} (block {block.id}) belongs to another manager; {fix}"
        )


def without_handles(tree: Any) -> Any:
    """An argument of a step, with the ids of each `BlockList` in it."""
    handles = (BlockList, Block, Layer, Piece)
    if not has_leaf(tree, handles):
        return tree

    def ids_of(x: Any) -> Any:
        if isinstance(x, handles[1:]):
            raise TypeError(
                f"update: the step's arguments must be arrays or a BlockList, got {x}; "
                "pass jnp.asarray of it for its contents, or block.id"
            )
        return x.ids if isinstance(x, BlockList) else x

    return jax.tree.map(ids_of, tree)


# ---- indices ----


def _indices(kind: str, index: Any, length: int, noun: str) -> int | range:
    """Which ones an index or a slice names."""
    if isinstance(index, slice):
        return range(length)[index]
    return _index(kind, index, length, noun)


def _index(kind: str, index: Any, length: int, noun: str) -> int:
    try:
        i = operator.index(index)
    except TypeError:
        raise TypeError(
            f"{kind} indices must be integers, got {type(index).__name__}"
        ) from None
    if not -length <= i < length:
        raise IndexError(
            f"{kind} index {i} is out of range: it has {checks.plural(length, noun)}"
        )
    return i % length
