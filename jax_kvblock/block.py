"""`BlockList`, `Block` and `Layer`: handles to parts of a manager's pool.

A block is a counted reference: when its last handle is freed or collected, and no
DLPack export of it is alive, it returns to the manager's free list.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock import _checks, _dlpack
from jax_kvblock._leases import ExportLease, Lease
from jax_kvblock.layout import BlockSpec
from jax_kvblock.transfer import gather_blocks

if TYPE_CHECKING:
    from jax_kvblock.manager import BlockManager


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How blocks and layers lie in the pool's arrays, in elements; computed once."""

    shape: tuple[int, ...]  # of a block
    strides: tuple[int, ...]
    block_stride: int
    layer_stride: int  # 0 when every layer is an array of its own

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
            strides["L"],
        )


class BlockList(Sequence["Block"]):
    """Blocks that were allocated together: a sequence, and a context that frees
    them.
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
        for i, block in enumerate(self._blocks):
            block._check_held(f"BlockList.ids: block [{i}]", ValueError)
        return np.array([block.id for block in self._blocks], np.int32)

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

    def __enter__(self) -> BlockList:
        return self

    def __exit__(self, *exc: object) -> None:
        held = [block for block in self._blocks if not block._lease.released]
        self._manager.free(held)

    def __repr__(self) -> str:
        return f"BlockList({[block.id for block in self._blocks]})"


class _View:
    """What `Block` and `Layer` share: a strided part of the pool, in any layout."""

    manager: BlockManager
    _lease: Lease
    _key: tuple[int, int | None]  # (block, layer)
    _skip: int  # leading axes of a block that the view does not have

    def _place(self) -> tuple[jax.Array, int]:
        """The array that holds the view, and the view's offset in it, in elements."""
        raise NotImplementedError  # pragma: no cover

    def _read(self) -> jax.Array:
        """A copy, as a jax array."""
        raise NotImplementedError  # pragma: no cover

    # ---- what it is ----

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, whatever the pool's layout."""
        return self.manager._geometry.shape[self._skip :]

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
        block, layer = self._key
        return f"block {block}" if layer is None else f"block {block}, layer {layer}"

    def __bool__(self) -> bool:
        return not self._lease.released and self.manager._alive

    def _check_held(self, where: str, error: type[Exception]) -> None:
        if self._lease.released:
            raise error(f"{where} ({self._name}) is freed; allocate a new one")
        if not self.manager._alive:
            raise error(
                f"{where} ({self._name}): its pool was donated or closed; put the new "
                "pool back with manager.pool = ..."
            )

    # ---- out ----

    def __jax_array__(self) -> jax.Array:
        self._check_held(type(self).__name__, RuntimeError)
        return self._read()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """A NumPy copy (NumPy cannot share a buffer of every dtype and device)."""
        if copy is False:
            raise ValueError(
                f"{self._name}: np.asarray copies; for a view of CPU memory use "
                "np.from_dlpack"
            )
        array = np.array(self.__jax_array__())
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
        self._check_held("__dlpack__", BufferError)
        device = self.manager._dl_device
        if dl_device is not None and tuple(dl_device) != device:
            # Pinned host memory is CPU memory, too: shown as such on request.
            if (device[0], tuple(dl_device)) == (_dlpack.CUDA_HOST, _dlpack.CPU_DEVICE):
                device = _dlpack.CPU_DEVICE
            else:
                return self._export_copy(stream, max_version, dl_device, copy)
        if copy:
            return self._export_copy(stream, max_version, dl_device, copy)
        array, offset = self._place()
        geometry = self.manager._geometry
        return _dlpack.export(
            array,
            offset,
            geometry.shape[self._skip :],
            geometry.strides[self._skip :],
            device,
            lease=ExportLease(self._lease.free_list, self._key, self.manager._exports),
            stream=stream,
            max_version=max_version,
        )

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
        fresh = self._read()
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

    def _wait(self) -> None:
        """Until the source was read: its owner may write to it as soon as we return."""
        jax.block_until_ready(self.manager.pool.data)

    def _with_heads(self, array: jax.Array) -> jax.Array:
        """Puts back the axis that a flat tail hides."""
        if not self.manager._flat_tail:
            return array
        return jnp.expand_dims(array, self._head_axis)

    def _without_heads(self, array: jax.Array) -> jax.Array:
        if not self.manager._flat_tail:
            return array
        return jnp.squeeze(array, self._head_axis)

    @property
    def _head_axis(self) -> int:
        return -3 if self.manager.spec.inner == "HND" else -2


