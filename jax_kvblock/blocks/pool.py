"""`KVPool`, the memory of a KV cache.

A pool is a pytree: take it into a jit, donate it, and every update happens in place.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_kvblock.blocks.layout import BlockSpec, Layout, check_spec
from jax_kvblock.core import checks
from jax_kvblock.core.types import ArrayIn, Blocks, Place

if TYPE_CHECKING:
    from jaxtyping import Shaped

# An array of a pool, or what stands for one.
PoolArray: TypeAlias = 'Shaped[ArrayIn, "..."] | jax.ShapeDtypeStruct'

MEMORY_KINDS = ("device", "pinned_host")


@jax.tree_util.register_pytree_with_keys_class
class KVPool:
    """The blocks of a KV cache, as one array or as one array per layer.

    `KVPool.zeros` makes one, `KVPool.wrap` takes arrays that exist. The constructor
    takes them, too, and `jax.ShapeDtypeStruct`s to stand for them; with more leading
    axes, they are a batch of pools for `jax.vmap`.

    Attributes:
      spec: what a block is, and its layout in the pool.
      data: one array `[num_blocks, *spec.block_shape]`, or a tuple of num_layers arrays
        `[num_blocks, *spec.block_shape[1:]]`.

    Raises:
      ValueError, TypeError: when data does not fit the spec, as for `KVPool.wrap`.

    Example:
      >>> pool = KVPool.zeros(BlockSpec(32, 2, 16, 8, 128, jnp.bfloat16), 1024)
      >>> len(pool), pool.shape
      (1024, (1024, 32, 2, 16, 8, 128))
    """

    data: Any
    spec: BlockSpec

    def __init__(
        self,
        data: PoolArray | Sequence[PoolArray],
        spec: BlockSpec,
    ) -> None:
        self.data = _checked_data("KVPool", "data", data, spec, open_to_jax=True)
        self.spec = spec

    @classmethod
    def _holding(cls, data: Any, spec: BlockSpec) -> KVPool:
        """A pool of data that fits, or that stands for some other tree's leaves."""
        pool = object.__new__(cls)
        pool.data = data
        pool.spec = spec
        return pool

    @classmethod
    def zeros(
        cls,
        spec: BlockSpec,
        num_blocks: int,
        *,
        contiguous: bool = True,
        memory_kind: str = "device",
        device: Place = None,
    ) -> KVPool:
        """A pool of zeros.

        Args:
          spec: what a block is.
          num_blocks: blocks in the pool, at least 1.
          contiguous: one array, best to transfer; False gives one array per layer, as
            many engines hold them.
          memory_kind: "device", or "pinned_host" for host memory that kernels read and
            write over the link.
          device: a jax device, a sharding, or a platform's name like "cpu"; the default
            device when None.

        Raises:
          ValueError: for a bad count, size, memory kind or device, or a layout whose
            layers cannot be separate arrays.
          TypeError: for a spec whose dtype JAX does not hold, like float64 without
            `jax_enable_x64`, or something else than a device.
        """
        where = "KVPool.zeros"
        check_spec(where, spec)
        checks.check_held(where, "the spec's dtype", spec.dtype)
        (num_blocks,) = checks.check_positive(where, num_blocks=num_blocks)
        checks.check_choice(where, "memory_kind", memory_kind, MEMORY_KINDS)
        _check_size(where, spec, num_blocks)
        sharding = _sharding(where, device, memory_kind)
        shape = (num_blocks, *spec.block_shape)
        if contiguous:
            return cls._holding(_zeros(shape, spec, sharding), spec)
        _check_layered(where, spec)
        shape = (num_blocks, *spec.block_shape[1:])
        layers = range(spec.num_layers)
        return cls._holding(tuple(_zeros(shape, spec, sharding) for _ in layers), spec)

    @classmethod
    def wrap(
        cls, arrays: Shaped[ArrayIn, "num_blocks ..."] | Blocks, spec: BlockSpec
    ) -> KVPool:
        """A pool over arrays that exist already; nothing on the device is copied.

        Args:
          arrays: one array `[num_blocks, *spec.block_shape]`, or a sequence of
            num_layers arrays `[num_blocks, *spec.block_shape[1:]]`. NumPy arrays go to
            the device. Tensors of other libraries come by DLPack and stay where they
            lie, on the CPU also where the default device is a GPU; memory that XLA
            cannot take as it is, with gaps or unaligned, is copied there.
          spec: what a block is.

        Raises:
          ValueError: when a shape does not fit the spec, or the arrays differ.
          TypeError: when a dtype is not the spec's.
        """
        return cls._holding(_checked_data("KVPool.wrap", "arrays", arrays, spec), spec)

    @property
    def contiguous(self) -> bool:
        """Whether the pool is one array."""
        return not isinstance(self.data, tuple)

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The pool's arrays: one, or one per layer."""
        return self.data if isinstance(self.data, tuple) else (self.data,)

    @property
    def num_blocks(self) -> int:
        """How many blocks the pool holds."""
        return int(self._leading[-1])

    @property
    def memory_kind(self) -> str:
        """ "device" or "pinned_host"."""
        space = jax.typeof(self.arrays[0]).memory_space
        return "pinned_host" if space == jax.memory.Space.Host else "device"

    @property
    def _leading(self) -> tuple[int, ...]:
        """The axes before a block's: num_blocks, and before it those of a batch."""
        array = self.arrays[0]
        rank = len(self.spec.block_shape) - (0 if self.contiguous else 1)
        return array.shape[: array.ndim - rank]

    @property
    def shape(self) -> tuple[int, ...]:
        """`(num_blocks, *spec.block_shape)`, however many arrays hold the blocks."""
        return (*self._leading, *self.spec.block_shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the elements."""
        return self.spec.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of all blocks."""
        return math.prod(self._leading) * self.spec.block_bytes

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """How the pool's array, or that of each layer, lies over devices."""
        return self.arrays[0].sharding

    def block_until_ready(self) -> KVPool:
        """Waits for what is being computed into the pool, and returns it."""
        jax.block_until_ready(self.data)
        return self

    def __len__(self) -> int:
        return self.num_blocks

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey("data"), self.data)], self.spec

    @classmethod
    def tree_unflatten(cls, spec: BlockSpec, children: Sequence[Any]) -> KVPool:
        # Unchecked: trees hold all sorts of leaves while JAX works on them.
        return cls._holding(children[0], spec)

    def __repr__(self) -> str:
        held = "one array" if self.contiguous else f"{len(self.arrays)} layer arrays"
        return f"KVPool({held} of {checks.show(self.arrays[0])}, {self.spec})"


