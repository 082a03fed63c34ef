"""A small manager, steps that its pool goes through, and who reads its capsules."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import jax_kvblock as kv

NL, NO, NT, NH, HD = 3, 2, 4, 2, 5
BLOCKS = 6


def make_manager(**changes: Any) -> kv.BlockManager:
    arguments = {
        "num_kv_heads": NH,
        "head_dim": HD,
        "dtype": jnp.float32,
        "num_blocks": BLOCKS,
        **changes,
    }
    return kv.BlockManager(NL, NT, **arguments)


def add(pool: kv.KVPool, number: Any = 1) -> kv.KVPool:
    return jax.tree.map(lambda x: x + number, pool)


donate = jax.jit(add, donate_argnums=0)


class Holder:
    """Gives its capsule to NumPy, which takes no bare one."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0
