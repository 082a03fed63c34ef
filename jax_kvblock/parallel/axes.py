"""Mesh axes inside of `jax.shard_map`: all that talks to other devices.

Devices of an axis lie in groups, side by side; those at the same place of all groups
are a ring. One group of all, or one device a group, are the ends.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np


def axis_size(where: str, axis_name: Any) -> int:
    """How many devices a mesh axis has, or several axes together."""
    names = axis_name if isinstance(axis_name, (list, tuple)) else ()
    if any(names.count(name) > 1 for name in names):
        raise ValueError(
            f"{where}: axis_name must have each mesh axis once, got {axis_name!r}"
        )
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


def check_own(where: str, *named_arrays: tuple[str, Any]) -> None:
    """No array is cut over an explicit axis that the shard_map around it leaves out.

    An automatic axis beside it is the compiler's; an explicit one would be a part of
    the types of all that is computed.
    """
    for name, array in named_arrays:
        if not isinstance(array, jax.core.Tracer):
            continue
        cut = jax.typeof(array).sharding.spec
        named = [x for of in cut for x in (of if isinstance(of, tuple) else (of,)) if x]
        if named:
            raise ValueError(
                f"{where}: {name} must not be cut over explicit axes beside the "
                f"jax.shard_map around the call, got {', '.join(map(repr, named))}; "
                "name them in its axis_names and in_specs, too"
            )


def hashable(axis_name: Hashable | Sequence[Hashable]) -> Any:
    return tuple(axis_name) if isinstance(axis_name, (list, tuple)) else axis_name


def index(axis_name: Any) -> jax.Array:
    """Which device of the axis this is."""
    return jax.lax.axis_index(axis_name)


def send(a: jax.Array, axis_name: Any, size: int, group: int, by: int) -> jax.Array:
    """To the device `by` places on in its ring of `size`; what is behind comes here."""
    names, number = _in_mesh_order(axis_name, size * group)
    pairs = [
        (number[r * group + h], number[(r + by) % size * group + h])
        for r in range(size)
        for h in range(group)
    ]
    return jax.lax.ppermute(a, names, pairs)


def _in_mesh_order(axis_name: Any, size: int) -> tuple[Any, list[int]]:
    """Axes as `ppermute` takes them, and by what number it knows each device then.

    With several axes it counts in the mesh's order, and `axis_index` in that of the
    names.
    """
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    mesh = [x for x in jax.sharding.get_abstract_mesh().axis_names if x in names]
    if len(names) < 2 or len(mesh) < len(names):
        return axis_name, list(range(size))
    places = np.arange(size).reshape([jax.lax.axis_size(x) for x in mesh])
    number = places.transpose([mesh.index(x) for x in names]).reshape(-1)
    return tuple(mesh), number.tolist()


def gather(
    a: jax.Array, axis_name: Any, groups: Sequence[Sequence[int]] | None, axis: int
) -> jax.Array:
    """`axis` of all devices, or of all of a group, one behind the other."""
    if not a.shape[axis]:  # XLA gathers no dim of nothing
        return a
    return jax.lax.all_gather(
        a, axis_name, axis=axis, tiled=True, axis_index_groups=groups
    )


def scatter_sum(a: jax.Array, axis_name: Any, axis: int) -> jax.Array:
    """The sum over the devices, of which each gets its part of `axis`."""
    return jax.lax.psum_scatter(a, axis_name, scatter_dimension=axis, tiled=True)


def exchange(
    a: jax.Array,
    axis_name: Any,
    groups: Sequence[Sequence[int]] | None,
    split: int,
    join: int,
) -> jax.Array:
    """Part i of `split` goes to device i of the group; parts that come are joined."""
    if groups is None:
        return jax.lax.all_to_all(a, axis_name, split, join, tiled=True)
    return _exchange_in(a, axis_name, tuple(map(tuple, groups)), split, join)


Groups = tuple[tuple[int, ...], ...]


# JAX maps no all_to_all of groups, and takes no gradient of what says how it is mapped.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _exchange_in(
    a: jax.Array, axis_name: Any, groups: Groups, split: int, join: int
) -> jax.Array:
    @jax.custom_batching.custom_vmap
    def run(a: jax.Array) -> jax.Array:
        lists = [list(group) for group in groups]
        return jax.lax.all_to_all(
            a, axis_name, split, join, tiled=True, axis_index_groups=lists
        )

    @run.def_vmap
    def _(axis_size: int, mapped: list[bool], a: jax.Array) -> tuple[jax.Array, bool]:
        return _exchange_in(a, axis_name, groups, split + 1, join + 1), True

    return run(a)


def _exchange_forward(a: jax.Array, *how: Any) -> tuple[jax.Array, None]:
    return _exchange_in(a, *how), None


def _exchange_backward(
    axis_name: Any, groups: Groups, split: int, join: int, _: None, d: jax.Array
) -> tuple[jax.Array]:
    return (_exchange_in(d, axis_name, groups, join, split),)


_exchange_in.defvjp(_exchange_forward, _exchange_backward)


def groups_of(size: int, group: int) -> list[list[int]] | None:
    """The devices of each group of `group`; None where there is but one."""
    if group == size:
        return None
    return [list(range(first, first + group)) for first in range(0, size, group)]