# ---- export --------------------------------------------------------------------------


def _spec_as_bytes(spec: BlockSpec) -> bytes:
    """What `jax.export` writes down of a pool beside its arrays."""
    fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    fields["dtype"] = spec.dtype.name
    if isinstance(spec.layout, Layout):
        fields["layout"] = dataclasses.asdict(spec.layout)
    return json.dumps(fields).encode()


def _spec_of_bytes(data: bytes | bytearray) -> BlockSpec:
    fields = json.loads(bytes(data))
    if isinstance(fields["layout"], dict):
        fields["layout"] = Layout(**fields["layout"])
    return BlockSpec(**fields)


jax.export.register_pytree_node_serialization(
    KVPool,
    serialized_name="jax_kvblock.KVPool",
    serialize_auxdata=_spec_as_bytes,
    deserialize_auxdata=_spec_of_bytes,
)


# ---- building ------------------------------------------------------------------------


def _sharding(where: str, device: Any, memory_kind: str) -> jax.sharding.Sharding:
    if isinstance(device, jax.sharding.Sharding):
        return device.with_memory_kind(memory_kind)
    return jax.sharding.SingleDeviceSharding(
        find_device(where, device), memory_kind=memory_kind
    )


def find_device(where: str, device: Any) -> jax.Device:
    """A device that is meant: itself, the first of a platform, or the default one."""
    if device is None:
        device = jax.config.values["jax_default_device"]
    if device is None:
        return jax.local_devices()[0]
    if isinstance(device, jax.Device):
        return device
    must = f"{where}: device must be a jax device, a sharding or a platform's name"
    if not isinstance(device, str):
        raise TypeError(f"{must}, got {device!r}; pass one of jax.devices()")
    try:
        return jax.local_devices(backend=device)[0]
    except RuntimeError as error:
        raise ValueError(
            f"{must}, got {device!r}; pass one of jax.devices() ({error})"
        ) from None


def _zeros(
    shape: tuple[int, ...], spec: BlockSpec, sharding: jax.sharding.Sharding
) -> jax.Array:
    if sharding.memory_kind == "device":
        # A zero that is put there by hand, so that a transfer guard lets it pass.
        zero = jax.device_put(np.zeros((), spec.dtype))
        return jnp.full(shape, zero, device=sharding)
    # Straight from host memory: a jit would stage the whole pool on the device.
    return jax.device_put(np.zeros(shape, spec.dtype), sharding)


# ---- checking ------------------------------------------------------------------------


def _check_size(where: str, spec: BlockSpec, num_blocks: int) -> None:
    if num_blocks * spec.block_size >= 2**31:
        raise ValueError(
            f"{where}: num_blocks * block_size must be below 2**31 (slots are int32), "
            f"got {num_blocks} * {spec.block_size}"
        )
    if num_blocks * spec.block_bytes >= 2**63:
        raise ValueError(
            f"{where}: a pool must have less than 2**63 bytes, got {num_blocks} blocks "
            f"of {spec.block_bytes} bytes; look at the spec's extents"
        )


