"""`Copies`: blocks between arrays on the device and host memory, beside XLA.

XLA's own copies to the host take a detour through memory of their own. These go
straight between a staging array and the slots of a pool in pinned host memory, on
streams that wait for nobody, so that the link works while programs run. What makes it
safe:

- A staging array is never donated, and a copy keeps it until it has ended.
- A copy that reads it starts when the program that wrote it has ended. So does one that
  writes into it: then nobody is left who used that memory before.
- A program that reads what came up is dispatched when the copy has ended.

On the CPU the same code runs, with memcpy in place of streams.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.blocks.layout import BlockSpec
from jax_kvblock.cache.copy_lines import STRIP, Copy, bytes_at, line_for

Numbers = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Cut:
    """What of each block is copied: rows of bytes.

    Attributes:
      first: where the first row begins in the block.
      width: bytes of a row.
      rows: how many there are.
      pitch: bytes from one to the next.
    """

    first: int
    width: int
    rows: int
    pitch: int

    @classmethod
    def whole(cls, spec: BlockSpec) -> Cut:
        """A whole block."""
        return cls(0, spec.block_bytes, 1, spec.block_bytes)

    @classmethod
    def layer(cls, spec: BlockSpec, layer: int) -> Cut:
        """One layer of a block in universal order: a row for each head."""
        pitch = spec.block_bytes // spec.num_kv_heads
        width = pitch // spec.num_layers
        return cls(layer * width, width, spec.num_kv_heads, pitch)

    @property
    def nbytes(self) -> int:
        return self.width * self.rows


class Copies:
    """Copies blocks down from the device and up to it.

    Threads may share it: calls wait, without the GIL, and those of the two ways run at
    the same time.

    Args:
      device: where the staging arrays lie.

    Raises:
      CopyError: when the device is a GPU, and the build has no CUDA.

    Example:
      >>> copies = Copies(jax.devices()[0])
      >>> copies.down(staged, range(4), host.rows, slots)     # 4 blocks to 4 slots
    """

    def __init__(self, device: jax.Device) -> None:
        self._device = device
        self._down, self._up = (line_for(device) for _ in range(2))

    def start_down(
        self, staged: jax.Array, rows: Numbers, host: np.ndarray, slots: Numbers
    ) -> Copy:
        """Begins to copy rows of a staging array into slots.

        It waits for the program that makes the array, not for the copy.

        Args:
          staged: `[n, ...]`, as a jit has made it; it may be under way. Or a room.
          rows: which of its rows, `[m]`.
          host: uint8 `[num_slots, bytes of a row]`; pinned, where the device is a GPU.
          slots: where they go, `[m]`; nobody else may read or write them until the copy
            has ended.

        Raises:
          CopyError: when the copy cannot begin.
          Exception: what the program failed with that makes `staged`.
        """
        size = _host_row("down", host)
        count = staged.nbytes // size if staged.ndim == 1 else len(staged)
        rows, slots = _ids("down", rows, count), _ids("down", slots, len(host))
        if staged.nbytes != size * count:
            raise ValueError(
                f"Copies.down: rows of staged and host must be of one size, got "
                f"{staged.nbytes // max(count, 1)} and {size} bytes"
            )
        self._check_place("down", staged)
        jax.block_until_ready(staged)
        strips = np.zeros(len(rows), STRIP)
        strips["from"] = staged.unsafe_buffer_pointer() + rows * size
        strips["to"] = host.ctypes.data + slots * size
        strips["bytes"], strips["rows"] = size, 1
        return self._down.start(strips, (staged, host))

    def down(
        self, staged: jax.Array, rows: Numbers, host: np.ndarray, slots: Numbers
    ) -> None:
        """`start_down`, and waits until the blocks are there."""
        self.start_down(staged, rows, host, slots).wait()

    def _check_place(self, where: str, array: jax.Array) -> None:
        """Copies take addresses: those of another device would be somebody else's."""
        if array.devices() != {self._device}:
            raise ValueError(
                f"Copies.{where}: the array must lie on {self._device} alone, got "
                f"{array.sharding}; put it there"
            )

    def room(self, shape: Sequence[int], dtype: Any) -> jax.Array:
        """A new staging array for `up`; the program that makes it is under way.

        Make some ahead: they wait for the programs that were dispatched before them.
        """
        return _zeros(tuple(shape), np.dtype(dtype), self._device)()

    def start_up(
        self,
        host: np.ndarray,
        slots: Numbers,
        cut: Cut,
        room: jax.Array,
        first: int = 0,
        at: Numbers | None = None,
        keep: object = None,
    ) -> Copy:
        """Begins to copy parts of slots into a staging array, one behind the other.

        It waits for the program that makes the array, not for the copy.

        Args:
          host: uint8 `[num_slots, block_bytes]`; pinned, where the device is a GPU.
          slots: which blocks, `[m]`; nobody may write them until the copy has ended.
          cut: what of each.
          room: where there is memory for all of them. From `room`; no program that is
            under way reads there, and those that do are dispatched when the copy has
            ended.
          first: where they begin in it, in bytes.
          at: which of its places they take from there, `[m]`; else one behind the
            other.
          keep: kept until the copy has ended, as `room` and `host` are.

        Raises:
          CopyError: when the copy cannot begin.
        """
        slots, size = _ids("up", slots, len(host)), _host_row("up", host)
        if first < 0 or first + cut.nbytes * len(slots) > room.nbytes:
            raise ValueError(
                f"Copies.up: room must hold {len(slots)} rows of {cut.nbytes} bytes "
                f"behind {first}, got {room.dtype.name}{list(room.shape)}"
            )
        at = np.arange(len(slots)) if at is None else at
        places = _ids("up", at, (room.nbytes - first) // cut.nbytes)
        if cut.first + (cut.rows - 1) * cut.pitch + cut.width > size:
            raise ValueError(f"Copies.up: {cut} leaves a slot of {size} bytes")
        self._check_place("up", room)
        jax.block_until_ready(room)
        strips = np.zeros(len(slots), STRIP)
        strips["from"] = host.ctypes.data + slots * size + cut.first
        strips["to"] = room.unsafe_buffer_pointer() + first + places * cut.nbytes
        strips["bytes"], strips["rows"] = cut.width, cut.rows
        strips["to_pitch"], strips["from_pitch"] = cut.width, cut.pitch
        return self._up.start(strips, (room, host, keep))

    def places(self, room: jax.Array, rows: Sequence[int], size: int) -> list[Any]:
        """Memory of a room, row by row of `size` bytes, for what writes there itself.

        It waits for the program that makes the room. On the CPU they are arrays, uint8
        `[size]`; on CUDA what has `__cuda_array_interface__`. Whoever has them keeps
        the room, which nobody else may read or write meanwhile.
        """
        self._check_place("places", room)
        jax.block_until_ready(room)
        found = _ids("places", rows, room.nbytes // size)
        begin = room.unsafe_buffer_pointer()
        memory = bytes_at if self._device.platform == "cpu" else DeviceBytes
        return [memory(begin + int(row) * size, size) for row in found]

    def up(
        self, host: np.ndarray, slots: Numbers, cut: Cut, room: jax.Array
    ) -> jax.Array:
        """`start_up`, and waits; returns the room."""
        self.start_up(host, slots, cut, room).wait()
        return room


class DeviceBytes:
    """Memory of a GPU, as CuPy, kvikio and others take it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


def _ids(where: str, ids: Numbers, end: int) -> np.ndarray:
    numbers = np.asarray(ids, np.int64)
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < end:
        raise IndexError(
            f"Copies.{where}: places must be from 0 to {end - 1}, got "
            f"{numbers.min()} to {numbers.max()}"
        )
    return numbers


def _host_row(where: str, host: np.ndarray) -> int:
    """Bytes of a slot."""
    if host.dtype != np.uint8 or host.ndim != 2 or not host.flags.c_contiguous:
        raise ValueError(
            f"Copies.{where}: host must be dense uint8 [slots, bytes], got "
            f"{host.dtype.name}{list(host.shape)}"
        )
    return int(host.shape[1])
