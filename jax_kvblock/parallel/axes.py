"""Mesh axes inside of `jax.shard_map`: all that talks to other devices.

Devices of an axis lie in groups, side by side; those at the same place of all groups
are a ring. One group of all, or one device a group, are the ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax


def axis_size(where: str, axis_name: Any) -> int:
    """How many devices a mesh axis has, or several axes together."""
    try:
        if isinstance(axis_name, int):  # JAX takes it for a dim of what vmap maps
            raise NameError
        return jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"{where}: axis_name must be a mesh axis of the jax.shard_map around the "
            f"call, got {axis_name!r}; call it inside of "
            "jax.shard_map(f, mesh=mesh, in_specs=..., out_specs=...), with the axis "
            "that the sequence is cut over"
        ) from None


def hashable(axis_name: Hashable | Sequence[Hashable]) -> Any:
    return tuple(axis_name) if isinstance(axis_name, (list, tuple)) else axis_name


def index(axis_name: Any) -> jax.Array:
    """Which device of the axis this is."""
    return jax.lax.axis_index(axis_name)


def send(a: jax.Array, axis_name: Any, size: int, group: int, by: int) -> jax.Array:
    """To the device `by` places on in its ring of `size`; what is behind comes here."""
    pairs = [
        (r * group + h, (r + by) % size * group + h)
        for r in range(size)
        for h in range(group)
    ]
    return jax.lax.ppermute(a, axis_name, pairs)


def gather(
    a: jax.Array, axis_name: Any, rings: Sequence[Sequence[int]] | None, axis: int
) -> jax.Array:
    """`axis` of all devices of a ring, or of a group, one behind the other."""
    return jax.lax.all_gather(
        a, axis_name, axis=axis, tiled=True, axis_index_groups=rings
    )


def scatter_sum(
    a: jax.Array, axis_name: Any, rings: Sequence[Sequence[int]] | None, axis: int
) -> jax.Array:
    """The sum over the devices of a ring, of which each gets its part of `axis`."""
    return jax.lax.psum_scatter(
        a, axis_name, scatter_dimension=axis, tiled=True, axis_index_groups=rings
    )


def exchange(
    a: jax.Array,
    axis_name: Any,
    groups: Sequence[Sequence[int]] | None,
    split: int,
    join: int,
) -> jax.Array:
    """Part i of `split` goes to device i of the group; parts that come are joined."""
    return jax.lax.all_to_all(
        a, axis_name, split, join, tiled=True, axis_index_groups=groups
    )


def groups_of(size: int, group: int) -> list[list[int]] | None:
    """The devices of each group of `group`; None where there is but one."""
    if group == size:
        return None
    return [list(range(first, first + group)) for first in range(0, size, group)]


def rings_of(size: int, group: int) -> list[list[int]] | None:
    """The devices of each ring of `size`; None where there is but one."""
    if group == 1:
        return None
    return [list(range(h, size * group, group)) for h in range(group)]
