"""What a step may write in place: no memory twice, and none that stays in use."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def apart(donated: Any, kept: Any) -> Any:
    """`donated`, with copies of arrays that share memory with others of it or `kept`.

    Two parameters may begin as one array, and XLA takes no buffer twice. Arrays that
    are not one object may share memory all the same, as `jax.device_put` gives them.
    """
    seen = set().union(*map(_places, jax.tree.leaves(kept)))

    def own(x: Any) -> Any:
        places = _places(x)
        if not seen.isdisjoint(places):
            return jnp.copy(x)
        seen.update(places)
        return x

    return jax.tree.map(own, donated)


def _places(x: Any) -> set[tuple[jax.Device, int]]:
    """Where this process has an array; nowhere, if it is NumPy's or a number."""
    if not isinstance(x, jax.Array):
        return set()
    return {(s.device, s.data.unsafe_buffer_pointer()) for s in x.addressable_shards}
