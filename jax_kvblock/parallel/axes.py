"""Mesh axes inside of `jax.shard_map`: how large they are, who sends to whom."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax


def axis_size(where: str, axis_name: Any) -> int:
    """How many devices a mesh axis has, or several axes together."""
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"{where}: axis_name must be a mesh axis of the jax.shard_map around the "
            f"call, got {axis_name!r}; call it inside of "
            "jax.shard_map(f, mesh=mesh, in_specs=..., out_specs=...), with the axis "
            "that the sequence is cut over"
        ) from None


def hop(size: int, group: int, by: int) -> list[tuple[int, int]]:
    """Every device sends to the one `by` groups further on, at the same place in it.

    Devices lie in size groups of `group`, one behind the other.
    """
    return [
        (r * group + h, (r + by) % size * group + h)
        for r in range(size)
        for h in range(group)
    ]


def groups_of(size: int, group: int) -> list[list[int]] | None:
    """The devices in groups that lie side by side; None where there is but one."""
    if group == size:
        return None
    return [list(range(first, first + group)) for first in range(0, size, group)]


def hashable(axis_name: Hashable | Sequence[Hashable]) -> Any:
    return tuple(axis_name) if isinstance(axis_name, (list, tuple)) else axis_name


def rings_of(size: int, group: int) -> list[list[int]] | None:
    """The devices at the same places of all groups; None where they are all there are.

    There are `size` groups.
    """
    if group == 1:
        return None
    return [list(range(h, size * group, group)) for h in range(group)]
