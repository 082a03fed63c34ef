"""`BlockList`, `Block`, `Layer` and `Piece`: handles to parts of a manager's pool.

A block is a counted reference: when its last handle is freed or collected, and no
DLPack export of it is alive, it returns to the manager's free list.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock import _checks, _dlpack, _native
from jax_kvblock.layout import BlockSpec

if TYPE_CHECKING:
    from jax_kvblock.manager import BlockManager

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How blocks and layers lie in the pool's arrays, in elements; computed once."""

    shape: tuple[int, ...]  # of a block
    strides: tuple[int, ...]  # that of the layers is 0 when each is its own array
    block_stride: int

    @classmethod
    def of(cls, spec: BlockSpec, contiguous: bool, flat_tail: bool) -> Geometry:
        stored = "".join(axis for group in spec.block_layout.groups for axis in group)
        if not contiguous:
            stored = stored.replace("L", "")
        strides, stride = {"L": 0}, 1
        for axis in reversed(stored):
            strides[axis] = stride
            stride *= spec.sizes[axis]
        # What a user sees: HND blocks show heads before tokens, whatever the pool's
        # layout; a flat tail shows no heads.
        order = "LOHTD" if spec.inner == "HND" else "LOTHD"
        if flat_tail:
            order = order.replace("H", "")
        return cls(
            tuple(spec.sizes[axis] for axis in order),
            tuple(strides[axis] for axis in order),
            stride,
        )


def part_name(block: int, part: Sequence[int]) -> str:
    """ "block 3, layer 1, outer 0" for `(3, [1, 0])`."""
    named = zip(("layer", "outer"), part, strict=False)
    return ", ".join([f"block {block}", *(f"{axis} {i}" for axis, i in named)])


