"""Fewer KV heads than devices: each device holds the one that its query heads read.

N query heads are cut over n devices. Where the K KV heads are fewer than devices, the
queries of a device read one KV head, and n / K devices read the same. A pool of n heads
has each KV head as often as it is read, and is cut as q is: what a device writes and
reads is its own, and nothing travels. Where K is a multiple of n, all stays as it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_kvblock.blocks.layout import BlockSpec, check_spec
from jax_kvblock.core.checks import as_array, check_integer, check_positive, show
from jax_kvblock.core.types import ArrayIn
from jax_kvblock.parallel.axes import axis_size, hashable

if TYPE_CHECKING:
    from jaxtyping import Shaped


def repeat_kv_heads(
    x: Shaped[ArrayIn, "..."], size: int, *, axis: int = -2
) -> Shaped[jax.Array, "..."]:
    """Every KV head as often as `size` devices read it, for arrays of all devices.

    Head j of the result is KV head j // (size / K), the one that the query heads of
    device j read. Cut over the devices, it is made where it stays. Repeat k and v of
    new tokens, or once and for all the weights that they are projected by (`[width, K,
    D]`): then each device projects its own head.

    Args:
      x: an array with K KV heads: k or v `[tokens, K, D]`, weights, an array of a pool.
      size: devices over which query heads are cut: a multiple of K, or K of it.
      axis: the axis of the heads.

    Returns:
      An array like x with max(K, size) heads; x where K is a multiple of size.

    Raises:
      TypeError, ValueError: neither K nor size divides the other, or there is no such
        axis.

    Example:
      >>> k, v = (repeat_kv_heads(a, mesh.shape["tp"]) for a in (k, v))
      >>> pool = append_kv(pool, layer, k, v, slots)  # of repeat_spec(spec, size)
    """
    where = "repeat_kv_heads"
    x, axis = _array(where, x, axis)
    (size,) = check_positive(where, size=size)
    heads = x.shape[axis]
    times = _kv_heads(where, heads, size) // heads
    if times == 1:
        return x
    # Not jnp.repeat, which wants to be told how heads of an explicit mesh are cut.
    shape = (*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
    apart = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape)
    return apart.reshape(*x.shape[:axis], heads * times, *x.shape[axis + 1 :])


def own_kv_heads(
    x: Shaped[ArrayIn, "..."],
    axis_name: Hashable | Sequence[Hashable],
    *,
    axis: int = -2,
) -> Shaped[jax.Array, "..."]:
    """The KV heads that this device's query heads read; inside of `jax.shard_map`.

    Args:
      x: an array with all K KV heads, the same on all devices: k or v `[tokens, K, D]`.
      axis_name: the mesh axis, or axes, over which query heads are cut; n devices, a
        multiple of K, or K of n.
      axis: the axis of the heads.

    Returns:
      An array like x with max(1, K / n) heads, the device's part of
      `repeat_kv_heads(x, n)`.

    Raises:
      TypeError, ValueError: neither K nor n divides the other, or there is no such
        axis.

    Example:
      >>> k, v = own_kv_heads(k, "tp"), own_kv_heads(v, "tp")
      >>> pool = append_kv(pool, layer, k, v, slots)  # of one head
    """
    where = "own_kv_heads"
    x, axis = _array(where, x, axis)
    size = axis_size(where, hashable(axis_name))
    heads = x.shape[axis]
    own = _kv_heads(where, heads, size) // size
    first = jax.lax.axis_index(hashable(axis_name)) * heads // size
    return jax.lax.dynamic_slice_in_dim(x, first, own, axis)


def repeat_spec(spec: BlockSpec, size: int) -> BlockSpec:
    """The spec of a pool whose KV heads are cut over `size` devices.

    Args:
      spec: of a pool with the model's K KV heads.
      size: devices over which query heads are cut: a multiple of K, or K of it.

    Returns:
      The spec with max(K, size) KV heads. Inside of `shard_map` a device has its
      `num_kv_heads // size` of them.

    Example:
      >>> spec = repeat_spec(spec, mesh.shape["tp"])
      >>> cut = NamedSharding(mesh, kv_heads_partition(spec, "tp"))
      >>> pool = KVPool.zeros(spec, 1024, device=cut)
    """
    where = "repeat_spec"
    check_spec(where, spec)
    (size,) = check_positive(where, size=size)
    return spec.replace(num_kv_heads=_kv_heads(where, spec.num_kv_heads, size))


def kv_heads_partition(
    spec: BlockSpec,
    axis_name: Hashable | Sequence[Hashable],
    *,
    contiguous: bool = True,
) -> PartitionSpec:
    """How a pool's arrays are cut over a mesh by KV heads, in whichever layout.

    Args:
      spec: of the pool.
      axis_name: the mesh axis, or axes, over which heads are cut.
      contiguous: as of `KVPool`; False is an array for each layer.

    Raises:
      TypeError, ValueError: no spec, or a layout that merges heads behind another axis.

    Example:
      >>> kv_heads_partition(spec, "tp")  # NHD
      PartitionSpec(None, None, None, None, 'tp')
    """
    where = "kv_heads_partition"
    check_spec(where, spec)
    groups = (("B",), *spec.block_layout.groups[0 if contiguous else 1 :])
    axis = next((i for i, group in enumerate(groups) if group[0] == "H"), None)
    if axis is None:
        raise ValueError(
            f"{where}: the layout must have heads as an axis, or first in one, got "
            f"{spec.block_layout.name!r}, {spec.block_layout.axes!r}; use 'NHD', 'HND' "
            "or 'universal', or hold the pool whole on every device"
        )
    return PartitionSpec(*[None] * axis, hashable(axis_name))


def _kv_heads(where: str, heads: int, size: int) -> int:
    """Of all devices together."""
    if not heads or (heads % size and size % heads):
        raise ValueError(
            f"{where}: of KV heads and devices one must divide the other, got {heads} "
            f"and {size}; hold the cache whole on every device, and paged_attention "
            "reads what its query heads need (q_heads in shard_map)"
        )
    return max(heads, size)


def _array(where: str, x: Any, axis: Any) -> tuple[jax.Array, int]:
    """x, and the axis counted from the front."""
    x = as_array(where, "x", x)
    axis = check_integer(where, "axis", axis, "it is the axis of the KV heads")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"{where}: axis must be one of x, from {-x.ndim} to {x.ndim - 1}, got "
            f"{axis}; x is {show(x)}"
        )
    return x, axis % x.ndim