def _check_layered(where: str, spec: BlockSpec) -> None:
    if spec.block_layout.groups[0] != ("L",):
        raise ValueError(
            f"{where}: a pool of one array per layer needs a layout with layers "
            f"outermost, like 'NHD' or 'HND', got {spec.block_layout.name!r}; use a "
            "contiguous pool"
        )


def _checked_data(
    where: str, name: str, data: Any, spec: Any, open_to_jax: bool = False
) -> Any:
    """A pool's data: arrays that fit the spec and each other.

    `open_to_jax` lets pass what JAX's transformations make of them: shapes without
    values, and a batch's axes in front.
    """
    check_spec(where, spec)
    if not isinstance(data, (list, tuple)):
        block = spec.block_shape
        return _pool_array(where, name, data, block, spec, open_to_jax)
    _check_layered(where, spec)
    if len(data) != spec.num_layers:
        raise ValueError(
            f"{where}: {name} must be one array, or one for each of the spec's "
            f"{spec.num_layers} layers, got {len(data)}"
        )
    block = spec.block_shape[1:]
    arrays = tuple(
        _pool_array(where, f"{name}[{i}]", x, block, spec, open_to_jax)
        for i, x in enumerate(data)
    )
    place = _place(arrays[0])
    for i, x in enumerate(arrays):
        if _place(x) != place:
            raise ValueError(
                f"{where}: all layers must lie on one device in one memory; {name}[0] "
                f"is on {place}, {name}[{i}] on {_place(x)}; move them with "
                "jax.device_put"
            )
        if x.shape != arrays[0].shape:
            raise ValueError(
                f"{where}: all layers must hold the same blocks; {name}[0] is "
                f"{checks.show(arrays[0])}, {name}[{i}] is {checks.show(x)}"
            )
    return arrays


def _pool_array(
    where: str,
    name: str,
    x: Any,
    block: tuple[int, ...],
    spec: BlockSpec,
    open_to_jax: bool,
) -> Any:
    struct = open_to_jax and isinstance(x, jax.ShapeDtypeStruct)
    if not struct:
        x = checks.check_array(where, name, x, in_place=True)
    leading, tail = x.shape[: x.ndim - len(block)], x.shape[x.ndim - len(block) :]
    if not leading or (len(leading) > 1 and not open_to_jax) or tuple(tail) != block:
        shape = ", ".join(map(str, block))
        raise ValueError(
            f"{where}: {name} must have shape [num_blocks, {shape}] "
            f"({spec.block_layout.name} of the spec), got {checks.show(x)}"
        )
    if x.dtype != spec.dtype:
        raise TypeError(
            f"{where}: {name} must have the spec's dtype {spec.dtype}, got "
            f"{checks.show(x)}"
        )
    _check_size(where, spec, leading[-1])
    if struct:
        return x
    if not isinstance(x, jax.Array):
        checks.check_held(where, name, spec.dtype)
    return checks.to_jax(x)


def _place(x: Any) -> str | None:
    """Where a concrete array lies, in words; None for tracers and shapes."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
        return None
    devices = ", ".join(sorted(str(d) for d in x.devices()))
    return f"{devices} ({x.sharding.memory_kind})"


def check_pool(where: str, name: str, pool: Any) -> None:
    """A KVPool whose arrays fit its spec and are alive."""
    if not isinstance(pool, KVPool):
        raise TypeError(
            f"{where}: {name} must be a KVPool, got {type(pool).__name__}; wrap arrays "
            "with KVPool.wrap(arrays, spec)"
        )
    spec, arrays = pool.spec, pool.arrays
    if not pool.contiguous and len(arrays) != spec.num_layers:
        raise ValueError(
            f"{where}: {name} must have an array for each of its spec's "
            f"{spec.num_layers} layers, got {len(arrays)}"
        )
    shape = spec.block_shape if pool.contiguous else spec.block_shape[1:]
    for i, x in enumerate(arrays):
        if x.ndim != 1 + len(shape) or tuple(x.shape[1:]) != shape:
            raise ValueError(
                f"{where}: {name} must hold arrays of shape [num_blocks, "
                f"{', '.join(map(str, shape))}] (its spec's), got {checks.show(x)}; "
                "wrap a shard or a slice with the spec of its own extents"
            )
        if x.dtype != spec.dtype:
            raise TypeError(
                f"{where}: {name} must hold arrays of its spec's dtype {spec.dtype}, "
                f"got {checks.show(x)}"
            )
        traced = isinstance(x, jax.core.Tracer)
        if isinstance(x, jax.Array) and not traced and x.is_deleted():
            raise RuntimeError(
                f"{where}: {name} was donated or deleted (array {i}); use the pool "
                "that the donating call returned"
            )