class Unpicklable:
    """What stands for memory of this process, and so cannot leave it."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(
            f"{kind}: cannot be pickled or copied, since it stands for memory of this "
            "process; save np.asarray(block), or gather_blocks(manager.pool, ids), and "
            "write it to blocks of another manager; share() makes another handle"
        )


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

    def __init__(self, manager: BlockManager, blocks: list[Block]) -> None:
        self._manager = manager
        self._blocks = blocks

    @property
    def ids(self) -> np.ndarray:
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

    def page_table(self, max_blocks: int) -> np.ndarray:
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

    def slots(self, start: int, count: int) -> np.ndarray:
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
            if _checks.check_integer(where, name, value, "pass an int") < 0:
                raise ValueError(f"{where}: {name} must be at least 0, got {value}")
        start, count = int(start), int(count)
        size = self._manager.spec.block_size
        if start + count > len(self) * size:
            what = f"tokens {start} to {start + count - 1} do"
            if count < 2:
                what = f"token {start} does" if count else f"start={start} does"
            raise IndexError(
                f"{where}: {what} not fit "
                f"{_checks.plural(len(self), 'block')} of {size} tokens; append blocks "
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
            self._manager._check_own(where, f"blocks[{i}]", block, fix)
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
        self._manager.free(self)

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
        self._manager._free_list.release(leases, skip_released=True)

    def __repr__(self) -> str:
        return f"BlockList({[block.id for block in self._blocks]})"


class _View(Unpicklable):
    """A block or a part of one: a strided part of the pool, in any layout."""

    manager: BlockManager
    _lease: _native.Lease
    _part: tuple[int, ...]  # (), (layer,) or (layer, outer)

    # ---- what it is ----

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, whatever the pool's layout."""
        return self.manager._geometry.shape[len(self._part) :]

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return self.size * self.dtype.itemsize

    @property
    def dtype(self) -> np.dtype:
        """The element type, as NumPy (with ml_dtypes) names it."""
        return self.manager.spec.dtype

    @property
    def device_id(self) -> int:
        """The index of the device: 0 on the CPU."""
        return self.manager._dl_device[1]

    @property
    def _name(self) -> str:
        return part_name(self._lease.block_id, self._part)

    def __bool__(self) -> bool:
        with self.manager.lock:  # in the middle of another thread's update it is none
            self.manager._take_over()
            return not self._lease.released and self.manager._alive

    def _check_held(self, where: str, error: type[Exception]) -> None:
        if self._lease.released:
            raise error(self._freed(where))
        with self.manager.lock:
            self.manager._take_over()
            trouble = self.manager._trouble()
        if trouble:
            raise error(f"{where} ({self._name}): {trouble}")

    def _hold(self, where: str, error: type[Exception]) -> _native.Lease:
        """Keeps the block allocated while it is used, whoever frees it meanwhile."""
        lease = self._lease.share()
        if lease is None:
            raise error(self._freed(where))
        return lease

    def _freed(self, where: str) -> str:
        return f"{where} ({self._name}) is freed; allocate a new one"

    def _state(self) -> str:
        """What is wrong, for `repr`, which waits for nobody."""
        if self._lease.released:
            return ", freed"
        if self.manager._pool is None:
            return ", closed"
        return "" if self.manager._alive else ", no pool"

    # ---- out ----

    def __jax_array__(self) -> jax.Array:
        where = type(self).__name__
        with self._hold(where, RuntimeError), self.manager.lock:
            self._check_held(where, RuntimeError)
            return self.manager._read(self._indices)

    @property
    def _indices(self) -> np.ndarray:
        """The block's id and the indices of the part, for a program."""
        return np.array([self._lease.block_id, *self._part], np.int32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """A NumPy copy (NumPy cannot share a buffer of every dtype and device)."""
        if copy is False:
            raise ValueError(
                f"{self._name}: np.asarray copies; for a view of CPU memory use "
                "np.from_dlpack"
            )
        fresh = self.__jax_array__()
        try:  # `device_get` is what a transfer guard lets pass
            array = np.array(jax.device_get(fresh))
        except Exception as error:
            self.manager._look_after(f"np.asarray ({self._name})", error)
            raise
        return array if dtype is None else array.astype(dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        """(device type, device id), as DLPack numbers them."""
        self._check_held("__dlpack_device__", BufferError)
        return self.manager._dl_device

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule, zero copy unless a copy is asked for or needed.

        The tensor made of it keeps the pool's memory alive and the block allocated.

        Args:
          stream: the consumer's CUDA stream, which will wait for pending writes; None
            waits on the host; -1 does not wait.
          max_version: the newest DLPack version the consumer reads; a versioned capsule
            from (1, 0) on.
          dl_device: the device to export to: the block's own, or the CPU, which copies
            a GPU block and shows pinned host memory as what it is.
          copy: True copies always, False never, None when it must.

        Raises:
          BufferError: for a freed block, a pool that is gone, another device, or a copy
            that is needed while copy is False.
        """
        with self.manager.lock:  # no update may take the memory before it is held
            self._check_held("__dlpack__", BufferError)
            device = self.manager._dl_device
            if dl_device is not None and tuple(dl_device) != device:
                # Pinned host memory is CPU memory, too: shown as such on request.
                pinned = device[0] == _dlpack.CUDA_HOST
                if not pinned or tuple(dl_device) != _dlpack.CPU_DEVICE:
                    return self._export_copy(stream, max_version, dl_device, copy)
                device = _dlpack.CPU_DEVICE
            if copy:
                return self._export_copy(stream, max_version, dl_device, copy)
            return self._export(stream, max_version, device)

    def _export(
        self, stream: Any, max_version: tuple[int, int] | None, device: tuple[int, int]
    ) -> Any:
        array, offset = self._place()
        geometry, depth = self.manager._geometry, len(self._part)
        lease = self._lease.export(self._part)
        if lease is None:  # by another thread, since we looked
            raise BufferError(self._freed("__dlpack__"))
        try:
            return _dlpack.export(
                array,
                offset,
                geometry.shape[depth:],
                geometry.strides[depth:],
                device,
                lease=lease,
                stream=stream,
                max_version=max_version,
            )
        except Exception as error:
            self.manager._look_after(f"__dlpack__ ({self._name})", error)
            raise

    def _place(self) -> tuple[jax.Array, int]:
        """The array that holds the view, and the view's offset in it, in elements."""
        pool, geometry = self.manager.pool, self.manager._geometry
        offset = self._lease.block_id * geometry.block_stride
        for i, stride in zip(self._part, geometry.strides, strict=False):
            offset += i * stride
        if pool.contiguous:
            return pool.arrays[0], offset
        if not self._part:
            raise BufferError(
                f"{self._name}: its layers are separate arrays, so it is no single "
                "tensor; export its layers, or build the manager with contiguous=True"
            )
        return pool.arrays[self._part[0]], offset

    def _export_copy(
        self,
        stream: Any,
        max_version: tuple[int, int] | None,
        dl_device: tuple[int, int] | None,
        copy: bool | None,
    ) -> Any:
        device = self.manager._dl_device
        target = device if dl_device is None else (int(dl_device[0]), int(dl_device[1]))
        if target not in (device, _dlpack.CPU_DEVICE):
            raise BufferError(
                f"__dlpack__: {self._name} is on DLPack device {device}, not {target}; "
                "only its own device and the CPU (1, 0) are served. Move it with "
                "jax.device_put(jnp.asarray(block), device)"
            )
        if copy is False:
            raise BufferError(
                f"__dlpack__: {self._name} is on DLPack device {device}; exporting it "
                f"to {target} needs a copy, and copy=False forbids it. Pass copy=True "
                "or None"
            )
        fresh = self.__jax_array__()
        if target != device:
            fresh = jax.device_put(fresh, jax.devices("cpu")[0])
            stream = None
        elif device[0] == _dlpack.CUDA_HOST:
            fresh = jax.device_put(fresh, self.manager.pool.arrays[0].sharding)
        return _dlpack.export(
            fresh,
            0,
            fresh.shape,
            _row_major(fresh.shape),
            _dlpack.device_of(fresh),
            lease=None,
            stream=stream,
            max_version=max_version,
            copied=True,
        )

    # ---- in ----

    def _replace(self, where: str, x: Any) -> None:
        """What `copy_from` does."""
        with self._hold(where, ValueError):
            array = self._incoming(where, x)
            done = self.manager._write(self._indices, array)
        try:  # the source was read: its owner may write to it as soon as we return
            jax.block_until_ready(done)
        except Exception as error:
            self.manager._look_after(where, error)
            raise

    def _incoming(self, where: str, x: Any) -> jax.Array:
        """Any array or DLPack object, as a jax array where the pool is."""
        self._check_held(where, ValueError)
        if not isinstance(x, (jax.Array, np.ndarray, _View)):
            x = _from_dlpack(where, x)
        shape, dtype = tuple(x.shape), np.dtype(x.dtype)
        if shape != self.shape:
            raise ValueError(
                f"{where}: x must have shape {list(self.shape)}, got {_checks.show(x)}"
            )
        if dtype != self.dtype:
            raise TypeError(
                f"{where}: x must have dtype {self.dtype}, got {_checks.show(x)}; cast "
                "it"
            )
        array = x.__jax_array__() if isinstance(x, _View) else x
        (device,) = self.manager._devices
        return jax.device_put(array, device)


class Block(_View, Sequence["Layer"]):
    """A KV-cache block: a sequence of layers, `[nl, no, nt, nh, hd]` (HND: `nh, nt`).

    It exports itself by DLPack without a copy. It is false once it is freed, or once
    its pool was donated and no new one was put back.
    """

    _part = ()

    def __init__(self, manager: BlockManager, lease: _native.Lease) -> None:
        self.manager = manager
        self._lease = lease

    @property
    def id(self) -> int:
        """The block's index in the pool."""
        return self._lease.block_id

    @property
    def ref_count(self) -> int:
        """How many handles and DLPack exports hold the block."""
        return self.manager._free_list.references(self.id)

    def share(self) -> Block:
        """Another handle to the same block; it is free when all handles are."""
        self._check_held("share", ValueError)
        return Block(self.manager, self._hold("share", ValueError))

    def to_list(self) -> list[Layer]:
        """The layers as a Python list."""
        return list(self)

    def copy_from(self, x: Any) -> None:
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
        return self.manager.spec.num_layers

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


class _Part(_View):
    """What `Layer` and `Piece` share: they live as long as their block."""

    def __init__(self, block: Block, *part: int) -> None:
        self.block = block
        self.manager = block.manager
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

    def copy_from(self, x: Any) -> None:
        """Replaces the layer's contents, in place; see `Block.copy_from`."""
        self._replace("Layer.copy_from", x)

    def __len__(self) -> int:
        return self.manager.spec.num_outer

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

    def copy_from(self, x: Any) -> None:
        """Replaces the piece's contents, in place; see `Block.copy_from`."""
        self._replace("Piece.copy_from", x)

    def __len__(self) -> int:
        return self.shape[0]


def _from_dlpack(where: str, x: Any) -> jax.Array | np.ndarray:
    if not hasattr(x, "__dlpack__"):
        raise TypeError(
            f"{where}: x must be an array or a DLPack object, got {type(x).__name__}"
        )
    try:
        with jax.enable_x64(True):  # or a float64 tensor would arrive as float32
            return jnp.from_dlpack(x)
    except Exception as error:
        try:  # jax takes no strided tensors, NumPy does
            return np.ascontiguousarray(np.from_dlpack(x))
        except Exception:
            raise TypeError(
                f"{where}: x cannot be taken by DLPack: {error}; pass a contiguous "
                "tensor (x.contiguous())"
            ) from error


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, stride = [], 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return tuple(reversed(strides))


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
            f"{kind} index {i} is out of range: it has {_checks.plural(length, noun)}"
        )
    return i % length
