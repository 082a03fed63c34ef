"""`View`: what a block and the parts of one share, memory of the pool in any layout.

It says what it is and whether it is held, goes out by DLPack or as a copy, and takes
new contents in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_kvblock import _native
from jax_kvblock.core import checks
from jax_kvblock.objects import dlpack
from jax_kvblock.objects.memory import Memory
from jax_kvblock.objects.parts import part_name

if TYPE_CHECKING:
    from jaxtyping import Shaped


class Unpicklable:
    """What stands for memory of this process, and so cannot leave it."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(
            f"{kind}: cannot be pickled or copied, since it stands for memory of this "
            "process; save np.asarray(block), or gather_blocks(manager.pool, ids), and "
            "write it to blocks of another manager; share() makes another handle"
        )


class View(Unpicklable):
    """A block or a part of one: a strided part of the pool, in any layout."""

    _memory: Memory
    _lease: _native.Lease
    _part: tuple[int, ...]  # (), (layer,) or (layer, outer)

    # ---- what it is ----

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, whatever the pool's layout."""
        return self._memory.geometry.shape[len(self._part) :]

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
        return self._memory.spec.dtype

    @property
    def device_id(self) -> int:
        """The index of the device: 0 on the CPU."""
        return self._memory.dl_device[1]

    @property
    def _name(self) -> str:
        return part_name(self._lease.block_id, self._part)

    def __bool__(self) -> bool:
        with self._memory.lock:  # in the middle of another thread's update it is none
            self._memory.take_over()
            return not self._lease.released and self._memory.alive

    def _check_held(self, where: str, error: type[Exception]) -> None:
        if self._lease.released:
            raise error(self._freed(where))
        with self._memory.lock:
            self._memory.take_over()
            trouble = self._memory.trouble()
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
        if self._memory.closed:
            return ", closed"
        return "" if self._memory.alive else ", no pool"

    # ---- out ----

    def __jax_array__(self) -> jax.Array:
        where = type(self).__name__
        with self._hold(where, RuntimeError), self._memory.lock:
            self._check_held(where, RuntimeError)
            return self._memory.read(self._indices)

    @property
    def _indices(self) -> np.ndarray:
        """The block's id and the indices of the part, for a program."""
        return np.array([self._lease.block_id, *self._part], np.int32)

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> Shaped[np.ndarray, "..."]:
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
            self._memory.look_after(f"np.asarray ({self._name})", error)
            raise
        return array if dtype is None else array.astype(dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        """(device type, device id), as DLPack numbers them."""
        self._check_held("__dlpack_device__", BufferError)
        return self._memory.dl_device

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
        with self._memory.lock:  # no update may take the memory before it is held
            self._check_held("__dlpack__", BufferError)
            device = self._memory.dl_device
            if dl_device is not None and tuple(dl_device) != device:
                # Pinned host memory is CPU memory, too: shown as such on request.
                pinned = device[0] == dlpack.CUDA_HOST
                if not pinned or tuple(dl_device) != dlpack.CPU_DEVICE:
                    return self._export_copy(stream, max_version, dl_device, copy)
                device = dlpack.CPU_DEVICE
            if copy:
                return self._export_copy(stream, max_version, dl_device, copy)
            return self._export(stream, max_version, device)

    def _export(
        self, stream: Any, max_version: tuple[int, int] | None, device: tuple[int, int]
    ) -> Any:
        array, offset = self._place()
        geometry, depth = self._memory.geometry, len(self._part)
        lease = self._lease.export(self._part)
        if lease is None:  # by another thread, since we looked
            raise BufferError(self._freed("__dlpack__"))
        try:
            return dlpack.export(
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
            self._memory.look_after(f"__dlpack__ ({self._name})", error)
            raise

    def _place(self) -> tuple[jax.Array, int]:
        """The array that holds the view, and the view's offset in it, in elements."""
        pool, geometry = self._memory.open_pool("pool"), self._memory.geometry
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
        device = self._memory.dl_device
        target = device if dl_device is None else (int(dl_device[0]), int(dl_device[1]))
        if target not in (device, dlpack.CPU_DEVICE):
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
        elif device[0] == dlpack.CUDA_HOST:
            pinned = self._memory.open_pool("pool").arrays[0].sharding
            fresh = jax.device_put(fresh, pinned)
        return dlpack.export(
            fresh,
            0,
            fresh.shape,
            _row_major(fresh.shape),
            dlpack.device_of(fresh),
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
            done = self._memory.write(self._indices, array)
        try:  # the source was read: its owner may write to it as soon as we return
            jax.block_until_ready(done)
        except Exception as error:
            self._memory.look_after(where, error)
            raise

    def _incoming(self, where: str, x: Any) -> jax.Array:
        """Any array or DLPack object, as a jax array where the pool is."""
        self._check_held(where, ValueError)
        if not isinstance(x, (jax.Array, np.ndarray, View)):
            x = _from_dlpack(where, x)
        shape, dtype = tuple(x.shape), np.dtype(x.dtype)
        if shape != self.shape:
            raise ValueError(
                f"{where}: x must have shape {list(self.shape)}, got {checks.show(x)}"
            )
        if dtype != self.dtype:
            raise TypeError(
                f"{where}: x must have dtype {self.dtype}, got {checks.show(x)}; cast "
                "it"
            )
        array = x.__jax_array__() if isinstance(x, View) else x
        (device,) = self._memory.devices
        return jax.device_put(array, device)


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