class Block(_View):
    """A KV-cache block: a sequence of layers, `[nl, no, nt, nh, hd]` (HND: `nh, nt`).

    It exports itself by DLPack without a copy. It is false once it is freed, or once
    its pool was donated and no new one was put back.
    """

    _skip = 0

    def __init__(self, manager: BlockManager, lease: Lease) -> None:
        self.manager = manager
        self._lease = lease
        self._key = (lease.block_id, None)

    @property
    def id(self) -> int:
        """The block's index in the pool."""
        return self._lease.block_id

    @property
    def ref_count(self) -> int:
        """How many handles and DLPack exports hold the block."""
        return self._lease.free_list.references(self.id)

    def share(self) -> Block:
        """Another handle to the same block; it is free when all handles are."""
        self._check_held("share", ValueError)
        self._lease.free_list.retain(self.id)
        return Block(self.manager, Lease(self._lease.free_list, self.id))

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
        """
        array = self._with_heads(self._incoming("Block.copy_from", x))
        self.manager._write(self.id, array[None])
        self._wait()

    def __len__(self) -> int:
        return self.manager.spec.num_layers

    def __getitem__(self, index: int) -> Layer:
        layers = self.manager.spec.num_layers
        return Layer(self, _index("Block", index, layers, "layer"))

    def __iter__(self) -> Iterator[Layer]:
        return (Layer(self, i) for i in range(self.manager.spec.num_layers))

    def __repr__(self) -> str:
        state = "" if self else ", freed" if self._lease.released else ", no pool"
        return f"Block(id={self.id}, {self.dtype}{list(self.shape)}{state})"

    def _place(self) -> tuple[jax.Array, int]:
        pool = self.manager.pool
        if not pool.contiguous:
            raise BufferError(
                f"{self._name}: its layers are separate arrays, so it is no single "
                "tensor; export its layers, or build the manager with contiguous=True"
            )
        return pool.arrays[0], self.id * self.manager._geometry.block_stride

    def _read(self) -> jax.Array:
        spec = self.manager.spec
        (block,) = _gather(spec.inner)(self.manager.pool, np.array([self.id], np.int32))
        return self._without_heads(block)


class Layer(_View):
    """One layer of a block: `[no, nt, nh, hd]` (HND: `nh, nt`)."""

    _skip = 1

    def __init__(self, block: Block, index: int) -> None:
        self.block = block
        self.index = index
        self.manager = block.manager
        self._lease = block._lease
        self._key = (block.id, index)

    def copy_from(self, x: Any) -> None:
        """Replaces the layer's contents, in place; see `Block.copy_from`."""
        array = self._with_heads(self._incoming("Layer.copy_from", x))
        self.manager._write_layer(self.block.id, self.index, array)
        self._wait()

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Layer({self._name}, {self.dtype}{list(self.shape)})"

    def _place(self) -> tuple[jax.Array, int]:
        pool, geometry = self.manager.pool, self.manager._geometry
        offset = self.block.id * geometry.block_stride
        if pool.contiguous:
            return pool.arrays[0], offset + self.index * geometry.layer_stride
        return pool.arrays[self.index], offset

    def _read(self) -> jax.Array:
        return self.block.__jax_array__()[self.index]


@functools.cache
def _gather(inner: str) -> Any:
    return jax.jit(lambda pool, ids: gather_blocks(pool, ids, inner))


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
