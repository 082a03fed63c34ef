"""What the primitives' batching rules share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def batch_one_by_one(
    bind: Callable[..., Sequence[Any]], operands: Sequence[Any], dims: Sequence[Any]
) -> tuple[list[Any], list[int]]:
    """A batching rule for what does not fold: a loop over the batch's members."""
    moved = [
        x if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    ]
    batched = [x for x, d in zip(moved, dims, strict=True) if d is not None]

    def member(parts: Sequence[Any]) -> Sequence[Any]:
        rest = iter(parts)
        every = [
            x if d is None else next(rest) for x, d in zip(moved, dims, strict=True)
        ]
        return bind(*every)

    results = jax.lax.map(member, batched)
    return list(results), [0] * len(results)
