"""Heads for rows: every device gets some of the heads, of more of the sequence.

Devices exchange in groups of neighbours (DeepSpeed-Ulysses, Jacobs et al., 2023). With
one group the sequence is then whole on each; with several, groups are the places of a
ring (USP, Fang and Zhao, 2024). In zigzag, the chunks of a group's devices are two runs
of the sequence: a zigzag of fewer and longer chunks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.parallel import axes


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What is compiled in.

    Attributes:
      axis_name, size: the mesh axis, or axes, and its devices.
      group: devices that exchange, a divisor of size.
      zigzag: how the sequence lies.
    """

    axis_name: Any
    size: int
    group: int
    zigzag: bool

    def heads(self, a: jax.Array, bounds: Any) -> jax.Array:
        """`[..., T, N, D]` to `[..., T group, N / group, D]`, in a ring's order.

        Fewer heads than devices are repeated: each device has one of them.
        """
        heads = a.shape[-2]
        if heads % self.group:
            a = jnp.repeat(a, self.group // heads, axis=-2)
        a = self._exchange(a, a.ndim - 2, a.ndim - 3)
        return self._in_order(a, a.ndim - 3, bounds)

    def rows(self, a: jax.Array, bounds: Any) -> jax.Array:
        """The way back: `[..., T group, N / group, D]` to `[..., T, N, D]`."""
        axis = a.ndim - 3
        order = self._order(a.shape[axis], bounds)
        if order is not None:
            places = jnp.arange(order.shape[0], dtype=jnp.int32)
            back = jnp.zeros_like(order).at[order].set(places, unique_indices=True)
            a = jnp.take(a, back, axis=axis, unique_indices=True)
        return self._exchange(a, axis, a.ndim - 2)

    def ids(self, a: Any, bounds: Any) -> Any:
        """`[B, T]`, the same for all heads, as `[B, T group]`."""
        if a is None:
            return None
        groups = axes.groups_of(self.size, self.group)
        a = axes.gather(a, self.axis_name, groups, a.ndim - 1)
        return self._in_order(a, a.ndim - 1, bounds)

    def own(self, a: Any) -> Any:
        """`[1|B, N, ...]`, of heads, as `[1|B, N / group, ...]` of this device's."""
        if a is None:
            return None
        count = a.shape[1] // self.group
        first = axes.index(self.axis_name) % self.group * count
        return jax.lax.dynamic_slice_in_dim(a, first, count, axis=1)

    def _exchange(self, a: jax.Array, split: int, join: int) -> jax.Array:
        groups = axes.groups_of(self.size, self.group)
        return axes.exchange(a, self.axis_name, groups, split, join)

    def _in_order(self, a: jax.Array, axis: int, bounds: Any) -> jax.Array:
        order = self._order(a.shape[axis], bounds)
        if order is None:
            return a
        return jnp.take(a, order, axis=axis, unique_indices=True)

    def _order(self, length: int, bounds: Any) -> Any:
        """From a group's rows, device by device, to those of a place in a zigzag.

        A document's first chunks come in the order of the devices, its second ones
        against it. Rows of no document are taken for one.
        """
        if not self.zigzag:
            return None
        group = self.group
        total = length * self.size // group
        if bounds is None:
            bounds = jnp.asarray([0, total], jnp.int32)
        else:
            ends = jnp.zeros((1,), jnp.int32)
            bounds = jnp.concatenate([ends, bounds, ends + total])
        bounds = bounds // self.size  # in one device's rows
        row = jnp.arange(length, dtype=jnp.int32)
        found = jnp.searchsorted(bounds[1:-1] * group, row, side="right")
        first, last = bounds[found], bounds[found + 1]
        chunk = (last - first) // 2
        within = row - first * group
        run = jnp.maximum(chunk, 1)
        device = within // run  # of the first chunks, then of the second ones
        late = device >= group
        device = jnp.where(late, 2 * group - 1 - device, device)
        own = first + within % run + jnp.where(late, chunk, 0)
        return device * (length // group) + own
