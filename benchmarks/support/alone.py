"""One device's part of work that is cut over several, on a machine that has but one.

What would be sent comes back as it is: what is computed, and its time, are that
device's; its result is not. Nothing travels, so a time is a lower bound.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from jax_kvblock.parallel import axes


@contextlib.contextmanager
def one_of(size: int, place: Any) -> Iterator[None]:
    """While tracing: this is device `place` (it may be traced) of an axis of `size`."""

    def count(groups: Sequence[Sequence[int]] | None) -> int:
        return size if groups is None else len(groups[0])

    def send(a: jax.Array, *_: Any) -> jax.Array:
        return a

    def gather(a: jax.Array, _: Any, groups: Any, axis: int) -> jax.Array:
        return jnp.concatenate([a] * count(groups), axis)

    def scatter_sum(a: jax.Array, _: Any, axis: int) -> jax.Array:
        return jax.lax.slice_in_dim(a, 0, a.shape[axis] // size, axis=axis)

    def exchange(a: jax.Array, _: Any, groups: Any, split: int, join: int) -> jax.Array:
        part = jax.lax.slice_in_dim(a, 0, a.shape[split] // count(groups), axis=split)
        return jnp.concatenate([part] * count(groups), join)

    with mock.patch.multiple(
        axes,
        axis_size=lambda where, axis_name: size,
        index=lambda axis_name: place,
        send=send,
        gather=gather,
        scatter_sum=scatter_sum,
        exchange=exchange,
    ):
        yield
