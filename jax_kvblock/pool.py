"""`KVPool`, the memory of a KV cache.

A pool is a pytree: take it into a jit, donate it, and every update happens in place.
  Ids
are traced int32 values: new ids never recompile. An id outside the pool (−1 is the
usual padding) reads zeros and is dropped on a write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock import _checks
from jax_kvblock.layout import BlockSpec

MEMORY_KINDS = ("device", "pinned_host")


@jax.tree_util.register_pytree_with_keys_class
class KVPool:
    """The blocks of a KV cache, as one array or as one array per layer.

    Attributes:
      spec: what a block is, and its layout in the pool.
      data: one array `[num_blocks, *spec.block_shape]`, or a tuple of num_layers arrays
        `[num_blocks, *spec.block_shape[1:]]`.

    Build one with `KVPool.zeros` or `KVPool.wrap`.
    """

    def __init__(self, data: Any, spec: BlockSpec) -> None:
        self.data = data
        self.spec = spec

    @classmethod
    def zeros(
        cls,
        spec: BlockSpec,
        num_blocks: int,
        contiguous: bool = True,
        memory_kind: str = "device",
        *,
        device: Any = None,
    ) -> KVPool:
        """A pool of zeros.

        Args:
          spec: what a block is.
          num_blocks: blocks in the pool, at least 1.
          contiguous: one array, best to transfer; False gives one array per layer, as
            many engines hold them.
          memory_kind: "device", or "pinned_host" for host memory that kernels read and
            write over the link.
          device: a jax device or sharding; the default device when None.

        Raises:
          ValueError: for a bad count or memory kind, or a layout whose layers cannot be
            separate arrays.
        """
        where = "KVPool.zeros"
        _check_spec(where, spec)
        (num_blocks,) = _checks.check_positive(where, num_blocks=num_blocks)
        _checks.check_choice(where, "memory_kind", memory_kind, MEMORY_KINDS)
        if num_blocks * spec.block_size >= 2**31:
            raise ValueError(
                f"{where}: num_blocks * block_size must be below 2**31 (slots are "
                f"int32), got {num_blocks} * {spec.block_size}"
            )
        sharding = _sharding(device, memory_kind)
        if contiguous:
            return cls(_zeros((num_blocks, *spec.block_shape), spec, sharding), spec)
        _check_layered(where, spec)
        shape = (num_blocks, *spec.block_shape[1:])
        layers = range(spec.num_layers)
        return cls(tuple(_zeros(shape, spec, sharding) for _ in layers), spec)

    @classmethod
    def wrap(cls, arrays: Any, spec: BlockSpec) -> KVPool:
        """A pool over arrays that exist already; nothing is copied.

        Args:
          arrays: one array `[num_blocks, *spec.block_shape]`, or a sequence of
            num_layers arrays `[num_blocks, *spec.block_shape[1:]]`.
          spec: what a block is.

        Raises:
          ValueError: when a shape does not fit the spec, or the arrays differ.
          TypeError: when a dtype is not the spec's.
        """
        where = "KVPool.wrap"
        _check_spec(where, spec)
        if not isinstance(arrays, (list, tuple)):
            _check_pool_array(where, "arrays", arrays, spec.block_shape, spec)
            return cls(jnp.asarray(arrays), spec)
        _check_layered(where, spec)
        if len(arrays) != spec.num_layers:
            raise ValueError(
                f"{where}: arrays must be one array, or one for each of the spec's "
                f"{spec.num_layers} layers, got {len(arrays)}"
            )
        place = _place(arrays[0]) if arrays else None
        for i, x in enumerate(arrays):
            _check_pool_array(where, f"arrays[{i}]", x, spec.block_shape[1:], spec)
            if _place(x) != place:
                raise ValueError(
                    f"{where}: all layers must lie on one device in one memory; "
                    f"arrays[0] is on {place}, arrays[{i}] on {_place(x)}; move them "
                    "with jax.device_put"
                )
            if x.shape != arrays[0].shape:
                raise ValueError(
                    f"{where}: all layers must hold the same blocks; arrays[0] is "
                    f"{_checks.show(arrays[0])}, arrays[{i}] is {_checks.show(x)}"
                )
        return cls(tuple(jnp.asarray(x) for x in arrays), spec)

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
        return int(self.arrays[0].shape[0])

    @property
    def memory_kind(self) -> str:
        """ "device" or "pinned_host"."""
        space = jax.typeof(self.arrays[0]).memory_space
        return "pinned_host" if space == jax.memory.Space.Host else "device"

    @property
    def nbytes(self) -> int:
        """The bytes of all blocks."""
        return self.num_blocks * self.spec.block_bytes

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey("data"), self.data)], self.spec

    @classmethod
    def tree_unflatten(cls, spec: BlockSpec, children: Sequence[Any]) -> KVPool:
        return cls(children[0], spec)

    def __repr__(self) -> str:
        held = "one array" if self.contiguous else f"{len(self.arrays)} layer arrays"
        return f"KVPool({held} of {_checks.show(self.arrays[0])}, {self.spec})"


# ---- building and checking -----------------------------------------------------------


def _sharding(device: Any, memory_kind: str) -> Any:
    if isinstance(device, jax.sharding.Sharding):
        return device.with_memory_kind(memory_kind)
    if device is None:
        device = _default_device()
    return jax.sharding.SingleDeviceSharding(device, memory_kind=memory_kind)


def _default_device() -> jax.Device:
    chosen = jax.config.values["jax_default_device"]
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return chosen if chosen is not None else jax.local_devices()[0]


def _zeros(shape: tuple[int, ...], spec: BlockSpec, sharding: Any) -> jax.Array:
    if sharding.memory_kind == "device":
        return jnp.zeros(shape, spec.dtype, device=sharding)
    # Straight from host memory: a jit would stage the whole pool on the device.
    return jax.device_put(np.zeros(shape, spec.dtype), sharding)


def _check_spec(where: str, spec: Any) -> None:
    if not isinstance(spec, BlockSpec):
        raise TypeError(
            f"{where}: spec must be a BlockSpec, got {type(spec).__name__}; build one "
            "with BlockSpec(num_layers, num_outer, block_size, num_kv_heads, head_dim, "
            "dtype)"
        )


def _check_layered(where: str, spec: BlockSpec) -> None:
    if spec.block_layout.groups[0] != ("L",):
        raise ValueError(
            f"{where}: a pool of one array per layer needs a layout with layers "
            f"outermost, like 'NHD' or 'HND', got {spec.block_layout.name!r}; use a "
            "contiguous pool"
        )


def _place(x: Any) -> str | None:
    """Where a concrete array lies, in words; None for tracers and NumPy arrays."""
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
                f"{', '.join(map(str, shape))}] (its spec's), got {_checks.show(x)}; "
                "wrap a shard or a slice with the spec of its own extents"
            )
        if x.dtype != spec.dtype:
            raise TypeError(
                f"{where}: {name} must hold arrays of its spec's dtype {spec.dtype}, "
                f"got {_checks.show(x)}"
            )
        traced = isinstance(x, jax.core.Tracer)
        if isinstance(x, jax.Array) and not traced and x.is_deleted():
            raise RuntimeError(
                f"{where}: {name} was donated or deleted (array {i}); use the pool "
                "that the donating call returned"
            )


def _check_pool_array(
    where: str, name: str, x: Any, block_shape: tuple[int, ...], spec: BlockSpec
) -> None:
    _checks.check_array(where, name, x)
    if x.ndim != 1 + len(block_shape) or tuple(x.shape[1:]) != block_shape:
        shape = ", ".join(map(str, block_shape))
        raise ValueError(
            f"{where}: {name} must have shape [num_blocks, {shape}] "
            f"({spec.block_layout.name} of the spec), got {_checks.show(x)}"
        )
    if x.dtype != spec.dtype:
        raise TypeError(
            f"{where}: {name} must have the spec's dtype {spec.dtype}, got "
            f"{_checks.show(x)}"
        )
